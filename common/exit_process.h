// The end of a process in which something hangs or is broken for good.
#pragma once

#include <cstdlib>
#include <string>

#include "common/exit_codes.h"
#include "common/log.h"

namespace zeroshard {

// Logs the message and ends the process with kExitFailed, without destructors: they would hang too.
// Its supervisor starts another.
[[noreturn]] inline void ExitProcess(const std::string& message) {
  LogError(message);
  std::_Exit(kExitFailed);
}

}  // namespace zeroshard
