// A job as its control, its streams and its coordinator see it; its thread is in host_work.cc.
#include "shard_store/state/host_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/crash_point.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "shard_store/state/host_state.h"

namespace zeroshard::store {
namespace {

constexpr std::chrono::milliseconds kProgressInterval(300);

constexpr std::chrono::seconds kLoadingLogged(10);  // so often at most

constexpr char kNoAnswer[] = ", whose file system does not answer";

// Of the job's map, the chunks whose first replica that is there is this store.
std::vector<uint32_t> FirstReplicas(const v1::StoreJob& job,
                                    const std::map<uint32_t, Chunk>& chunks) {
  std::vector<uint32_t> first;
  const uint64_t replicas = job.map().replicas();
  for (const auto& [id, chunk] : chunks) {
    for (uint64_t place = id * replicas; place < (id + uint64_t{1}) * replicas; ++place) {
      if (place >= static_cast<uint64_t>(job.map().placement_size())) break;
      const uint32_t store = job.map().placement(static_cast<int>(place));
      if (store == kNoStore) continue;
      if (store == job.store()) first.push_back(id);
      break;
    }
  }
  return first;
}

void PassCrashPoints(const v1::StoreReport& report, const char* sealed, const char* applied,
                     absl::Duration linger) {
  const uint64_t here = report.version().step();
  if (report.sealed_step() != 0) CrashPoint(sealed, report.sealed_step(), kAnyRank, linger);
  if (report.phase() == v1::STORE_PHASE_READY && report.decision().step() == here && here != 0)
    CrashPoint(applied, here, kAnyRank, linger);
}

// What those are told who asked for something of a state that is of no use any more: they have lost
// a store, and nothing is wrong with themselves. Why is in the report.
absl::Status LostHere(const absl::Status& status) {
  return absl::UnavailableError(
      absl::StrCat("the state here is of no use any more: ", status.message()));
}

}  // namespace

HostJob::HostJob(const std::string& run_id, HostContext* context)
    : context_(context), control_(run_id, context->options.chunk_elements) {}

HostJob::~HostJob() = default;

absl::Status HostJob::Start() {
  return StartThread(
      context_->options.start_thread, [this] { Main(); }, &thread_);
}

void HostJob::Make(const Calls& calls) {
  for (const auto& call : calls) call();
}

void HostJob::OnDirective(const v1::StoreDirective& directive, const std::string& self) {
  Calls calls;
  bool refused = false;
  std::string warning;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (quit_) return;
    const absl::StatusOr<Orders> orders = control_.OnDirective(directive, self);
    refused = !orders.ok();
    if (refused && refused_ != orders.status().message()) {
      refused_ = warning = std::string(orders.status().message());
    }
    if (!refused) {
      TakeOrders(*orders, &calls);
      Recheck(&calls);
    }
  }
  Make(calls);
  if (!warning.empty()) LogWarning("a directive was refused: ", warning);
  SendReport(refused);
}

void HostJob::Tell(uint64_t life, const std::function<Orders()>& event) {
  Calls calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (life != life_) return;
    TakeOrders(event(), &calls);
    Recheck(&calls);
  }
  Make(calls);
  SendReport(false);
}

void HostJob::FailState(uint64_t life, const absl::Status& status) {
  LogError("the state of ", Report().run_id(), " is of no use any more: ", status.message());
  Tell(life, [this, &status] {
    control_.Fail(status);
    return Orders();
  });
}

// --- orders, under the lock ----------------------------------------------------------------------

void HostJob::BeginLife(Calls* calls) {
  ++life_;
  *stop_ = true;
  stop_ = std::make_shared<std::atomic<bool>>(false);
  operations_.clear();
  CancelSnapshot(calls);
}

void HostJob::DropState() {
  if (state_ == nullptr) return;
  state_->Release();
  state_->dropped = true;
  dying_.push_back(std::move(state_));
  state_ = nullptr;
}

void HostJob::CancelSnapshot(Calls* calls) {
  std::erase_if(operations_, [](const Operation& operation) { return operation.snapshot; });
  ++snapshot_number_;
  if (writer_ == nullptr) return;
  writer_->stop = true;
  // Its copies are given back outside the lock. Chunks are not held back for it any more.
  ++ending_;
  calls->push_back([this, state = writer_->state]() mutable {
    state->state->EndSnapshot();
    std::lock_guard<std::mutex> lock(mutex_);
    dying_.push_back(std::move(state));  // not let go here
    --ending_;
    changed_.notify_all();
  });
  writer_ = nullptr;
}

