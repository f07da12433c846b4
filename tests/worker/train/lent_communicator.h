// A communicator that somebody else owns.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "worker/comm/communicator.h"

namespace zeroshard {

// Connections that outlive what is put around them for one job.
class LentCommunicator : public Communicator {
 public:
  explicit LentCommunicator(Communicator* owned) : owned_(*owned) {}
  int rank() const override { return owned_.rank(); }
  int size() const override { return owned_.size(); }
  Event AllGather(void* buffer, int64_t count, DType type, const CollectiveInfo& info,
                  const Event& after) override {
    return owned_.AllGather(buffer, count, type, info, after);
  }
  Event ReduceScatter(ReduceScatterArgs args, const CollectiveInfo& info,
                      const Event& after) override {
    return owned_.ReduceScatter(std::move(args), info, after);
  }
  Event AllReduce(void* buffer, int64_t count, DType type, const CollectiveInfo& info,
                  const Event& after) override {
    return owned_.AllReduce(buffer, count, type, info, after);
  }
  Event Broadcast(void* buffer, int64_t bytes, int root, const CollectiveInfo& info,
                  const Event& after) override {
    return owned_.Broadcast(buffer, bytes, root, info, after);
  }
  Event Send(const void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
             const Event& after) override {
    return owned_.Send(buffer, bytes, peer, info, after);
  }
  Event Recv(void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
             const Event& after) override {
    return owned_.Recv(buffer, bytes, peer, info, after);
  }
  Event Exchange(std::vector<Message> messages, const CollectiveInfo& info,
                 const Event& after) override {
    return owned_.Exchange(std::move(messages), info, after);
  }
  Event Barrier(const CollectiveInfo& info) override { return owned_.Barrier(info); }
  absl::Status AllGatherHost(void* buffer, int64_t bytes, const CollectiveInfo& info) override {
    return owned_.AllGatherHost(buffer, bytes, info);
  }
  void Abort(const std::string& reason) override { owned_.Abort(reason); }
  const TrafficCounters& traffic() const override { return owned_.traffic(); }
  double BusySeconds() const override { return owned_.BusySeconds(); }

 private:
  Communicator& owned_;
};

}  // namespace zeroshard
