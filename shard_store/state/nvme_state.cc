#include "shard_store/state/nvme_state.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/kernels/convert.h"
#include "common/plan/nvme_bytes.h"
#include "common/plan/offload.h"
#include "common/plan/zero_policy.h"
#include "common/status_macros.h"
#include "shard_store/state/nvme_disk.h"

namespace zeroshard::store {

uint64_t NvmeState::Described::BytesOf(StateKind kind) const {
  switch (kind) {
    case StateKind::kMaster:
      return bytes.master;
    case StateKind::kExpAvg:
      return bytes.exp_avg;
    case StateKind::kExpAvgSq:
      return bytes.exp_avg_sq;
  }
  return 0;
}

NvmeState::NvmeState(const JobStateOptions& options)
    : options_(options),
      type_(ComputeType(options.spec)),
      momentum_only_(UsesSgd(options.spec)),
      version_(options.nvme.step) {}

absl::StatusOr<std::shared_ptr<Buffer>> NvmeState::MakeSection() {
  const auto bytes = static_cast<size_t>(options_.nvme.chunk_elements) * sizeof(float);
  ZS_RETURN_IF_ERROR(
      options_.budget->Take(bytes, absl::StrCat("a buffer of job ", options_.spec.name())));
  return Buffer::Allocate(bytes, options_.budget);
}

absl::StatusOr<std::unique_ptr<NvmeState>> NvmeState::Make(const JobStateOptions& options) {
  if (options.nvme.dir.empty() || options.nvme.budget == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", options.spec.name(),
        " keeps its state on the stores' disks (zero_optimization: device: nvme), but this store "
        "has no folder for it: start it with --nvme-dir, or submit the job with device: cpu"));
  }
  std::unique_ptr<NvmeState> state(new NvmeState(options));
  MemoryBudget* const budget = options.budget;
  nvme::BufferBudget taken;
  taken.take = [budget, name = options.spec.name()](uint64_t bytes) {
    return budget->Take(bytes, absl::StrCat("the buffers of job ", name));
  };
  taken.give = [budget](uint64_t bytes) { budget->Give(bytes); };
  ZS_ASSIGN_OR_RETURN(
      state->arena_,
      nvme::BufferArena::Create(kNvmeUpdateBuffers + kNvmeStagingBuffers + kNvmeOtherBuffers,
                                nvme::kBufferBytes, taken));
  ZS_ASSIGN_OR_RETURN(state->updates_, nvme::BufferPool::Create(state->arena_, kNvmeUpdateBuffers));
  ZS_ASSIGN_OR_RETURN(state->staged_, nvme::BufferPool::Create(state->arena_, kNvmeStagingBuffers));
  ZS_ASSIGN_OR_RETURN(state->others_, nvme::BufferPool::Create(state->arena_, kNvmeOtherBuffers));
  nvme::AsyncIoOptions io;
  io.counters = options.nvme.counters;
  io.hook = options.nvme.hook;
  io.stall_limit = options.nvme.stall_limit;
  io.start_thread = options.nvme.start_thread;
  ZS_ASSIGN_OR_RETURN(state->io_, nvme::AsyncIo::Create(io, state->arena_));
  ZS_ASSIGN_OR_RETURN(state->moving_, state->MakeSection());
  const auto section = static_cast<uint64_t>(options.nvme.chunk_elements) * sizeof(float);
  ZS_RETURN_IF_ERROR(
      budget->Take(section, absl::StrCat("what writes snapshots of job ", options.spec.name())));
  state->for_writer_ = section;
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (int i = 0; i < kNvmePullSections; ++i) {
    ZS_ASSIGN_OR_RETURN(buffers.emplace_back(), state->MakeSection());
  }
  ZS_ASSIGN_OR_RETURN(state->pulls_, NvmePulls::Make(std::move(buffers), absl::Seconds(60),
                                                     options.nvme.start_thread));
  state->buffer_bytes_ = state->arena_->total_bytes() + (kNvmePullSections + 2) * section;
  return state;
}

