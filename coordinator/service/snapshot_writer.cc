#include "coordinator/service/snapshot_writer.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"
#include "common/log.h"
#include "common/plan/model_table.h"
#include "common/saving/completion.h"
#include "common/status_macros.h"

namespace zeroshard::coordinator {
namespace {

using Request =
    std::variant<OpenSnapshots, BeginSnapshot, CompleteSnapshot, AbandonSnapshot, CloseSnapshots>;

constexpr std::chrono::seconds kGrace(2);
constexpr size_t kDigestWords = 2 * kStateKinds;  // of SnapshotReport.digests

// One open run; used by its folder's thread alone.
struct OpenRun {
  OpenSnapshots opened;
  SaveExtras extras;
  bool trained = true;
  std::unique_ptr<CheckpointStore> store;
  uint64_t begun = 0;      // the step whose folder is there, unfinished
  std::string folder;      // that one
  uint64_t completed = 0;  // the last step that was
};

std::string WithoutSlash(std::string dir) {
  while (dir.size() > 1 && dir.back() == '/') dir.pop_back();
  return dir;
}

// The checkpoint that the run goes on from: what a coordinator before has completed and could not
// log any more, where there is such a one, else what the request says.
std::string FindResumed(const OpenSnapshots& request) {
  if (request.under_way == 0) return request.resumed_from;
  const std::string path = absl::StrCat(WithoutSlash(request.spec.checkpoint().dir()), "/",
                                        CheckpointName(request.under_way));
  const absl::StatusOr<FoundCheckpoint> found = FindCheckpoint(path);
  const bool own =
      found.ok() && found->manifest.run_id == request.run_id && found->manifest.job == request.job;
  return own ? path : request.resumed_from;
}

absl::StatusOr<OpenRun> Open(FileSystem* files, OpenSnapshots request) {
  OpenRun run;
  const std::string resumed_from = FindResumed(request);
  if (request.assets_from.empty() || resumed_from != request.resumed_from) {
    request.assets_from = resumed_from;
  }
  request.resumed_from = resumed_from;
  const v1::CheckpointSpec& spec = request.spec.checkpoint();
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(request.spec.model()));
  run.trained = std::any_of(model.units.begin(), model.units.end(),
                            [](const UnitTable& unit) { return unit.AnyTrainable(); });
  ZS_ASSIGN_OR_RETURN(run.extras,
                      ReadSaveExtras(request.spec, FindAssets(request.spec, request.assets_from)));
  CheckpointStoreOptions options;
  options.dir = spec.dir();
  options.job = request.job;
  options.run_id = request.run_id;
  options.keep_last = spec.keep_last();
  options.keep_every = spec.keep_every();
  options.resumed_from = request.resumed_from;
  ZS_ASSIGN_OR_RETURN(run.store, CheckpointStore::Open(files, options));
  run.opened = std::move(request);
  return run;
}

absl::StatusOr<std::string> Begin(OpenRun& run, uint64_t step) {
  if (run.begun != 0) run.store->Abandon(run.begun);
  run.begun = 0;
  ZS_ASSIGN_OR_RETURN(run.folder, run.store->Begin(step));
  run.begun = step;
  return run.folder;
}

absl::StatusOr<CompletedSave> Complete(FileSystem* files, int64_t unix_ms, OpenRun& run,
                                       const CompleteSnapshot& request,
                                       const std::function<bool()>& stopped) {
  if (run.begun != request.step) {
    return absl::FailedPreconditionError(
        absl::StrCat("step ", request.step, " has no folder here; ",
                     run.begun == 0 ? "none is being written"
                                    : absl::StrCat("step ", run.begun, " is being written")));
  }
  SaveContents contents;
  contents.spec = run.opened.spec;
  contents.job = run.opened.job;
  contents.run_id = run.opened.run_id;
  contents.step = request.step;
  contents.next_sample = request.next_sample;
  contents.loss_scale = request.loss_scale;
  contents.samples = request.samples;
  contents.unix_ms = unix_ms;
  contents.trained = run.trained;
  contents.folder = run.folder;
  if (request.files.empty()) {
    return absl::InvalidArgumentError("no store has written a file; wanted one of each");
  }
  for (const v1::SnapshotReport& report : request.files) {
    if (report.step() != request.step || !report.problem().empty() ||
        static_cast<size_t>(report.digests_size()) != kDigestWords) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a store's part \"", report.file(), "\" is of step ", report.step(), " with ",
          report.digests_size(), " digests", report.problem().empty() ? "" : ": ", report.problem(),
          "; wanted step ", request.step, " with ", kDigestWords, " digests"));
    }
    SavedPart& part = contents.parts.emplace_back();
    part.file = {.name = report.file(), .bytes = report.bytes(), .crc32c = report.crc32c()};
    for (int kind = 0; kind < kStateKinds; ++kind) {
      part.digests[kind] = {report.digests(2 * kind), report.digests(2 * kind + 1)};
    }
  }
  return CompleteSave(files, run.store.get(), contents, run.extras, nullptr, stopped);
}