void HostJob::TakeOrders(const Orders& orders, Calls* calls) {
  if (orders.forget || orders.load) BeginLife(calls);
  if (orders.forget || (orders.load && orders.keep.empty())) DropState();
  if (orders.end_streams || orders.forget) {
    const std::string& run_id = control_.report().run_id();
    EndStreams(
        orders.forget,
        orders.forget
            ? absl::FailedPreconditionError(absl::StrCat(run_id, " is over and was dropped here"))
            : absl::AbortedError(absl::StrCat("this generation of ", run_id,
                                              " is over: generation ", control_.generation(),
                                              " is open here")),
        calls);
  }
  if (orders.cancel_snapshot) CancelSnapshot(calls);
  // drop_staging: the control counts what is staged; the buffers are overwritten.
  const uint64_t life = life_;
  if (orders.load) {
    kept_ = {orders.keep.begin(), orders.keep.end()};
    loading_.clear();
    operations_.push_back({false, life,
                           [this, life, stop = std::shared_ptr<const std::atomic<bool>>(stop_),
                            job = control_.job(), chunks = control_.chunks(),
                            keep = orders.keep] { Load(life, stop, job, chunks, keep); }});
  }
  if (orders.snapshot) {
    operations_.push_back(
        {true, life, [this, life, number = snapshot_number_, order = *orders.snapshot] {
           StartSnapshot(life, number, order);
         }});
  }
  if (orders.apply) {
    operations_.push_back(
        {false, life, [this, life, decision = *orders.apply] { Apply(life, decision); }});
  }
  if (orders.digest_step) {
    operations_.push_back({false, life,
                           [this, life, step = *orders.digest_step,
                            first = FirstReplicas(control_.job(), control_.chunks())] {
                             Digest(life, step, first);
                           }});
  }
  changed_.notify_all();
}

void HostJob::EndStreams(bool all, const absl::Status& status, Calls* calls) {
  const auto over = [&](const std::shared_ptr<Stream>& stream) {
    return all || stream->generation < control_.generation();
  };
  for (auto& [chunk, list] : waiting_) {
    std::erase_if(list, [&](Waiting& waiting) {
      if (!over(waiting.stream)) return false;
      if (waiting.pull) {
        calls->push_back([pull = std::move(waiting.pull), status] { pull(status); });
      } else {
        calls->push_back([push = std::move(waiting.push), status] { push(status); });
      }
      return true;
    });
  }
  std::erase_if(streams_, [&](const std::shared_ptr<Stream>& stream) {
    if (!over(stream)) return false;
    stream->ended = status;
    if (stream->on_end)
      calls->push_back([end = std::exchange(stream->on_end, nullptr), status] { end(status); });
    return true;
  });
}

void HostJob::End(const absl::Status& status) {
  Calls calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    BeginLife(&calls);
    DropState();
    EndStreams(true, status, &calls);
    quit_ = true;
    changed_.notify_all();
  }
  Make(calls);
  // One that is on its way out would count for the process that comes after a fence.
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !reporting_; });
}

std::string HostJob::AwaitFinished(std::chrono::steady_clock::time_point until) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (changed_.wait_until(lock, until, [this] { return finished_.load(); })) return "";
  std::vector<std::string> under_way;
  const auto add = [&](auto... parts) { under_way.push_back(absl::StrCat(parts...)); };
  if (!reading_.empty()) {
    // A load that only waits for its own disk reads nothing meanwhile.
    std::vector<std::string> from;
    for (const auto& [folder, reads] : reading_) from.push_back(folder);
    add("is still reading ", absl::StrJoin(from, " and "), kNoAnswer);
  } else if (at_work_ && on_disk_) {
    add("is still at work on its state in ", context_->options.nvme_dir,
        " (--nvme-dir); look at that disk");
  } else if (at_work_ || writers_.empty()) {
    add("is still at work on its state");
  }
  std::set<std::string> folders;
  for (const auto& [number, folder] : writers_) folders.insert(folder);
  if (!folders.empty())
    add("is still writing a snapshot into ", absl::StrJoin(folders, " and "), kNoAnswer);
  return absl::StrCat("job ", control_.report().run_id(), " ", absl::StrJoin(under_way, ", and "));
}

void HostJob::Finish() {
  if (thread_.joinable()) thread_.join();
}

// --- reports -------------------------------------------------------------------------------------

v1::StoreReport HostJob::MakeReport() const {
  v1::StoreReport report = control_.report();
  if (report.phase() == v1::STORE_PHASE_LOADING) report.set_problem(loading_);
  if (state_ != nullptr) *report.mutable_usage() = state_->state->usage();
  return report;
}