NvmeState::~NvmeState() {
  EndSnapshot();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return applies_ == 0 && reading_ == 0; });
  lock.unlock();
  GiveBack();
}

bool NvmeState::Free() {
  EndSnapshot();
  std::unique_lock<std::mutex> lock(mutex_);
  // What is asked of the disk ends within its limit.
  const absl::Duration most = options_.nvme.stall_limit + absl::Seconds(5);
  const bool unused = changed_.wait_for(lock, absl::ToChronoNanoseconds(most),
                                        [this] { return applies_ == 0 && reading_ == 0; });
  lock.unlock();
  if (unused) GiveBack();
  return unused;
}

void NvmeState::GiveBack() {
  if (pulls_ != nullptr) pulls_->End();  // nobody reads any more
  Chunks chunks;
  std::shared_ptr<Disk> disk;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    chunks.swap(chunks_);
    disk.swap(disk_);
  }
  disk = nullptr;
  updates_ = staged_ = others_ = nullptr;
  io_ = nullptr;
  arena_ = nullptr;
  moving_ = nullptr;
  options_.budget->Give(std::exchange(for_writer_, 0));
  buffer_bytes_ = 0;
}

absl::StatusOr<std::shared_ptr<NvmeState::Disk>> NvmeState::MakeDisk(const Chunks& chunks) {
  nvme::ChunkFileOptions options;
  options.dir = options_.nvme.dir;
  options.run_id = options_.nvme.run_id;
  options.incarnation = options_.nvme.incarnation;
  options.epoch = options_.nvme.epoch;
  options.spare_slots = kNvmeSpareSlots;
  options.io = io_.get();
  options.hook = options_.nvme.hook;
  for (const auto& [id, chunk] : chunks) options.chunks[id] = {chunk.size(), chunk.bytes};
  ZS_ASSIGN_OR_RETURN(const nvme::ChunkLayout layout,
                      nvme::ChunkLayout::Make(options.chunks, options.spare_slots));
  auto disk = std::make_shared<Disk>();
  ZS_RETURN_IF_ERROR(options_.nvme.budget->Take(
      layout.file_bytes(),
      absl::StrCat("the file of ", chunks.size(), " chunks of job ", options_.spec.name())));
  disk->budget = options_.nvme.budget;
  disk->taken = layout.file_bytes();
  ZS_ASSIGN_OR_RETURN(disk->file, nvme::ChunkFile::Create(options));
  nvme::StagingOptions staging;
  staging.file = disk->file;
  staging.pool = staged_;
  disk->staging = std::make_unique<nvme::Staging>(staging);
  return disk;
}

absl::Status NvmeState::Change(const std::map<uint32_t, Chunk>& chunks,
                               absl::Span<const uint32_t> keep) {
  Chunks wanted, kept;
  for (const auto& [id, chunk] : chunks) {
    ZS_ASSIGN_OR_RETURN(
        const std::shared_ptr<MemoryChunk> about,
        DescribeChunk(id, chunk, *options_.model, type_, MakeRounding(options_.spec)));
    if (chunk.size() > options_.nvme.chunk_elements) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", id, " of ", chunk.size(),
                                                     " elements; wanted at most ",
                                                     options_.nvme.chunk_elements));
    }
    wanted[id] = {about, zeroshard::BytesOf(chunk, type_, momentum_only_)};
  }
  std::shared_ptr<Disk> old, gone;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const uint32_t id : keep) {
      const auto found = chunks_.find(id);
      if (found != chunks_.end() && wanted.contains(id)) kept.insert(*found);
    }
    chunks_ = kept;
    if (kept.empty()) gone = std::move(disk_);
    old = disk_;
  }
  gone = nullptr;  // its space is free before other is taken
  std::shared_ptr<Disk> made;
  if (!wanted.empty()) {
    ZS_ASSIGN_OR_RETURN(made, MakeDisk(wanted));
    for (const auto& [id, chunk] : kept) ZS_RETURN_IF_ERROR(Note(CopyChunk(chunk, *old, *made)));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  disk_.swap(made);
  chunks_ = std::move(wanted);
  return absl::OkStatus();
}

