// The `zeroshard` command: its subcommands and their exit codes.
#pragma once

#include <string>
#include <vector>

#include "client/environment.h"

namespace zeroshard {

// Runs one command line (without the program's name) and returns the shell's exit code
// (common/exit_codes.h). Results go to env.out; at most one message, which says what to do, to
// env.err. Blocks until the command is done; not to be run twice at once.
int RunClient(const std::vector<std::string>& args, const Environment& env);

}  // namespace zeroshard
