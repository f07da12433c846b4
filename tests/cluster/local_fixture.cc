#include "tests/cluster/local_fixture.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "common/files.h"

namespace zeroshard::cluster {
namespace {

namespace fs = std::filesystem;

constexpr char kJob[] = R"(name: small
model: {architecture: gpt2, hidden_size: 64, layers: 2, heads: 2, sequence_length: 32, vocab_size: 256}
data: {train: [text.txt], tokenizer: bytes}
resources: {workers: 2}
train_batch_size: 8
train_micro_batch_size_per_gpu: 2
steps: 20
seed: 3
optimizer: {type: AdamW, params: {lr: 1.0e-2, weight_decay: 0.1}}
scheduler: {type: cosine, params: {warmup_steps: 2, min_lr: 1.0e-4}}
gradient_clipping: 1.0
zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0}
)";

}  // namespace

LocalTest::LocalTest() : program_(ZEROSHARD_CLIENT_PROGRAM) {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  // Of a test with parameters the name has slashes.
  const std::string name = absl::StrReplaceAll(test->name(), {{"/", "_"}});
  folder_ = (fs::path(testing::TempDir()) / absl::StrCat("zs_", name, "_", getpid())).string();
  fs::create_directories(folder_);
  job_ = folder_ + "/job.yaml";
  std::ofstream(job_) << kJob;
  std::ofstream text(folder_ + "/text.txt");
  for (int i = 0; i < 400; ++i) text << "line " << i << " of a text that is easily learnt\n";
}

LocalTest::~LocalTest() {
  if (!HasFailure()) {
    fs::remove_all(folder_);
    return;
  }
  for (const auto& entry : fs::recursive_directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() == ".log" || entry.path().extension() == ".err") {
      ADD_FAILURE() << "---- " << entry.path() << "\n" << ReadText(entry.path().string());
    }
  }
}

std::unique_ptr<Process> LocalTest::StartLocal(const std::string& workdir,
                                               const std::vector<std::string>& more) {
  std::vector<std::string> argv = {program_,
                                   "local",
                                   job_,
                                   "--workers",
                                   absl::StrCat(workers_),
                                   "--threads",
                                   "1",
                                   "--workdir",
                                   folder_ + "/" + workdir};
  argv.insert(argv.end(), more.begin(), more.end());
  return std::make_unique<Process>(argv, absl::StrCat(folder_, "/process-", processes_++));
}

std::unique_ptr<Process> LocalTest::Run(const std::vector<std::string>& args) {
  std::vector<std::string> argv = {program_};
  argv.insert(argv.end(), args.begin(), args.end());
  auto process = std::make_unique<Process>(argv, absl::StrCat(folder_, "/process-", processes_++));
  process->Wait(kPatience);
  return process;
}

std::vector<std::string> LocalTest::History(const std::string& workdir) const {
  return absl::StrSplit(ReadText(WorkPath(workdir, "jobs/small/history.jsonl")), '\n',
                        absl::SkipEmpty());
}

bool LocalTest::AwaitSteps(const std::string& workdir, size_t steps, Process* local) {
  Eventually(kPatience, [&] { return History(workdir).size() >= steps || local->Ended(); });
  if (History(workdir).size() >= steps && !local->Ended()) return true;
  ADD_FAILURE() << "the job did not get to step " << steps << " and go on\n"
                << local->Out() << local->Err();
  return false;
}

pid_t LocalTest::PidOf(const std::string& workdir, const std::string& daemon) const {
  const auto ports = ReadPortFile(WorkPath(workdir, absl::StrCat("run/", daemon, ".port")));
  return ports.ok() ? static_cast<pid_t>(ports->pid) : 0;
}

std::string LocalTest::AddressOf(const std::string& workdir, const std::string& daemon) const {
  const auto ports = ReadPortFile(WorkPath(workdir, absl::StrCat("run/", daemon, ".port")));
  return ports.ok() ? ports->grpc : "";
}

std::vector<std::string> LocalTest::Daemons(const std::string& workdir) const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(WorkPath(workdir, "run"), error), end; !error && it != end;
       it.increment(error)) {
    if (it->path().extension() == ".port") names.push_back(it->path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<pid_t> LocalTest::AllPids(const std::string& workdir) const {
  std::vector<pid_t> pids;
  for (const std::string& daemon : Daemons(workdir)) {
    if (const pid_t pid = PidOf(workdir, daemon); pid > 0) pids.push_back(pid);
  }
  return pids;
}

nlohmann::ordered_json LocalTest::LastStatus(const Process& local) {
  nlohmann::ordered_json last;
  for (const auto line : absl::StrSplit(local.Out(), '\n', absl::SkipEmpty())) {
    auto json = nlohmann::ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.contains("status")) last = std::move(json["status"]);
  }
  return last;
}

void LocalTest::ExpectAllGone(const std::vector<pid_t>& pids) {
  for (const pid_t pid : pids) {
    EXPECT_TRUE(Eventually(kPatience, [pid] { return !IsAlive(pid); })) << "pid " << pid;
  }
}

std::vector<std::string> WithoutCosts(const std::vector<std::string>& history) {
  std::vector<std::string> lines;
  for (const std::string& line : history) {
    const size_t end = std::min(line.find(",\"seconds\""), line.find(",\"steps_lost\""));
    lines.push_back(line.substr(0, end));
  }
  return lines;
}

}  // namespace zeroshard::cluster
