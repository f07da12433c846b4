#include "common/security/connection_gate.h"

#include <algorithm>
#include <utility>

namespace zeroshard::security {
namespace {

// Looking at all connections costs a system call each.
constexpr absl::Duration kSweepAtMostEvery = absl::Milliseconds(100);
// So that peers that are gone are forgotten.
constexpr absl::Duration kSweepAtLeastEvery = absl::Minutes(1);

}  // namespace

ConnectionGate::Verdict ConnectionGate::Judge(const std::string& peer, absl::Duration now) {
  const bool full = open_ >= most_.in_all;
  if (now - swept_ >= (full ? kSweepAtMostEvery : kSweepAtLeastEvery)) SweepAll(now);
  if (open_ >= most_.in_all) return Verdict::kTooManyInAll;

  const auto [at, added] = peers_.try_emplace(peer);
  Peer& known = at->second;
  if (added) {
    known.allowance = most_.burst;
    known.refilled = now;
  }
  const double passed = absl::ToDoubleSeconds(now - known.refilled);
  known.allowance = std::min(most_.burst, known.allowance + passed * most_.per_second);
  known.refilled = now;
  // Before anything that takes time: a peer that floods is refused cheaply.
  if (known.allowance < 1) return Verdict::kTooFast;
  known.allowance -= 1;
  if (known.connections.size() >= most_.of_peer) Sweep(&known);
  if (known.connections.size() >= most_.of_peer) return Verdict::kTooManyOfPeer;
  return Verdict::kLetIn;
}

void ConnectionGate::LetIn(const std::string& peer, Alive alive) {
  peers_[peer].connections.push_back(std::move(alive));
  ++open_;
}

void ConnectionGate::Sweep(Peer* peer) {
  open_ -= peer->connections.remove_if([](const Alive& alive) { return !alive(); });
}

void ConnectionGate::SweepAll(absl::Duration now) {
  swept_ = now;
  for (auto at = peers_.begin(); at != peers_.end();) {
    Sweep(&at->second);
    const double passed = absl::ToDoubleSeconds(now - at->second.refilled);
    const bool rested = at->second.allowance + passed * most_.per_second >= most_.burst;
    at = at->second.connections.empty() && rested ? peers_.erase(at) : std::next(at);
  }
}

}  // namespace zeroshard::security
