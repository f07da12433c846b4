// `zeroshard generate` becomes another program: each test runs it in a child process, with a script
// in the worker's place that shows what it was given.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "client/cli.h"
#include "common/exit_codes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

constexpr char kScript[] = R"(#!/bin/sh
for argument in "$@"; do echo "[$argument]"; done
exit 7
)";

class GenerateCommandTest : public testing::Test {
 protected:
  struct Outcome {
    int code = -1;
    std::string out;  // of both streams
  };

  std::string AddWorker(const std::string& folder) {
    fs::create_directories(folder);
    const std::string path = folder + "/zeroshard-worker";
    std::ofstream(path) << kScript;
    fs::permissions(path, fs::perms::owner_all);
    return folder;
  }

  Outcome Run(const std::vector<std::string>& args) {
    const std::string log = temp_ / "log";
    std::fflush(nullptr);  // what is buffered would come out twice
    const pid_t child = fork();
    if (child == 0) {
      const int fd = open(log.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
      dup2(fd, STDOUT_FILENO);
      dup2(fd, STDERR_FILENO);
      Environment env;
      env.out = &std::cout;
      env.err = &std::cerr;
      env.program = temp_ / "bin/zeroshard";
      const int code = RunClient(args, env);
      std::cout.flush();
      _exit(code);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    return {WEXITSTATUS(status), Contents(log)};
  }

  TempFolder temp_;
};

TEST_F(GenerateCommandTest, PassesOnWhatWasGivenAndIsTheWorkersExitCode) {
  AddWorker(temp_ / "bin");
  const Outcome plain = Run({"generate", "--model", "/m", "--prompt", "Once upon"});
  EXPECT_EQ(plain.code, 7);
  EXPECT_EQ(plain.out, "[generate]\n[--output]\n[text]\n[--model=/m]\n[--prompt=Once upon]\n");
  const Outcome full = Run({"generate", "--model=/m", "--prompt=-x", "--max-tokens", "9",
                            "--temperature", "0.7", "--top-k", "40", "--seed", "5", "--threads",
                            "2", "--dtype", "bf16", "--tokenizer", "bytes", "--output", "json"});
  EXPECT_EQ(full.out,
            "[generate]\n[--output]\n[json]\n[--model=/m]\n[--prompt=-x]\n[--tokenizer=bytes]\n"
            "[--max-tokens=9]\n[--temperature=0.7]\n[--top-k=40]\n[--seed=5]\n[--threads=2]\n"
            "[--dtype=bf16]\n");
}

TEST_F(GenerateCommandTest, FindsTheWorkerInABuildFolderAndWhereItIsTold) {
  const std::vector<std::string> args = {"generate", "--model", "m", "--prompt", "p"};
  const Outcome missing = Run(args);
  EXPECT_EQ(missing.code, kExitNotFound);
  EXPECT_THAT(missing.out, AllOf(HasSubstr("zeroshard-worker is not in"), HasSubstr("--bin-dir")));
  AddWorker(temp_ / "worker");  // beside the folder of `zeroshard`
  EXPECT_EQ(Run(args).code, 7);
  fs::remove_all(temp_ / "worker");
  std::vector<std::string> told = args;
  told.insert(told.end(), {"--bin-dir", AddWorker(temp_ / "elsewhere")});
  EXPECT_EQ(Run(told).code, 7);
}

TEST_F(GenerateCommandTest, RefusesMisuseItself) {
  AddWorker(temp_ / "bin");
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{"generate", "--model", "m"},
        {"generate", "--prompt", "p"},
        {"generate", "--model", "m", "--prompt", "p", "--max-tokens", "0"},
        {"generate", "--model", "m", "--prompt", "p", "--temperature", "-1"},
        {"generate", "--model", "m", "--prompt", "p", "--dtype", "fp8"},
        {"generate", "--model", "m", "--prompt", "p", "--tokens", "3"}}) {
    const Outcome outcome = Run(args);
    EXPECT_EQ(outcome.code, kExitUsage) << outcome.out;
  }
}

TEST_F(GenerateCommandTest, OneLineNamesANumberThatCannotBe) {
  AddWorker(temp_ / "bin");
  const std::pair<std::string, std::string> cases[] = {{"--seed", "18446744073709551616"},
                                                       {"--seed", "1.5"},
                                                       {"--seed", "-1"},
                                                       {"--top-k", "99999999999999999999"},
                                                       {"--top-k", "9223372036854775808"},
                                                       {"--temperature", "inf"},
                                                       {"--temperature", "-1"},
                                                       {"--temperature", "nan"}};
  for (const auto& [option, value] : cases) {
    const Outcome outcome =
        Run({"generate", "--model", "m", "--prompt", "p", option + "=" + value});
    EXPECT_EQ(outcome.code, kExitUsage) << outcome.out;
    EXPECT_THAT(outcome.out, AllOf(HasSubstr(option + ": seen " + value + ", wanted"),
                                   testing::SizeIs(testing::Lt(160))));
    EXPECT_EQ(std::count(outcome.out.begin(), outcome.out.end(), '\n'), 1) << outcome.out;
  }
  EXPECT_THAT(Run({"generate", "--model=m", "--prompt=p", "--seed=18446744073709551615"}).out,
              HasSubstr("[--seed=18446744073709551615]"));
}

}  // namespace
}  // namespace zeroshard
