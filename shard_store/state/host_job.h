// One job on this store: its control, its state, its streams and what is under way. Within this
// library.
//
// One mutex around all of it; under it only memory is touched. What the control orders is done one
// after the other on a thread of the job's own; snapshots are written on others, of which one that
// hangs in a write holds up nothing but the next snapshot. Every load and
// every end begins a new `life`: what was under way then is stopped, and what it still says is not
// heard. Calls to the outside are collected under the lock and made after it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "shard_store/core/job_control.h"
#include "shard_store/state/store_host.h"
#include "shard_store/state/writer_buffer.h"

namespace zeroshard::store {

// How long things took, since they were last asked for; the newest thousand. Thread-safe.
class Durations {
 public:
  void Add(double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    seconds_.push_back(seconds);
    if (seconds_.size() > kMost) seconds_.pop_front();
  }
  std::vector<double> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<double> taken(seconds_.begin(), seconds_.end());
    seconds_.clear();
    return taken;
  }

 private:
  static constexpr size_t kMost = 1000;
  std::mutex mutex_;
  std::deque<double> seconds_;
};

// What the jobs of a host share.
struct HostContext {
  explicit HostContext(StoreHostOptions given)
      : options(std::move(given)),
        budget(options.memory_limit),
        disk(options.nvme_limit, "NVMe folder", "--nvme-limit"),
        writing(uint64_t{kMostWriters} * static_cast<uint64_t>(options.chunk_elements) *
                sizeof(float)),
        pool(options.threads) {}

  const StoreHostOptions options;
  MemoryBudget budget, disk;
  MemoryBudget writing;  // beside the budget: what writes snapshots
  TaskPool pool;
  // Of the budget, what the states that are in use took: the rest is on its way to being free.
  std::atomic<uint64_t> held{0}, disk_held{0};
  std::atomic<uint64_t> pushed{0}, pulled{0}, copied{0};
  nvme::IoCounters disk_io;
  Durations update_seconds, snapshot_seconds;
};

class StoreHost::Stream {
 public:
  Stream(std::shared_ptr<HostJob> job, const v1::BulkHello& hello,
         std::function<void(const absl::Status&)> on_end)
      : job(std::move(job)),
        generation(hello.generation()),
        of_store(hello.store()),
        member(hello.member()),
        incarnation(hello.incarnation()),
        on_end(std::move(on_end)) {}

  const std::shared_ptr<HostJob> job;
  const uint64_t generation;
  const bool of_store;
  const std::string member, incarnation;
  // Guarded by the job's mutex.
  absl::Status ended;  // why, where the store ended it
  std::function<void(const absl::Status&)> on_end;
};

class HostJob : public std::enable_shared_from_this<HostJob> {
 public:
  using Stream = StoreHost::Stream;

  HostJob(const std::string& run_id, HostContext* context);
  ~HostJob();  // after Finish

  absl::Status Start();  // RESOURCE_EXHAUSTED: there is no thread for it
  // `self`: the incarnation of this process now.
  void OnDirective(const v1::StoreDirective& directive, const std::string& self);
  v1::StoreReport Report() const;
  uint64_t buffer_bytes() const;  // JobState's
  // Forgets everything and ends the streams with this; no report comes after it.
  void End(const absl::Status& status);
  // The job is over, everything that can be is freed, and the last report made: it may be
  // forgotten. A thread may still be in a write that does not return.
  bool over() const { return over_; }
  bool finished() const { return finished_; }  // Finish does not wait
  void Finish();  // waits for the job's threads; after End or once over
  // The same until then; what is still under way, in words, else empty.
  std::string AwaitFinished(std::chrono::steady_clock::time_point until);

  absl::StatusOr<std::shared_ptr<Stream>> Open(const v1::BulkHello& hello,
                                               std::function<void(const absl::Status&)> on_end);
  absl::Status Push(Stream* stream, const bulk::Header& header,
                    absl::Span<const absl::Span<const char>> parts);
  void WaitForPush(const std::shared_ptr<Stream>& stream, const bulk::Header& header,
                   StoreHost::PushHandler ready);
  void Pull(const std::shared_ptr<Stream>& stream, const bulk::Header& header,
            StoreHost::PullHandler handler);
  absl::Status State(Stream* stream, const bulk::Header& header, absl::Span<float> values);
  void Close(const std::shared_ptr<Stream>& stream);

