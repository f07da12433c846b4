#include "worker/train/checkpointer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "worker/device/cpu_memory.h"
#include "worker/train/agreement.h"
#include "worker/zero/torn_blocks.h"

namespace zeroshard {
namespace {

SaveState StateOf(const RankFlags& flags) { return static_cast<SaveState>(flags.save_state); }

std::string WithoutSlash(std::string dir) {
  while (dir.size() > 1 && dir.back() == '/') dir.pop_back();
  return dir;
}

// Every rank wrote its part or failed to, or was never told to begin because rank 0 failed first.
bool AllSettled(const std::vector<RankFlags>& flags) {
  const SaveState first = StateOf(flags[0]);
  if (first != SaveState::kWritten && first != SaveState::kFailed) return false;
  return std::all_of(flags.begin(), flags.end(), [first](const RankFlags& f) {
    const SaveState state = StateOf(f);
    return state == SaveState::kWritten || state == SaveState::kFailed ||
           (first == SaveState::kFailed && state == SaveState::kCollecting);
  });
}

}  // namespace

bool AllIdle(const std::vector<RankFlags>& flags) {
  return std::all_of(flags.begin(), flags.end(),
                     [](const RankFlags& f) { return StateOf(f) == SaveState::kIdle; });
}

// How a rank's part went; fixed size, little endian.
struct Checkpointer::Report {
  int32_t code = 0;
  uint32_t crc32c = 0;
  uint64_t bytes = 0;
  WeightDigest digests[kStateKinds];
  char name[64] = {};  // of the file, ending in 0
  uint32_t message_bytes = 0;
  char message[892] = {};

  void Fail(const absl::Status& status) {
    code = static_cast<int32_t>(status.code());
    message_bytes = static_cast<uint32_t>(std::min(status.message().size(), sizeof(message)));
    status.message().copy(message, message_bytes);
  }
};

// Counts what is written, and fails once the save is cancelled.
class Checkpointer::CancellableFiles : public FileSystem {
 public:
  CancellableFiles(FileSystem* files, const std::atomic<bool>* cancelled,
                   std::atomic<uint64_t>* progress)
      : files_(files), cancelled_(*cancelled), progress_(*progress) {}

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    ZS_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> file, files_->Create(path));
    return std::make_unique<File>(this, std::move(file));
  }
  absl::Status MakeFolder(const std::string& path) override { return files_->MakeFolder(path); }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return files_->Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override { return files_->RemoveAll(path); }
  absl::Status SyncFolder(const std::string& path) override { return files_->SyncFolder(path); }

 private:
  class File : public WritableFile {
   public:
    File(CancellableFiles* owner, std::unique_ptr<WritableFile> file)
        : owner_(*owner), file_(std::move(file)) {}
    absl::Status Append(const void* data, size_t bytes) override {
      if (owner_.cancelled_) return absl::CancelledError("the job ended before it was saved");
      ++owner_.progress_;
      return file_->Append(data, bytes);
    }
    absl::Status SyncAndClose() override { return file_->SyncAndClose(); }

   private:
    CancellableFiles& owner_;
    const std::unique_ptr<WritableFile> file_;
  };

  FileSystem* const files_;
  const std::atomic<bool>& cancelled_;
  std::atomic<uint64_t>& progress_;
};

Checkpointer::Checkpointer(const CheckpointerOptions& options)
    : options_(options),
      dir_(WithoutSlash(options.spec.checkpoint().dir())),
      files_(std::make_unique<CancellableFiles>(options.files, &cancelled_, &progress_)) {}

Checkpointer::~Checkpointer() {
  cancelled_ = true;
  thread_.reset();
  if (store_ != nullptr && phase_ != SaveState::kIdle && !completed_.state())
    store_->Abandon(step_);
}

absl::StatusOr<std::unique_ptr<Checkpointer>> Checkpointer::Create(
    const CheckpointerOptions& options) {
  std::unique_ptr<Checkpointer> checkpointer(new Checkpointer(options));
  ZS_RETURN_IF_ERROR(Agree(options.comm, checkpointer->Open(), "checkpoint folder"));
  return checkpointer;
}