v1::StoreReport HostJob::Report() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return MakeReport();
}

uint64_t HostJob::buffer_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return state_ != nullptr && state_->state != nullptr ? state_->state->buffer_bytes() : 0;
}

void HostJob::SendReport(bool always) {
  while (true) {
    v1::StoreReport report;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      // The last word comes when everything is free.
      if (quit_ || (control_.dropped() && !over_)) return;
      v1::StoreReport what = control_.report();
      what.clear_progress();
      std::string now = what.SerializeAsString();
      if (!always && now == reported_) return;
      if (reporting_) {  // that thread sends this too: the newest is always the last
        report_again_ = true;
        return;
      }
      reporting_ = true;
      reported_ = std::move(now);
      reported_at_ = std::chrono::steady_clock::now();
      report = MakeReport();
    }
    PassCrashPoints(report, "store.before_sealed", "store.before_applied", absl::ZeroDuration());
    if (context_->options.on_report) context_->options.on_report(report);
    PassCrashPoints(report, "store.after_sealed", "store.after_applied", kCrashLinger);
    std::lock_guard<std::mutex> lock(mutex_);
    reporting_ = false;
    changed_.notify_all();
    if (!std::exchange(report_again_, false)) return;
    always = true;
  }
}

void HostJob::OnProgress() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    control_.OnProgress();
    if (std::chrono::steady_clock::now() - reported_at_ < kProgressInterval) return;
  }
  SendReport(true);
}

void HostJob::OnLoading(uint64_t life, const std::string& what, bool waits) {
  const auto now = std::chrono::steady_clock::now();
  bool log = false;
  std::string run_id;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (life != life_) return;
    const bool first = loading_.empty();
    loading_ = what;
    log = first || now - loading_logged_ > kLoadingLogged;
    if (log) {
      loading_logged_ = now;
      run_id = control_.report().run_id();
    }
    if (!first && now - loading_said_ < std::chrono::milliseconds(300)) return;
    loading_said_ = now;
  }
  if (log) (waits ? LogWarning(run_id, " ", what) : LogInfo(run_id, " ", what));
  SendReport(true);
}

void HostJob::OnReading(const std::string& folder, bool begins) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = reading_.try_emplace(folder, 0).first;
  found->second += begins ? 1 : -1;
  if (found->second == 0) reading_.erase(found);
}

// --- bulk ----------------------------------------------------------------------------------------

absl::StatusOr<std::shared_ptr<StoreHost::Stream>> HostJob::Open(
    const v1::BulkHello& hello, std::function<void(const absl::Status&)> on_end) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (quit_) return absl::FailedPreconditionError("this store was fenced");
  ZS_RETURN_IF_ERROR(control_.Admit(hello));
  auto stream = std::make_shared<Stream>(shared_from_this(), hello, std::move(on_end));
  streams_.insert(stream);
  return stream;
}

void HostJob::Close(const std::shared_ptr<Stream>& stream) {
  Calls calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const absl::Status closed = absl::CancelledError("the stream was closed");
    streams_.erase(stream);
    stream->on_end = nullptr;
    if (stream->ended.ok()) stream->ended = closed;
    for (auto& [chunk, list] : waiting_) {
      std::erase_if(list, [&](Waiting& waiting) {
        if (waiting.stream != stream) return false;
        if (waiting.pull) {
          calls.push_back([pull = std::move(waiting.pull), closed] { pull(closed); });
        } else {
          calls.push_back([push = std::move(waiting.push), closed] { push(closed); });
        }
        return true;
      });
    }
  }
  Make(calls);
}

absl::Status HostJob::CheckFrame(const Stream& stream, const bulk::Header& header) const {
  if (!stream.ended.ok()) return stream.ended;
  if (header.generation == stream.generation) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a frame of generation ", header.generation,
                                                 " on a stream of generation ", stream.generation,
                                                 " of ", control_.report().run_id()));
}

absl::Status HostJob::CheckPush(const bulk::Header& header) const {
  ZS_RETURN_IF_ERROR(control_.CheckStream(header.generation));
  const absl::Status status = control_.CheckPush(header.generation, header.epoch, header.step,
                                                 header.chunk, header.begin, header.count);
  if (absl::IsUnavailable(status)) return TooEarly(status.message());
  const bool applying = control_.report().phase() == v1::STORE_PHASE_APPLYING;
  if (status.ok() && state_ == nullptr) return TooEarly("the state is being loaded");
  if (status.ok() && applying && !state_->state->StagesWhileApplying()) {
    return TooEarly(absl::StrCat("gradients of step ", header.step, " for chunk ", header.chunk,
                                 " have room here once all of the step before is applied"));
  }
  return status;
}