 private:
  // Calls that are made once the lock is given back.
  using Calls = std::vector<std::function<void()>>;
  struct HeldState;
  struct Operation {
    bool snapshot = false;
    uint64_t life = 0;
    std::function<void()> run;
  };
  struct Waiting {
    std::shared_ptr<Stream> stream;
    bulk::Header header;
    StoreHost::PullHandler pull;  // one of the two
    StoreHost::PushHandler push;
  };
  // A stage or a read that is copying memory outside the lock.
  class Busy;
  struct Writer;  // of a snapshot

  // --- under the lock ---
  void TakeOrders(const Orders& orders, Calls* calls);
  void BeginLife(Calls* calls);
  void DropState();
  void CancelSnapshot(Calls* calls);
  void EndStreams(bool all, const absl::Status& status, Calls* calls);
  void Recheck(Calls* calls);
  void Recheck(uint32_t chunk, Calls* calls);
  bool Answer(Waiting* waiting, Calls* calls);  // false: it has to wait
  absl::StatusOr<JobState::ParameterRead> Pin(const bulk::Header& header);
  absl::Status CheckFrame(const Stream& stream, const bulk::Header& header) const;
  // As JobControl::CheckPush; what comes by itself is TooEarly.
  absl::Status CheckPush(const bulk::Header& header) const;
  bool IsHere(uint32_t chunk) const;  // at the version of the report
  v1::StoreReport MakeReport() const;

  // --- without it ---
  static void Make(const Calls& calls);
  void SendReport(bool always);
  void OnProgress();
  // How far the load is; `waits`: for a store that says nothing.
  void OnLoading(uint64_t life, const std::string& what, bool waits);
  void OnReading(const std::string& folder, bool begins);
  // The state of `life` is of no use any more.
  void FailState(uint64_t life, const absl::Status& status);
  // Tells the control something and does what follows from it; nothing where `life` is over.
  void Tell(uint64_t life, const std::function<Orders()>& event);

  // --- on the job's thread ---
  void Main();
  // Lets go of states, and frees those that nobody is to use any more. False: some is held yet.
  bool LetGo(std::vector<std::shared_ptr<HeldState>> dying);
  void Load(uint64_t life, std::shared_ptr<const std::atomic<bool>> stop, const v1::StoreJob& job,
            const std::map<uint32_t, Chunk>& chunks, const std::vector<uint32_t>& keep);
  absl::Status MakeState(uint64_t life, const std::atomic<bool>& stop, const v1::StoreJob& job,
                         const std::map<uint32_t, Chunk>& chunks, const std::vector<uint32_t>& keep,
                         std::shared_ptr<HeldState>* state);
  absl::StatusOr<std::unique_ptr<PeerReader>> Connect(const v1::StoreJob& job, uint32_t store);
  void Apply(uint64_t life, const v1::StepDecision& decision);
  void Digest(uint64_t life, uint64_t step, const std::vector<uint32_t>& chunks);
  void StartSnapshot(uint64_t life, uint64_t number, const v1::SnapshotOrder& order);
  void JoinWriters(bool all);
  // On a thread of its own, or where there is none, with why.
  void WriteSnapshot(const std::shared_ptr<Writer>& writer, absl::Status status);

  HostContext* const context_;
  std::thread thread_;
  std::map<uint64_t, std::thread> writer_threads_;  // the job's thread's
  std::atomic<bool> over_ = false, finished_ = false;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  JobControl control_;
  std::string refused_;      // the last directive that was, logged once
  std::set<uint32_t> kept_;  // of the latest load
  std::string loading_;      // how far that is
  std::chrono::steady_clock::time_point loading_said_, loading_logged_;
  uint64_t life_ = 0;
  std::shared_ptr<std::atomic<bool>> stop_ = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<HeldState> state_;
  std::vector<std::shared_ptr<HeldState>> dying_;  // let go by the job's thread
  std::deque<Operation> operations_;
  bool quit_ = false;
  bool at_work_ = false;                // the job's thread is, on the state
  bool on_disk_ = false;                // that state's chunks are in --nvme-dir
  std::map<std::string, int> reading_;  // reads under way, by the folder that a load is from

  std::set<std::shared_ptr<Stream>> streams_;
  std::map<uint32_t, std::vector<Waiting>> waiting_;  // by chunk
  std::map<uint64_t, int> busy_;                      // by generation

  uint64_t snapshot_number_ = 0;    // grows when one is given up
  std::shared_ptr<Writer> writer_;  // of the one that was not
  // Those that have not ended, with the folder that they write into.
  std::map<uint64_t, std::string> writers_;
  uint64_t last_writer_ = 0;
  int ending_ = 0;  // calls of EndSnapshot that are about to be made

  bool reporting_ = false, report_again_ = false;
  std::string reported_;  // without progress and usage
  std::chrono::steady_clock::time_point reported_at_;
};

}  // namespace zeroshard::store