absl::Status Checkpointer::Open() {
  if (IsRankZero()) {
    ZS_ASSIGN_OR_RETURN(extras_, ReadSaveExtras(options_.spec, options_.assets));
    CheckpointStoreOptions store;
    store.dir = dir_;
    store.job = options_.job;
    store.run_id = options_.run_id;
    store.keep_last = options_.spec.checkpoint().keep_last();
    store.keep_every = options_.spec.checkpoint().keep_every();
    store.resumed_from = options_.resumed_from;
    ZS_ASSIGN_OR_RETURN(store_, CheckpointStore::Open(options_.files, store));
  }
  ranges_ = options_.engine->OwnedRanges();
  ZS_RETURN_IF_ERROR(Allocate());
  MakePieces();
  thread_ = MakeHostStream("checkpoint");
  return absl::OkStatus();
}

absl::Status Checkpointer::Allocate() {
  int64_t all = 0, trained = 0;
  for (const OwnedRange& range : ranges_) {
    all += range.size();
    if (range.trained) trained += range.size();
  }
  for (int kind = 0; kind < kStateKinds; ++kind) {
    const size_t bytes = static_cast<size_t>(kind == 0 ? all : trained) * sizeof(float);
    absl::StatusOr<Buffer> memory = options_.device->AllocateHost(bytes);
    if (absl::IsResourceExhausted(memory.status())) {
      // Other memory of the host holds it too, and copies to it are slower.
      LogInfo("checkpoints are copied slower: ", memory.status().message());
      memory = cpu::AllocateUncounted(bytes);
    }
    ZS_ASSIGN_OR_RETURN(memory_[kind], std::move(memory));
    // The pages are there before the first copy needs them. A rank of a mesh may be home of
    // nothing.
    if (bytes > 0) std::memset(memory_[kind].data(), 0, bytes);
  }
  return absl::OkStatus();
}

void Checkpointer::MakePieces() {
  for (int kind = 0; kind < kStateKinds; ++kind) {
    const float* at = memory_[kind].as<float>();
    for (const OwnedRange& range : ranges_) {
      if (kind != 0 && !range.trained) continue;
      const UnitTable& unit = options_.model->units[static_cast<size_t>(range.unit)];
      for (const ParameterInfo& tensor : unit.parameters) {
        const int64_t begin = std::max(range.flat, tensor.offset);
        const int64_t end = std::min(range.flat + range.size(), tensor.offset + tensor.size);
        if (begin >= end || (kind != 0 && !tensor.trainable)) continue;
        pieces_.push_back({.kind = static_cast<StateKind>(kind),
                           .tensor = tensor.name,
                           .shape = tensor.shape,
                           .begin = begin - tensor.offset,
                           .end = end - tensor.offset,
                           .values = at + (begin - range.flat)});
      }
      at += range.size();
    }
  }
}

absl::Status Checkpointer::Copy(bool kept) {
  for (int kind = 0; kind < kStateKinds; ++kind) {
    float* at = memory_[kind].as<float>();
    for (const OwnedRange& range : ranges_) {
      if (kind != 0 && !range.trained) continue;
      if (range.keeps_master == kept)
        ZS_RETURN_IF_ERROR(options_.engine->CopyState(static_cast<StateKind>(kind), range.unit,
                                                      range.begin, range.end, at));
      at += range.size();
    }
  }
  return absl::OkStatus();
}

SaveState Checkpointer::state() const {
  switch (phase_) {
    case SaveState::kCollecting:
    case SaveState::kWriting:
      if (!written_.state()) return SaveState::kCollecting;
      if (written_.Done()) return written_.Wait().ok() ? SaveState::kWritten : SaveState::kFailed;
      return begun_ ? SaveState::kWriting : SaveState::kCollecting;
    case SaveState::kCompleting:
      return completed_.Done() ? SaveState::kIdle : SaveState::kCompleting;
    default:
      return phase_;
  }
}

