// Rendezvous over the coordinator's keys, which are named by run and generation there.
#pragma once

#include <string>

#include "common/member/cluster_client.h"
#include "worker/comm/communicator.h"

namespace zeroshard {

// Thread-safe. `client` and `cancellation` outlive it.
class ClusterRendezvous : public Rendezvous {
 public:
  ClusterRendezvous(ClusterClient* client, v1::Fence fence, absl::Duration put_timeout,
                    Cancellation* cancellation)
      : client_(client),
        fence_(std::move(fence)),
        put_timeout_(put_timeout),
        cancellation_(cancellation) {}

  absl::Status Put(const std::string& key, const std::string& value) override {
    return client_->PutKey(fence_, key, value, put_timeout_, cancellation_);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    return client_->GetKey(fence_, key, timeout, cancellation_);
  }

 private:
  ClusterClient* const client_;
  const v1::Fence fence_;
  const absl::Duration put_timeout_;
  Cancellation* const cancellation_;
};

}  // namespace zeroshard