absl::Status NvmeState::CopyChunk(const Described& chunk, const Disk& from, const Disk& to) {
  const uint32_t id = chunk.about->id;
  const std::pair<nvme::Section, uint64_t> sections[] = {
      {nvme::kMaster, chunk.bytes.master},
      {nvme::kExpAvg, chunk.bytes.exp_avg},
      {nvme::kExpAvgSq, chunk.bytes.exp_avg_sq},
      {nvme::kParameters, chunk.bytes.parameters}};
  std::lock_guard<std::mutex> lock(moving_mutex_);
  for (const auto& [section, bytes] : sections) {
    if (bytes == 0) continue;
    const absl::Span<char> all(moving_->data(), static_cast<size_t>(bytes));
    ZS_RETURN_IF_ERROR(from.file->ReadRange(id, section, version_, 0, all, others_.get()));
    ZS_RETURN_IF_ERROR(to.file->WriteSection(id, section, version_, all, others_.get()));
  }
  return absl::OkStatus();
}

absl::StatusOr<NvmeState::View> NvmeState::Find(uint32_t chunk) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = chunks_.find(chunk);
  if (found != chunks_.end()) return View{found->second, disk_, version_};
  return absl::InvalidArgumentError(absl::StrCat("chunk ", chunk, " of job ", options_.spec.name(),
                                                 " is not on this store, which holds ",
                                                 chunks_.size(), " others"));
}

absl::StatusOr<NvmeState::View> NvmeState::Find(uint32_t id, int64_t begin, int64_t count) const {
  ZS_ASSIGN_OR_RETURN(View view, Find(id));
  const int64_t size = view.chunk.size();
  if (begin >= 0 && count >= 0 && begin <= size && count <= size - begin) return view;
  return absl::InvalidArgumentError(absl::StrCat("chunk ", id, " of job ", options_.spec.name(),
                                                 ": ", count, " elements from ", begin,
                                                 " on; wanted some of its ", size));
}

absl::StatusOr<NvmeState::View> NvmeState::FindKind(uint32_t id, StateKind kind, int64_t begin,
                                                    int64_t count) const {
  ZS_ASSIGN_OR_RETURN(View view, Find(id, begin, count));
  if (view.chunk.Has(kind)) return view;
  return absl::InvalidArgumentError(
      absl::StrCat("chunk ", id, " of job ", options_.spec.name(), " has no ", NameOf(kind)));
}

absl::Status NvmeState::Note(absl::Status status) const {
  if (IsOfTheState(status)) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (health_.ok()) health_ = status;
  }
  return status;
}

absl::Status NvmeState::Health() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return health_;
}

bool NvmeState::HasKind(uint32_t id, StateKind kind) const {
  const absl::StatusOr<View> view = Find(id);
  return view.ok() && view->chunk.Has(kind);
}

absl::Status NvmeState::ReadKind(const View& view, StateKind kind, uint64_t version, int64_t begin,
                                 absl::Span<float> values) const {
  if (values.empty()) return absl::OkStatus();
  const uint32_t id = view.chunk.about->id;
  const bool rounded = kind == StateKind::kMaster && view.chunk.Rounded();
  const uint64_t width = rounded ? SizeOf(type_) : sizeof(float);
  std::vector<char> narrow(rounded ? values.size() * width : 0);
  char* to = rounded ? narrow.data() : reinterpret_cast<char*>(values.data());
  ZS_RETURN_IF_ERROR(
      Note(view.disk->file->ReadRange(id, rounded ? nvme::kParameters : SectionOf(kind), version,
                                      static_cast<uint64_t>(begin) * width,
                                      absl::MakeSpan(to, values.size() * width), others_.get())));
  if (rounded) {
    cpu::Convert(narrow.data(), type_, static_cast<int64_t>(values.size()), values.data(),
                 DType::kF32, 1);
  }
  return absl::OkStatus();
}

absl::Status NvmeState::GetState(uint32_t id, StateKind kind, int64_t begin,
                                 absl::Span<float> values) const {
  ZS_ASSIGN_OR_RETURN(const View view,
                      FindKind(id, kind, begin, static_cast<int64_t>(values.size())));
  return ReadKind(view, kind, view.version, begin, values);
}

