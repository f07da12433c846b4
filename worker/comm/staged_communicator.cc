#include "worker/comm/staged_communicator.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "worker/device/host_event.h"
#include "worker/device/host_pool.h"

namespace zeroshard {
namespace {

// A run of the caller's memory, and where it is in the operation's host memory.
struct Part {
  char* device = nullptr;
  size_t at = 0;
  size_t bytes = 0;
};

struct Staging {
  size_t bytes = 0;  // of host memory
  std::vector<Part> in, out;
};

size_t Bytes(int64_t count, DType type) { return static_cast<size_t>(count) * SizeOf(type); }

// Whether the sizes make sense: where they do not, the inner communicator refuses them, and no
// memory is touched.
bool Sound(const ReduceScatterArgs& args, int size) {
  return static_cast<int>(args.counts.size()) == size && args.contributors >= 1 &&
         args.contributors <= size &&
         std::all_of(args.counts.begin(), args.counts.end(), [](int64_t n) { return n >= 0; });
}

class StagedCommunicator : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> inner, Device* device)
      : rank_(inner->rank()),
        size_(inner->size()),
        pool_(device, kStagedOperations, std::numeric_limits<size_t>::max()),
        in_(device->NewStream("stage-in")),
        out_(device->NewStream("stage-out")),
        inner_(std::move(inner)) {}