v1::CheckpointRecord RecordOf(const std::string& dir, uint64_t step) {
  v1::CheckpointRecord record;
  record.set_step(step);
  record.set_path(absl::StrCat(WithoutSlash(dir), "/", CheckpointName(step)));
  return record;
}

const std::string& RunOf(const Request& request) {
  return std::visit([](const auto& r) -> const std::string& { return r.run_id; }, request);
}

// The answer to what cannot be done.
std::optional<Event> Refuse(const Request& request, const absl::Status& why) {
  if (const auto* open = std::get_if<OpenSnapshots>(&request)) {
    return SnapshotsOpened{open->run_id, why};
  }
  if (const auto* begin = std::get_if<BeginSnapshot>(&request)) {
    return SnapshotBegun{begin->run_id, begin->step, why};
  }
  v1::CheckpointRecord record;
  record.set_message(std::string(why.message()));
  if (const auto* complete = std::get_if<CompleteSnapshot>(&request)) {
    record.set_step(complete->step);
    return SnapshotCompleted{complete->run_id, complete->step, std::move(record)};
  }
  if (const auto* abandon = std::get_if<AbandonSnapshot>(&request)) {
    record.set_step(abandon->step);
    record.set_message(abandon->reason);
    return SnapshotCompleted{abandon->run_id, abandon->step, std::move(record)};
  }
  return std::nullopt;
}

absl::Status NotOpen(const std::string& run_id) {
  return absl::FailedPreconditionError(
      absl::StrCat("the checkpoint folder of ", run_id, " is not open here"));
}

}  // namespace

struct SnapshotWriter::Folder {
  std::deque<Request> requests;         // guarded by Shared::mutex
  std::condition_variable changed;      // of them
  std::map<std::string, OpenRun> runs;  // its thread's
};

struct SnapshotWriter::Shared : public std::enable_shared_from_this<Shared> {
  explicit Shared(Options given) : options(std::move(given)) {}

  // The folder's thread is started where there is none; without `dir` it is the one that the run
  // has opened.
  void Ask(const std::string& run_id, Request request, const std::string* dir = nullptr);
  void Post(std::optional<Event> event);

  // The thread of a folder, until nothing is open in it.
  void Main(const std::string& name, Folder& folder);
  std::optional<Event> CarryOut(Folder& folder, Request request);
  std::optional<Event> Finish(OpenRun& run, const CompleteSnapshot& request);

  const Options options;
  std::atomic<bool> stopping{false};
  std::mutex mutex;
  std::condition_variable ended;
  std::map<std::string, std::string> dirs;  // of open runs, by run id
  std::map<std::string, std::shared_ptr<Folder>> folders;
  size_t threads = 0;
  size_t posting = 0;
  bool closed = false;
};

void SnapshotWriter::Shared::Ask(const std::string& run_id, Request request,
                                 const std::string* dir) {
  absl::Status trouble = NotOpen(run_id);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (closed) return;
    if (dir != nullptr) dirs[run_id] = WithoutSlash(*dir);
    if (const auto known = dirs.find(run_id); known != dirs.end()) {
      const std::string name = known->second;
      if (std::holds_alternative<CloseSnapshots>(request)) dirs.erase(known);
      std::shared_ptr<Folder> folder = folders[name];
      if (folder == nullptr) {
        folder = std::make_shared<Folder>();
        try {
          std::thread([self = shared_from_this(), name, folder] {
            self->Main(name, *folder);
          }).detach();
          ++threads;
          folders[name] = folder;
        } catch (const std::system_error& error) {
          folders.erase(name);
          folder = nullptr;
          trouble = absl::ResourceExhaustedError(
              absl::StrCat("cannot start a thread for ", name, ": ", error.what()));
        }
      }
      if (folder != nullptr) {
        folder->requests.push_back(std::move(request));
        folder->changed.notify_one();
        return;
      }
    }
  }
  Post(Refuse(request, trouble));
}

void SnapshotWriter::Shared::Post(std::optional<Event> event) {
  if (!event) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (closed) return;
    ++posting;
  }
  options.post(*std::move(event));
  std::lock_guard<std::mutex> lock(mutex);
  --posting;
  ended.notify_all();
}

void SnapshotWriter::Shared::Main(const std::string& name, Folder& folder) {
  std::unique_lock<std::mutex> lock(mutex);
  while (!closed) {
    if (folder.requests.empty()) {
      if (folder.runs.empty()) break;
      folder.changed.wait(lock);
      continue;
    }
    Request request = std::move(folder.requests.front());
    folder.requests.pop_front();
    lock.unlock();
    Post(CarryOut(folder, std::move(request)));
    lock.lock();
  }
  // From here on another thread serves the folder.
  const auto entry = folders.find(name);
  if (entry != folders.end() && entry->second.get() == &folder) folders.erase(entry);
  lock.unlock();
  folder.runs.clear();  // lets go of the locks on the disk
  lock.lock();
  --threads;
  ended.notify_all();
}

