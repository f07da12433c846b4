// What a command sees of the world around it, so that tests can run one in their own process.
#pragma once

#include <ostream>
#include <string>

namespace zeroshard {

struct Environment {
  std::ostream* out = nullptr;
  std::ostream* err = nullptr;
  bool terminal = false;    // `out` is a terminal: progress is redrawn in place
  int width = 80;           // its columns
  std::string coordinator;  // the default of --coordinator
  std::string program;      // path of this executable; daemons are looked for beside it
};

}  // namespace zeroshard