absl::Status NvmeState::Stage(uint32_t id, uint64_t step, int64_t begin, int64_t count,
                              absl::Span<const absl::Span<const char>> parts) {
  ZS_ASSIGN_OR_RETURN(const View view, Find(id, begin, count));
  if (view.chunk.bytes.staging == 0) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", id, " of job ", options_.spec.name(),
                                                   " is frozen: it takes no gradients"));
  }
  // Filed under another step it would go with what is dropped after that.
  if (step != view.version + 1) {
    return absl::FailedPreconditionError(absl::StrCat("gradients of step ", step, " for chunk ", id,
                                                      " of job ", options_.spec.name(), "; step ",
                                                      view.version + 1, " is staged here"));
  }
  return Note(view.disk->staging->Stage(id, step, begin, count, parts));
}

absl::StatusOr<JobState::ParameterRead> NvmeState::BeginRead(uint32_t id, int64_t begin,
                                                             int64_t count, uint64_t step) {
  ZS_ASSIGN_OR_RETURN(const View view, Find(id, begin, count));
  const uint64_t width = SizeOf(type_);
  const nvme::Section section =
      view.chunk.bytes.parameters == 0 ? nvme::kMaster : nvme::kParameters;
  const uint64_t from = static_cast<uint64_t>(begin) * width;
  const auto bytes = static_cast<size_t>(count) * width;
  return [this, weak = std::weak_ptr<NvmePulls>(pulls_), disk = view.disk, id, section, from, bytes,
          step](std::function<void(absl::StatusOr<PinnedParameters>)> done) {
    const std::shared_ptr<NvmePulls> pulls = weak.lock();
    if (pulls == nullptr) return done(absl::CancelledError("the state here is no longer kept"));
    // Its tasks end before this state does.
    pulls->Add(
        bytes,
        [this, disk, id, section, from, bytes, step](char* to) {
          return Note(disk->file->ReadRange(id, section, step, from, absl::MakeSpan(to, bytes),
                                            others_.get()));
        },
        std::move(done));
  };
}

absl::StatusOr<PinnedParameters> NvmeState::Parameters(uint32_t id, int64_t begin, int64_t count) {
  ZS_ASSIGN_OR_RETURN(const View view, Find(id, begin, count));
  ZS_ASSIGN_OR_RETURN(const ParameterRead read, BeginRead(id, begin, count, view.version));
  std::promise<absl::StatusOr<PinnedParameters>> promise;
  std::future<absl::StatusOr<PinnedParameters>> answer = promise.get_future();
  read([&promise](absl::StatusOr<PinnedParameters> got) { promise.set_value(std::move(got)); });
  return answer.get();
}

absl::StatusOr<WeightDigest> NvmeState::Digest(absl::Span<const uint32_t> chunks) const {
  WeightDigest total;
  std::lock_guard<std::mutex> lock(moving_mutex_);
  float* const room = moving_->as<float>();
  for (const uint32_t id : chunks) {
    ZS_ASSIGN_OR_RETURN(const View view, Find(id));
    const Chunk& chunk = view.chunk.about->chunk;
    for (int64_t at = 0; at < chunk.size(); at += nvme::kBlockElements) {
      const auto piece = absl::MakeSpan(
          room, static_cast<size_t>(std::min(nvme::kBlockElements, chunk.size() - at)));
      ZS_RETURN_IF_ERROR(ReadKind(view, StateKind::kMaster, view.version, at, piece));
      total.Add(static_cast<uint64_t>(chunk.unit), static_cast<uint64_t>(chunk.begin + at), piece);
    }
  }
  return total;
}

v1::StoreUsage NvmeState::usage() const {
  v1::StoreUsage usage;
  std::lock_guard<std::mutex> lock(mutex_);
  usage.set_chunks(chunks_.size());
  if (disk_ != nullptr) usage.set_nvme_bytes(disk_->taken);
  return usage;
}

}  // namespace zeroshard::store
