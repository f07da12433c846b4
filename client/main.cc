#include <sys/ioctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "client/cli.h"
#include "common/grpc_log.h"

namespace {

constexpr char kDefaultCoordinator[] = "127.0.0.1:7070";

zeroshard::Environment FromProcess() {
  zeroshard::Environment env;
  env.out = &std::cout;
  env.err = &std::cerr;
  env.terminal = isatty(STDOUT_FILENO) == 1;
  winsize size = {};
  if (env.terminal && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    env.width = size.ws_col;
  }
  const char* coordinator = std::getenv("ZEROSHARD_COORDINATOR");
  env.coordinator =
      coordinator != nullptr && *coordinator != '\0' ? coordinator : kDefaultCoordinator;
  std::error_code ignored;
  env.program = std::filesystem::read_symlink("/proc/self/exe", ignored).string();
  return env;
}

}  // namespace

int main(int argc, char** argv) {
  // Output into a closed pipe is an error of the stream, not a reason to leave children behind.
  std::signal(SIGPIPE, SIG_IGN);
  zeroshard::SilenceGrpcLog();
  return zeroshard::RunClient(std::vector<std::string>(argv + 1, argv + argc), FromProcess());
}