bool Checkpointer::Busy() const {
  return (phase_ == SaveState::kCollecting && !written_.Done()) ||
         (phase_ == SaveState::kCompleting && !completed_.Done());
}

void Checkpointer::Start(uint64_t step, const NextStep& next, absl::Duration waited) {
  step_ = step;
  next_ = next;
  waited_ = waited;
  started_ = absl::Now();
  const absl::Status frozen = Copy(false);
  copied_ = thread_->Enqueue([this, frozen] { return frozen.ok() ? Copy(true) : frozen; });
  pause_ = absl::Now() - started_;
  phase_ = SaveState::kCollecting;
  written_ = completed_ = Event();
  begun_ = false;
  recorded_ = false;
  outcome_ = absl::UnknownError("the save is on its way");
  if (!IsRankZero()) return;  // Advance begins
  written_ = thread_->Enqueue([this]() -> absl::Status {
    ZS_RETURN_IF_ERROR(store_->Begin(step_).status());
    begun_ = true;
    return WriteOwn();
  });
}

void Checkpointer::WaitForCopy() {
  if (copied_.Done()) return;
  const absl::Time start = absl::Now();
  copied_.Wait().IgnoreError();
  pause_ += absl::Now() - start;  // the thread reads it once every part is written
}

absl::Status Checkpointer::WriteOwn() {
  ZS_RETURN_IF_ERROR(copied_.Wait());
  for (int kind = 0; kind < kStateKinds; ++kind) {
    digests_[kind] = PartedDigest();
    const float* at = memory_[kind].as<float>();
    for (const OwnedRange& range : ranges_) {
      if (kind != 0 && !range.trained) continue;
      if (cancelled_) return absl::CancelledError("the job ended before it was saved");
      const size_t size = static_cast<size_t>(range.size());
      digests_[kind].Add(static_cast<uint64_t>(range.unit), static_cast<uint64_t>(range.flat),
                         absl::MakeSpan(at, size), range.ends);
      at += size;
      ++progress_;
    }
  }
  ZS_ASSIGN_OR_RETURN(file_, WriteStateFile(files_.get(), CollectFolder(dir_, step_),
                                            options_.comm->rank(), options_.comm->size(), pieces_));
  return absl::OkStatus();
}

absl::Status Checkpointer::Advance(const std::vector<RankFlags>& flags) {
  const SaveState first = StateOf(flags[0]);
  if (!IsRankZero() && phase_ == SaveState::kCollecting && !written_.state() &&
      (first == SaveState::kWriting || first == SaveState::kWritten)) {
    begun_ = true;
    written_ = thread_->Enqueue([this] { return WriteOwn(); });
  }
  if (!AllSettled(flags)) return absl::OkStatus();
  std::vector<Report> reports(flags.size());
  FillReport(&reports[static_cast<size_t>(options_.comm->rank())]);
  ZS_RETURN_IF_ERROR(options_.comm->AllGatherHost(reports.data(), sizeof(Report),
                                                  {.unit = "checkpoint", .step = step_}));
  if (options_.engine->slice() != nullptr) ZS_RETURN_IF_ERROR(JoinTornBlocks(&reports));
  if (!IsRankZero()) {
    phase_ = SaveState::kIdle;
    return absl::OkStatus();
  }
  phase_ = SaveState::kCompleting;
  completed_ = thread_->Enqueue([this, reports = std::move(reports)] { return Finish(reports); });
  return absl::OkStatus();
}

absl::Status Checkpointer::JoinTornBlocks(std::vector<Report>* reports) const {
  // The same verdict on every rank: nothing will come of this save.
  if (std::any_of(reports->begin(), reports->end(), [](const Report& r) { return r.code != 0; }))
    return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(const std::vector<BlockPart> parts,
                      GatherParts(options_.comm, PartsOf(digests_, kStateKinds),
                                  {.unit = "checkpoint", .step = step_}));
  if (!IsRankZero()) return absl::OkStatus();
  Report& first = reports->front();
  for (int kind = 0; kind < kStateKinds && first.code == 0; ++kind) {
    const absl::StatusOr<WeightDigest> joined = JoinParts(OfKind(parts, static_cast<size_t>(kind)));
    if (joined.ok()) {
      first.digests[kind].Combine(*joined);
    } else {
      first.Fail(joined.status());
    }
  }
  return absl::OkStatus();
}