// Counts while it lives, so that nothing is applied, and nothing of a newer generation staged,
// while memory is being copied.
class HostJob::Busy {
 public:
  // Under the lock. Waits for copies of older generations, which take as long as copying 1 MiB.
  Busy(HostJob* job, uint64_t generation, std::unique_lock<std::mutex>* lock)
      : job_(*job), generation_(generation), lock_(*lock) {
    job_.changed_.wait(
        lock_, [this] { return job_.busy_.empty() || job_.busy_.begin()->first >= generation_; });
    ++job_.busy_[generation_];
  }
  // Leaves the lock taken.
  ~Busy() {
    if (!lock_.owns_lock()) lock_.lock();
    if (--job_.busy_[generation_] == 0) job_.busy_.erase(generation_);
    job_.changed_.notify_all();
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

  // Without the lock.
  template <class Work>
  absl::Status Do(const Work& work) {
    lock_.unlock();
    absl::Status status = Caught(work);
    lock_.lock();
    return status;
  }

 private:
  HostJob& job_;
  const uint64_t generation_;
  std::unique_lock<std::mutex>& lock_;
};

absl::Status HostJob::Push(Stream* stream, const bulk::Header& header,
                           absl::Span<const absl::Span<const char>> parts) {
  std::shared_ptr<HeldState> state;  // goes after the lock
  std::unique_lock<std::mutex> lock(mutex_);
  const auto check = [&]() -> absl::Status {
    ZS_RETURN_IF_ERROR(CheckFrame(*stream, header));
    return CheckPush(header);
  };
  absl::Status status = check();
  if (absl::IsAlreadyExists(status)) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(status);
  uint64_t life = 0;
  {
    Busy busy(this, header.generation, &lock);
    status = check();  // it may have waited
    if (absl::IsAlreadyExists(status)) return absl::OkStatus();
    ZS_RETURN_IF_ERROR(status);
    life = life_;
    state = state_;
    status = busy.Do([&] {
      return state->state->Stage(header.chunk, header.step, header.begin, header.count, parts);
    });
  }
  ZS_RETURN_IF_ERROR(CheckFrame(*stream, header));
  if (!status.ok()) {
    if (life != life_) return TooEarly("the state is being loaded");
    lock.unlock();
    if (!IsOfTheState(status)) return status;
    FailState(life, status);
    return LostHere(status);
  }
  const uint64_t sealed = control_.report().sealed_step();
  status = control_.OnStaged(header.generation, header.epoch, header.step, header.chunk,
                             header.begin, header.count);
  const bool sealed_now = control_.report().sealed_step() != sealed;
  lock.unlock();
  state = nullptr;
  if (status.ok()) context_->pushed += header.bytes;
  if (sealed_now) SendReport(false);
  return status;
}

void HostJob::WaitForPush(const std::shared_ptr<Stream>& stream, const bulk::Header& header,
                          StoreHost::PushHandler ready) {
  Calls calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Waiting waiting{stream, header, nullptr, std::move(ready)};
    if (!Answer(&waiting, &calls)) waiting_[header.chunk].push_back(std::move(waiting));
  }
  Make(calls);
}

void HostJob::Pull(const std::shared_ptr<Stream>& stream, const bulk::Header& header,
                   StoreHost::PullHandler handler) {
  Calls calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Waiting waiting{stream, header, std::move(handler), nullptr};
    if (!Answer(&waiting, &calls)) waiting_[header.chunk].push_back(std::move(waiting));
  }
  Make(calls);
}

