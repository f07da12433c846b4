// The client's commands as a user gives them, against a coordinator of the test's.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/fake_jobs.h"

namespace zeroshard {

inline constexpr char kJob[] = R"(name: tiny
model: {architecture: gpt2, hidden_size: 64, layers: 1, heads: 2, sequence_length: 16, vocab_size: 256}
data: {train: [text.txt, /abs/b], tokenizer: bytes}
resources: {workers: 2}
train_batch_size: 8
train_micro_batch_size_per_gpu: 2
steps: 2
)";

struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
};

class CommandTest : public testing::Test {
 protected:
  CommandTest() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::path(testing::TempDir()) /
              absl::StrCat("command_", test->name(), "_", getpid());
    std::filesystem::create_directories(folder_);
    job_ = (folder_ / "job.yaml").string();
    Write(job_, kJob);
  }
  ~CommandTest() override { std::filesystem::remove_all(folder_); }

  static void Write(const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
  }

  Outcome Run(const std::vector<std::string>& args) {
    std::ostringstream out, err;
    Environment env;
    env.out = &out;
    env.err = &err;
    env.terminal = terminal_;
    env.coordinator = fake_.address();
    env.program = (folder_ / "bin" / "zeroshard").string();
    const int code = RunClient(args, env);
    return {code, out.str(), err.str()};
  }

  // One message of one line (a job's ended line apart), as the user sees it.
  static void ExpectOneMessage(const Outcome& outcome) {
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_THAT(outcome.err, testing::StartsWith("zeroshard: "));
  }

  FakeJobs fake_;
  std::filesystem::path folder_;
  std::string job_;
  bool terminal_ = false;
};

}  // namespace zeroshard
