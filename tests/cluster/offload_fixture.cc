#include "tests/cluster/offload_fixture.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace zeroshard::cluster {

using Json = nlohmann::ordered_json;

std::vector<std::string> OffloadTest::Model(const std::string& architecture) {
  if (architecture == "gpt2") return {};
  return {"--set",
          "model={architecture: llama, hidden_size: 64, layers: 2, heads: 4, kv_heads: 2, "
          "sequence_length: 32, vocab_size: 256}"};
}

std::vector<std::string> OffloadTest::Offload(int stores, int replicas, bool parameters,
                                              const std::string& device) {
  std::vector<std::string> args = {
      "--stores", absl::StrCat(stores),
      "--set",    absl::StrCat("zero_optimization.offload_optimizer={device: ", device, "}"),
      "--set",    absl::StrCat("store={replicas: ", replicas, "}")};
  if (parameters) {
    args.insert(args.end(),
                {"--set", absl::StrCat("zero_optimization.offload_param={device: ", device, "}")});
  }
  return args;
}

std::vector<std::string> OffloadTest::Endless(std::vector<std::string> args) {
  args.insert(args.end(), {"--set", "steps=100000"});
  return args;
}

std::vector<std::string> OffloadTest::Endurance(int stores, int replicas, bool parameters,
                                                const std::string& device) {
  std::vector<std::string> args = Offload(stores, replicas, parameters, device);
  args.insert(args.end(), {"--set", "steps=120", "--set", "bf16.enabled=true"});
  return args;
}

std::unique_ptr<Process> OffloadTest::StartJson(const std::string& workdir,
                                                const std::vector<std::string>& args) {
  std::vector<std::string> more = args;
  more.insert(more.end(), {"--output", "json"});
  return StartLocal(workdir, more);
}

OffloadTest::Result OffloadTest::Finish(const std::string& workdir, Process* local) {
  EXPECT_EQ(local->Wait(2 * kPatience), 0) << local->Out() << local->Err();
  Result result;
  const std::vector<std::string> history = History(workdir);
  result.history = WithoutCosts(history);
  for (const std::string& line : history) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object()) result.steps_lost += json.value("steps_lost", uint64_t{0});
  }
  result.status = LastStatus(*local);
  if (result.status.contains("weights_digest")) result.digest = result.status["weights_digest"];
  return result;
}

OffloadTest::Result OffloadTest::Train(const std::string& workdir,
                                       const std::vector<std::string>& args) {
  const auto local = StartJson(workdir, args);
  return Finish(workdir, local.get());
}

bool OffloadTest::SawState(const Process& local, const std::string& state) {
  for (const auto line : absl::StrSplit(local.Out(), '\n', absl::SkipEmpty())) {
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("status")) continue;
    if (json["status"]["state"] == state) return true;
    for (const Json& event : json["status"]["events"]) {
      if (event["state"] == state) return true;
    }
  }
  return false;
}

std::string OffloadTest::MemberOfRank(const std::string& workdir, int rank) {
  const auto status = Run(
      {"status", "small", "--output", "json", "--coordinator", AddressOf(workdir, "coordinator")});
  const Json json = Json::parse(status->Out(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return "";
  for (const Json& entry : json["ranks"]) {
    if (entry["rank"] == rank) return entry["member"];
  }
  return "";
}

std::string OffloadTest::Checkpoint(const std::string& workdir, int step) const {
  return WorkPath(workdir, absl::StrFormat("ckpt/small/step-%08d/manifest.json", step));
}

void OffloadTest::ExpectSound(const std::string& checkpoints) {
  const auto verify = Run({"checkpoints", "verify", checkpoints});
  EXPECT_EQ(verify->Wait(kPatience), 0) << verify->Err();
}

}  // namespace zeroshard::cluster