bool HostJob::Answer(Waiting* waiting, Calls* calls) {
  const bulk::Header& header = waiting->header;
  const absl::Status frame = CheckFrame(*waiting->stream, header);
  if (waiting->push) {
    // Only what comes by itself is waited for; other errors are Push's to give.
    const absl::Status open = frame.ok() ? control_.CheckStream(header.generation) : frame;
    if (open.ok() && IsTooEarly(CheckPush(header))) return false;
    calls->push_back([push = std::move(waiting->push), open] { push(open); });
    return true;
  }
  absl::StatusOr<JobState::ParameterRead> answer(absl::InternalError("a pull without an answer"));
  if (!frame.ok()) {
    answer = frame;
  } else {
    const absl::StatusOr<JobControl::Pull> pull = control_.CheckPull(
        header.generation, header.epoch, header.step, header.chunk, header.begin, header.count);
    if (pull.ok() && *pull == JobControl::Pull::kWait) return false;
    answer = pull.ok() ? Pin(header) : pull.status();
  }
  if (!answer.ok()) {
    calls->push_back([pull = std::move(waiting->pull), status = answer.status()] { pull(status); });
    return true;
  }
  // The bytes may come later, when this job may be gone.
  auto done = [weak = weak_from_this(), life = life_,
               pull = std::move(waiting->pull)](absl::StatusOr<PinnedParameters> got) {
    if (const std::shared_ptr<HostJob> job = weak.lock(); job != nullptr) {
      if (got.ok()) job->context_->pulled += got->bytes.size();
      if (IsOfTheState(got.status())) job->FailState(life, got.status());
    }
    if (IsOfTheState(got.status())) got = LostHere(got.status());
    pull(std::move(got));
  };
  calls->push_back([read = *std::move(answer), done = std::move(done)] { read(done); });
  return true;
}

absl::StatusOr<JobState::ParameterRead> HostJob::Pin(const bulk::Header& header) {
  if (state_ == nullptr) return absl::UnavailableError("the state is being loaded");
  return state_->state->BeginRead(header.chunk, header.begin, header.count, header.step);
}

void HostJob::Recheck(Calls* calls) {
  for (auto& [chunk, list] : waiting_)
    std::erase_if(list, [&](Waiting& waiting) { return Answer(&waiting, calls); });
  std::erase_if(waiting_, [](const auto& entry) { return entry.second.empty(); });
}

void HostJob::Recheck(uint32_t chunk, Calls* calls) {
  const auto found = waiting_.find(chunk);
  if (found == waiting_.end()) return;
  std::erase_if(found->second, [&](Waiting& waiting) { return Answer(&waiting, calls); });
  if (found->second.empty()) waiting_.erase(found);
}

// While others are loaded, chunks that stay are there already: two stores may copy from each other.
bool HostJob::IsHere(uint32_t chunk) const {
  const v1::StorePhase phase = control_.report().phase();
  return phase == v1::STORE_PHASE_READY ||
         (phase == v1::STORE_PHASE_LOADING && kept_.contains(chunk));
}

absl::Status HostJob::State(Stream* stream, const bulk::Header& header, absl::Span<float> values) {
  std::shared_ptr<HeldState> state;  // goes after the lock
  std::unique_lock<std::mutex> lock(mutex_);
  ZS_RETURN_IF_ERROR(CheckFrame(*stream, header));
  if (!stream->of_store || header.code >= kStateKinds || values.size() != header.count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "state of kind ", header.code, ", ", header.count, " elements; wanted a kind below ",
        kStateKinds, " on the stream of a store, with room for as many"));
  }
  ZS_RETURN_IF_ERROR(control_.CheckStream(header.generation));
  // The map may have changed since the stream was opened.
  ZS_RETURN_IF_ERROR(control_.CheckPeer(stream->member, stream->incarnation));
  const v1::StoreReport& report = control_.report();
  const uint64_t epoch = report.version().epoch(), step = report.version().step();
  const std::string where =
      absl::StrCat("the state of ", report.run_id(), " at step ", header.step, " of epoch ",
                   header.epoch, "; here it is at step ", step, " of epoch ", epoch);
  if (header.epoch < epoch || (header.epoch == epoch && header.step < step))
    return absl::FailedPreconditionError(absl::StrCat("gone is ", where));
  if (header.epoch != epoch || header.step != step || state_ == nullptr || !IsHere(header.chunk))
    return absl::UnavailableError(absl::StrCat("not here yet is ", where));
  uint64_t life = 0;
  absl::Status status;
  {
    Busy busy(this, header.generation, &lock);
    life = life_;
    state = state_;
    // Whatever ended while it waited is found out here.
    if (state == nullptr || !IsHere(header.chunk) ||
        control_.report().version().step() != header.step ||
        control_.report().version().epoch() != header.epoch) {
      return absl::UnavailableError("the state is being loaded");
    }
    status = busy.Do([&] {
      return state->state->GetState(header.chunk, static_cast<StateKind>(header.code), header.begin,
                                    values);
    });
  }
  if (status.ok()) {
    context_->copied += values.size() * sizeof(float);
    return status;
  }
  if (life != life_) return absl::UnavailableError("the state is being loaded");
  lock.unlock();
  if (!IsOfTheState(status)) return status;
  FailState(life, status);
  return LostHere(status);
}

}  // namespace zeroshard::store