  ~StagedCommunicator() override {
    inner_ = nullptr;
    pool_.Drain();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Event AllGather(void* buffer, int64_t count, DType type, const CollectiveInfo& info,
                  const Event& after) override {
    if (count < 0) return inner_->AllGather(nullptr, count, type, info, after);
    const size_t part = Bytes(count, type);
    const size_t own = part * static_cast<size_t>(rank_), end = part * static_cast<size_t>(size_);
    char* const data = static_cast<char*>(buffer);
    return Run({end, {{data + own, own, part}}, Around(data, own, part, end)}, after,
               [&](char* host, const Event& copied) {
                 return inner_->AllGather(host, count, type, info, copied);
               });
  }

  Event ReduceScatter(ReduceScatterArgs args, const CollectiveInfo& info,
                      const Event& after) override {
    if (!Sound(args, size_)) {
      args.input = args.output = nullptr;
      return inner_->ReduceScatter(std::move(args), info, after);
    }
    int64_t total = 0;
    for (const int64_t count : args.counts) total += count;
    const bool contributes = rank_ < args.contributors;
    const size_t input = contributes ? Bytes(total, args.type) : 0;
    const size_t output = Bytes(args.counts[static_cast<size_t>(rank_)], args.output_type);
    const size_t at = static_cast<size_t>(RoundUp(static_cast<int64_t>(input), 64));
    Staging staging{at + output, {}, {{static_cast<char*>(args.output), at, output}}};
    staging.in.push_back({static_cast<char*>(const_cast<void*>(args.input)), 0, input});
    if (args.accumulate) staging.in.push_back(staging.out[0]);
    return Run(staging, after, [&](char* host, const Event& copied) {
      args.input = contributes ? host : nullptr;
      args.output = host + at;
      return inner_->ReduceScatter(std::move(args), info, copied);
    });
  }

  Event AllReduce(void* buffer, int64_t count, DType type, const CollectiveInfo& info,
                  const Event& after) override {
    if (count < 0) return inner_->AllReduce(nullptr, count, type, info, after);
    const Part all{static_cast<char*>(buffer), 0, Bytes(count, type)};
    return Run({all.bytes, {all}, {all}}, after, [&](char* host, const Event& copied) {
      return inner_->AllReduce(host, count, type, info, copied);
    });
  }

  Event Broadcast(void* buffer, int64_t bytes, int root, const CollectiveInfo& info,
                  const Event& after) override {
    if (bytes < 0) return inner_->Broadcast(nullptr, bytes, root, info, after);
    const Part all{static_cast<char*>(buffer), 0, static_cast<size_t>(bytes)};
    Staging staging{all.bytes, {}, {}};
    (rank_ == root ? staging.in : staging.out).push_back(all);
    return Run(staging, after, [&](char* host, const Event& copied) {
      return inner_->Broadcast(host, bytes, root, info, copied);
    });
  }

  Event Send(const void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
             const Event& after) override {
    if (bytes < 0) return inner_->Send(nullptr, bytes, peer, info, after);
    const Part all{static_cast<char*>(const_cast<void*>(buffer)), 0, static_cast<size_t>(bytes)};
    return Run({all.bytes, {all}, {}}, after, [&](char* host, const Event& copied) {
      return inner_->Send(host, bytes, peer, info, copied);
    });
  }

  Event Recv(void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
             const Event& after) override {
    if (bytes < 0) return inner_->Recv(nullptr, bytes, peer, info, after);
    const Part all{static_cast<char*>(buffer), 0, static_cast<size_t>(bytes)};
    return Run({all.bytes, {}, {all}}, after, [&](char* host, const Event& copied) {
      return inner_->Recv(host, bytes, peer, info, copied);
    });
  }

  Event Exchange(std::vector<Message> messages, const CollectiveInfo& info,
                 const Event& after) override {
    Staging staging;
    std::vector<size_t> places;
    for (const Message& m : messages) {
      if (m.bytes < 0) return Refused(std::move(messages), info, after);
      const Part part{static_cast<char*>(m.buffer), staging.bytes, static_cast<size_t>(m.bytes)};
      (m.send ? staging.in : staging.out).push_back(part);
      places.push_back(part.at);
      staging.bytes += static_cast<size_t>(RoundUp(m.bytes, 64));
    }
    return Run(staging, after, [&](char* host, const Event& copied) {
      for (size_t i = 0; i < messages.size(); ++i) messages[i].buffer = host + places[i];
      return inner_->Exchange(std::move(messages), info, copied);
    });
  }

  Event Barrier(const CollectiveInfo& info) override {
    return Run({}, {}, [&](char*, const Event&) { return inner_->Barrier(info); });
  }

  absl::Status AllGatherHost(void* buffer, int64_t bytes, const CollectiveInfo& info) override {
    return inner_->AllGatherHost(buffer, bytes, info);
  }

  void Abort(const std::string& reason) override { inner_->Abort(reason); }
  const TrafficCounters& traffic() const override { return inner_->traffic(); }
  double BusySeconds() const override { return inner_->BusySeconds(); }

 private:
  static std::vector<Part> Around(char* data, size_t begin, size_t bytes, size_t end) {
    return {{data, 0, begin}, {data + begin + bytes, begin + bytes, end - begin - bytes}};
  }

  // By the inner communicator, which looks at the sizes before it does at memory.
  Event Refused(std::vector<Message> messages, const CollectiveInfo& info, const Event& after) {
    for (Message& m : messages) m.buffer = nullptr;
    return inner_->Exchange(std::move(messages), info, after);
  }

  template <typename StartInner>
  Event Run(const Staging& staging, const Event& after, StartInner start) {
    bool started = false;
    const Event event =
        pool_.Run(staging.bytes, [&](char* host, const absl::Status& earlier) -> Event {
          started = true;
          if (!earlier.ok()) {
            inner_->Abort(absl::StrCat("an operation before failed: ", earlier.message()));
          }
          const Event copied = CopyIn(staging, host, after);
          return CopyOut(staging, host, AllOf({start(host, copied), copied}));
        });
    if (!started) {
      inner_->Abort(absl::StrCat("rank ", rank_, ": ", event.Wait().message()));
    }
    return event;
  }

  Event CopyIn(const Staging& staging, char* host, const Event& after) {
    std::vector<Event> copies;
    for (const Part& part : staging.in) {
      if (part.bytes == 0) continue;
      copies.push_back(
          in_->Copy(host + part.at, part.device, part.bytes, BehindWriters(part, after)));
    }
    return copies.empty() ? after : AllOf(std::move(copies));
  }

  // After `brought`, which has ended also where it failed early: host memory is free behind it.
  Event CopyOut(const Staging& staging, const char* host, const Event& brought) {
    std::vector<Event> copies;
    for (const Part& part : staging.out) {
      if (part.bytes == 0) continue;
      copies.push_back(out_->Copy(part.device, host + part.at, part.bytes, brought));
      writes_.push_back({part.device, part.device + part.bytes, copies.back()});
    }
    return copies.empty() ? brought : AllOf(std::move(copies));
  }

  // `after`, and what operations before this one still bring to the same memory: their copies are
  // another stream's.
  Event BehindWriters(const Part& part, const Event& after) {
    while (!writes_.empty() && writes_.front().done.Done()) writes_.pop_front();
    std::vector<Event> all;
    for (const Write& write : writes_) {
      if (write.begin < part.device + part.bytes && part.device < write.end)
        all.push_back(write.done);
    }
    if (all.empty()) return after;
    all.push_back(after);
    return AllOf(std::move(all));
  }

  struct Write {
    const char *begin, *end;
    Event done;
  };

  const int rank_, size_;
  std::deque<Write> writes_;  // on their way; within the pool's calls
  HostPool pool_;             // keeps the order of concurrent callers one order
  std::unique_ptr<Stream> in_, out_;
  std::unique_ptr<Communicator> inner_;
};

}  // namespace

std::unique_ptr<Communicator> MakeStagedCommunicator(std::unique_ptr<Communicator> inner,
                                                     Device* device) {
  return std::make_unique<StagedCommunicator>(std::move(inner), device);
}

}  // namespace zeroshard
