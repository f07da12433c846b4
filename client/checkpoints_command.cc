#include <algorithm>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "client/byte_progress.h"
#include "client/command.h"
#include "client/console.h"
#include "client/render.h"
#include "common/checkpoint/reader.h"
#include "common/checkpoint/state_digest.h"
#include "common/checkpoint/store.h"
#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/plan/model_table.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

absl::StatusOr<int> List(const CommandContext& context, const std::string& job) {
  if (job.empty()) {
    return absl::InvalidArgumentError(
        "which job's checkpoints? Wanted zeroshard checkpoints JOB, or zeroshard checkpoints "
        "verify DIR");
  }
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  ZS_ASSIGN_OR_RETURN(const v1::CheckpointsResponse checkpoints, client->Checkpoints(job));
  *context.env->out << (context.options.json()
                            ? JsonLine(ToJson(checkpoints)) + "\n"
                            : FormatCheckpoints(checkpoints, SystemClock::Get().Wall()));
  return kExitOk;
}

struct Verified {
  std::string path;
  uint64_t step = 0;
  uint64_t bytes = 0;
  double seconds = 0;
  absl::Status status;
};

// What loading checks besides the files' checksums: that the checkpoint is of its own model, with
// every moment that training needs, and that its values are what was saved.
absl::Status VerifyValues(const CheckpointReader& reader) {
  const Manifest& manifest = reader.manifest();
  const absl::StatusOr<ModelTable> model = MakeModelTable(manifest.spec.model());
  if (!model.ok()) {
    return absl::Status(model.status().code(),
                        absl::StrCat("its manifest's model: ", model.status().message()));
  }
  ZS_RETURN_IF_ERROR(reader.CheckModel(*model, /*moments=*/true));
  for (int i = 0; i < kStateKinds; ++i) {
    const auto kind = static_cast<StateKind>(i);
    const std::string& wanted = manifest.digests[i];
    if (wanted.empty()) continue;
    ZS_ASSIGN_OR_RETURN(const std::string seen, DigestOf(reader, *model, kind));
    if (seen == wanted) continue;
    return absl::DataLossError(absl::StrCat(
        "the values of ", NameOf(kind), " have the digest ", seen, "; its manifest wants ", wanted,
        ": the files are not what was saved; use another checkpoint"));
  }
  return absl::OkStatus();
}

Verified VerifyOne(Console* console, const std::string& path) {
  Verified verified;
  verified.path = path;
  const auto reader = CheckpointReader::Open(path);
  verified.status = reader.status();
  if (!reader.ok()) return verified;
  verified.step = (*reader)->manifest().step;
  const std::string name = std::filesystem::path(path).filename().string();
  if (IsCheckpointPath(path) && name != CheckpointName(verified.step)) {
    verified.status = absl::DataLossError(
        absl::StrCat("the folder is named ", name, " and its manifest is of step ", verified.step,
                     ": no job finds it there; rename it to ", CheckpointName(verified.step)));
    return verified;
  }
  uint64_t total = 0;
  for (const CheckpointFile& file : (*reader)->manifest().files) total += file.bytes;
  ByteProgress progress(console, path.substr(path.rfind('/') + 1), total);
  // Side by side, so that the disk gives every byte once. Where a file is damaged, that is the
  // error, not what its values are.
  std::future<absl::Status> files = std::async(
      [&] { return (*reader)->VerifyFiles(0, 1, [&](uint64_t bytes) { progress.Add(bytes); }); });
  const absl::Status values = VerifyValues(**reader);
  verified.status = files.get();
  if (verified.status.ok()) verified.status = values;
  verified.bytes = progress.done();
  verified.seconds = progress.seconds();
  return verified;
}

// One checkpoint, or those that a folder of them holds.
absl::StatusOr<std::vector<std::string>> PathsIn(std::string dir) {
  while (dir.size() > 1 && dir.back() == '/') dir.pop_back();
  std::error_code error;
  if (!std::filesystem::is_directory(dir, error)) {
    return absl::NotFoundError(
        absl::StrCat(dir, " is no folder; wanted a checkpoint or a folder of checkpoints"));
  }
  if (IsCheckpointPath(dir)) return std::vector<std::string>{dir};
  ZS_ASSIGN_OR_RETURN(const std::vector<CheckpointSummary> list, ListCheckpoints(dir));
  std::vector<std::string> paths;
  for (const CheckpointSummary& checkpoint : list) paths.push_back(checkpoint.path);
  if (paths.empty()) {
    return absl::NotFoundError(
        absl::StrCat(dir, " holds no checkpoint; wanted one, or a folder with step-* in it"));
  }
  return paths;
}

absl::StatusOr<int> Verify(const CommandContext& context, const std::string& dir) {
  ZS_ASSIGN_OR_RETURN(const std::vector<std::string> paths, PathsIn(dir));
  Console console(*context.env);
  int unsound = 0;
  for (const std::string& path : paths) {
    const Verified verified = VerifyOne(&console, path);
    if (!verified.status.ok()) ++unsound;
    const std::string problem(verified.status.message());
    if (context.options.json()) {
      nlohmann::ordered_json json = {
          {"path", path},          {"sound", verified.status.ok()}, {"problem", problem},
          {"step", verified.step}, {"bytes", verified.bytes},       {"seconds", verified.seconds}};
      console.Print(JsonLine(json));
    } else if (verified.status.ok()) {
      console.Print(absl::StrCat(Shown(path), ": sound, step ", verified.step, ", ",
                                 FormatBytes(verified.bytes), " in ",
                                 absl::StrFormat("%.1f s", verified.seconds)));
    } else {
      console.Print(absl::StrCat(Shown(path), ": NOT SOUND: ", Shown(problem)));
    }
  }
  if (unsound == 0) return kExitOk;
  return absl::DataLossError(absl::StrCat(unsound, " of ", paths.size(), " checkpoint",
                                          paths.size() == 1 ? "" : "s", " under ", dir,
                                          paths.size() == 1 ? " is" : " are", " not sound"));
}

}  // namespace

void AddCheckpointsCommand(CLI::App* app, CommandContext* context) {
  const auto job = std::make_shared<std::string>();
  const auto dir = std::make_shared<std::string>();
  const auto list = [context, job] { return List(*context, *job); };
  CLI::App* checkpoints = AddCommand(app, context, "checkpoints",
                                     "Lists a job's checkpoints, or verifies some on disk", list);
  checkpoints->add_option("job", *job, "Name or run id");
  CLI::App* verify = AddCommand(
      checkpoints, context, "verify",
      "Reads checkpoints whole: every checksum, and that their values are those saved, each once",
      [context, dir] { return Verify(*context, *dir); }, /*remote=*/false);
  verify->add_option("dir", *dir, "A checkpoint, or a folder of them")->required();
  // An outer command's callback comes last.
  checkpoints->callback([context, list, verify] {
    if (!verify->parsed()) context->run = list;
  });
}

}  // namespace zeroshard
