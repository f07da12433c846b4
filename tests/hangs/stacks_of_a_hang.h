// Where a test hangs: shortly before ctest ends it, every thread says what it is doing.
#pragma once

#include <chrono>

namespace zeroshard {

// Writes the stacks of all threads of this process to standard error. What they wait in may end
// early (EINTR); where one does not answer within a second it is left out.
void WriteStacks();

// A thread that calls WriteStacks once, after so long.
void WriteStacksAfter(std::chrono::seconds seconds);

}  // namespace zeroshard