void Checkpointer::FillReport(Report* report) const {
  const absl::Status status =
      written_.state() ? written_.Wait() : absl::CancelledError("rank 0 did not make the folder");
  if (!status.ok()) return report->Fail(status);
  report->crc32c = file_.crc32c;
  report->bytes = file_.bytes;
  for (int kind = 0; kind < kStateKinds; ++kind) report->digests[kind] = digests_[kind].whole;
  file_.name.copy(report->name, sizeof(report->name) - 1);
}

absl::Status Checkpointer::Finish(const std::vector<Report>& reports) {
  record_ = v1::CheckpointRecord();
  record_.set_step(step_);
  record_.set_path(absl::StrCat(dir_, "/", CheckpointName(step_)));
  absl::Status status;
  for (size_t rank = 0; rank < reports.size() && status.ok(); ++rank) {
    const Report& r = reports[rank];
    if (r.code == 0) continue;
    const size_t length = std::min<size_t>(r.message_bytes, sizeof(r.message));
    status = absl::Status(static_cast<absl::StatusCode>(r.code),
                          absl::StrCat("rank ", rank, ": ", absl::string_view(r.message, length)));
  }
  if (status.ok()) status = Complete(reports);
  record_.set_complete(status.ok());
  record_.set_seconds(absl::ToDoubleSeconds(absl::Now() - started_));
  record_.set_pause_seconds(absl::ToDoubleSeconds(waited_ + pause_));
  if (!status.ok()) {
    store_->Abandon(step_);
    record_.set_message(std::string(status.message()));
    LogWarning("the checkpoint of step ", step_, " was abandoned: ", status.message());
  } else if (waited_ > absl::ZeroDuration()) {
    record_.set_message(
        absl::StrFormat("training waited %.1f s for the checkpoint before this one; save less "
                        "often, or to a faster disk",
                        absl::ToDoubleSeconds(waited_)));
  }
  return status;
}

absl::Status Checkpointer::Complete(const std::vector<Report>& reports) {
  SaveContents contents;
  contents.spec = options_.spec;
  contents.job = options_.job;
  contents.run_id = options_.run_id;
  contents.step = step_;
  contents.next_sample = next_.sample;
  contents.loss_scale = next_.loss_scale;
  contents.samples = options_.samples;
  contents.unix_ms = absl::ToUnixMillis(started_);
  // Of the whole model, of which this rank may have a part.
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(options_.spec.model()));
  contents.trained = std::any_of(model.units.begin(), model.units.end(),
                                 [](const UnitTable& unit) { return unit.AnyTrainable(); });
  contents.folder = CollectFolder(dir_, step_);
  for (const Report& report : reports) {
    SavedPart& part = contents.parts.emplace_back();
    part.file = {.name = std::string(report.name, strnlen(report.name, sizeof(report.name))),
                 .bytes = report.bytes,
                 .crc32c = report.crc32c};
    std::copy(std::begin(report.digests), std::end(report.digests), part.digests);
  }
  ZS_ASSIGN_OR_RETURN(
      const CompletedSave saved,
      CompleteSave(options_.files, store_.get(), contents, extras_, [this] { ++progress_; }));
  record_.set_path(saved.path);
  record_.set_bytes(saved.bytes);
  return absl::OkStatus();
}

std::optional<v1::CheckpointRecord> Checkpointer::TakeRecord() {
  if (phase_ != SaveState::kCompleting || !completed_.Done() || recorded_) return std::nullopt;
  recorded_ = true;
  outcome_ = completed_.Wait();
  phase_ = SaveState::kIdle;
  return record_;
}

}  // namespace zeroshard