std::optional<Event> SnapshotWriter::Shared::CarryOut(Folder& folder, Request request) {
  if (auto* open = std::get_if<OpenSnapshots>(&request)) {
    const std::string run_id = open->run_id;
    if (folder.runs.contains(run_id)) return SnapshotsOpened{run_id, absl::OkStatus()};
    absl::StatusOr<OpenRun> run = Open(options.files, std::move(*open));
    if (run.ok()) {
      folder.runs.emplace(run_id, *std::move(run));
    } else {
      std::lock_guard<std::mutex> lock(mutex);
      dirs.erase(run_id);
    }
    return SnapshotsOpened{run_id, run.status()};
  }
  if (const auto* close = std::get_if<CloseSnapshots>(&request)) {
    const auto found = folder.runs.find(close->run_id);
    if (found == folder.runs.end()) return std::nullopt;
    if (found->second.begun != 0) found->second.store->Abandon(found->second.begun);
    folder.runs.erase(found);
    return std::nullopt;
  }
  const std::string& run_id = RunOf(request);
  const auto found = folder.runs.find(run_id);
  if (found == folder.runs.end()) return Refuse(request, NotOpen(run_id));
  OpenRun& run = found->second;
  if (const auto* begin = std::get_if<BeginSnapshot>(&request)) {
    return SnapshotBegun{run_id, begin->step, Begin(run, begin->step)};
  }
  if (const auto* complete = std::get_if<CompleteSnapshot>(&request)) {
    return Finish(run, *complete);
  }
  const AbandonSnapshot& abandon = std::get<AbandonSnapshot>(request);
  if (abandon.step == run.completed) return std::nullopt;
  if (run.begun == abandon.step) run.begun = 0;
  run.store->Abandon(abandon.step);
  v1::CheckpointRecord record = RecordOf(run.opened.spec.checkpoint().dir(), abandon.step);
  record.set_message(abandon.reason);
  return SnapshotCompleted{run_id, abandon.step, std::move(record)};
}

std::optional<Event> SnapshotWriter::Shared::Finish(OpenRun& run, const CompleteSnapshot& request) {
  const absl::Duration start = options.clock->Now();
  const int64_t began = absl::ToUnixMillis(options.clock->Wall() - absl::Seconds(request.seconds));
  const absl::StatusOr<CompletedSave> saved =
      Complete(options.files, began, run, request, [this] { return stopping.load(); });
  if (stopping && !saved.ok()) return std::nullopt;
  v1::CheckpointRecord record = RecordOf(run.opened.spec.checkpoint().dir(), request.step);
  record.set_complete(saved.ok());
  record.set_seconds(request.seconds + absl::ToDoubleSeconds(options.clock->Now() - start));
  if (saved.ok()) {
    record.set_path(saved->path);
    record.set_bytes(saved->bytes);
    run.completed = request.step;
    run.begun = 0;
  } else {
    record.set_message(std::string(saved.status().message()));
    LogWarning(request.run_id, ": the checkpoint of step ", request.step,
               " was abandoned: ", saved.status().message());
    if (run.begun == request.step) run.begun = 0;
    if (run.completed != request.step) run.store->Abandon(request.step);
  }
  return SnapshotCompleted{request.run_id, request.step, std::move(record)};
}

SnapshotWriter::SnapshotWriter(Options options)
    : shared_(std::make_shared<Shared>(std::move(options))) {}

SnapshotWriter::~SnapshotWriter() {
  shared_->stopping = true;
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->closed = true;
  for (const auto& [name, folder] : shared_->folders) folder->changed.notify_all();
  shared_->ended.wait(lock, [this] { return shared_->posting == 0; });
  if (!shared_->ended.wait_for(lock, kGrace, [this] { return shared_->threads == 0; })) {
    LogWarning("a checkpoint folder does not answer; what was being done in it is left");
  }
}

void SnapshotWriter::Do(OpenSnapshots request) {
  const std::string dir = request.spec.checkpoint().dir();
  const std::string run_id = request.run_id;
  shared_->Ask(run_id, std::move(request), &dir);
}
void SnapshotWriter::Do(BeginSnapshot request) {
  const std::string run_id = request.run_id;
  shared_->Ask(run_id, std::move(request));
}
void SnapshotWriter::Do(CompleteSnapshot request) {
  const std::string run_id = request.run_id;
  shared_->Ask(run_id, std::move(request));
}
void SnapshotWriter::Do(AbandonSnapshot request) {
  const std::string run_id = request.run_id;
  shared_->Ask(run_id, std::move(request));
}
void SnapshotWriter::Do(CloseSnapshots request) {
  const std::string run_id = request.run_id;
  shared_->Ask(run_id, std::move(request));
}

}  // namespace zeroshard::coordinator
