// How many connections a server takes: in all, of one address, and how fast of one address. gRPC
// 1.51 has no such limits, and where files run out it stops listening for good.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <map>
#include <string>

#include "absl/time/time.h"

namespace zeroshard::security {

// Pure: time and whether a connection still lives are arguments. Not thread-safe.
class ConnectionGate {
 public:
  struct Most {
    size_t in_all = 16384;
    size_t of_peer = 1024;
    // Of one peer: so many at once, then so many a second.
    double burst = 1024;
    double per_second = 200;
  };
  // A connection that was let in, and can be asked whether it is still there.
  using Alive = std::function<bool()>;

  explicit ConnectionGate(const Most& most) : most_(most) {}

  enum class Verdict { kLetIn, kTooManyInAll, kTooManyOfPeer, kTooFast };
  Verdict Judge(const std::string& peer, absl::Duration now);
  // After kLetIn.
  void LetIn(const std::string& peer, Alive alive);

  size_t open() const { return open_; }
  size_t peers() const { return peers_.size(); }

 private:
  struct Peer {
    std::list<Alive> connections;
    double allowance = 0;
    absl::Duration refilled;
  };

  void Sweep(Peer* peer);
  void SweepAll(absl::Duration now);

  const Most most_;
  std::map<std::string, Peer> peers_;
  size_t open_ = 0;  // some of them may be gone already
  absl::Duration swept_ = -absl::InfiniteDuration();
};

}  // namespace zeroshard::security
