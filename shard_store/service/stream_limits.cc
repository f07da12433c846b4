#include "shard_store/service/stream_limits.h"

#include <functional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace zeroshard::store {
namespace {

StreamLimits::Place MakePlace(const void* address, std::function<void()> give_back) {
  return StreamLimits::Place(address,
                             [give_back = std::move(give_back)](const void*) { give_back(); });
}

// Of a run that may be anything.
std::string Name(const std::string& run_id) { return absl::CHexEscape(run_id.substr(0, 80)); }

template <typename Key>
void Less(std::map<Key, int>* counts, const Key& key) {
  const auto found = counts->find(key);
  if (--found->second == 0) counts->erase(found);
}

template <typename Key>
int CountOf(const std::map<Key, int>& counts, const Key& key) {
  const auto found = counts.find(key);
  return found == counts.end() ? 0 : found->second;
}

}  // namespace

absl::StatusOr<StreamLimits::Place> StreamLimits::TakeSilent() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (silent_ >= most_.silent) {
    return absl::UnavailableError(
        absl::StrCat(silent_, " streams have not said hello to this store yet, and no more than ",
                     most_.silent, " may be silent at once; try again"));
  }
  ++silent_;
  return MakePlace(this, [self = shared_from_this()] {
    std::lock_guard<std::mutex> give(self->mutex_);
    --self->silent_;
  });
}

absl::StatusOr<StreamLimits::Place> StreamLimits::Take(const v1::BulkHello& hello) {
  Peer peer(hello.run_id(), hello.store(), hello.rank(), hello.generation());
  std::lock_guard<std::mutex> lock(mutex_);
  if (const int open = CountOf(of_peer_, peer); open >= most_.of_peer) {
    return absl::ResourceExhaustedError(absl::StrCat(
        hello.store() ? "store " : "rank ", hello.rank(), " of ", Name(hello.run_id()), " has ",
        open, " streams open to this store in generation ", hello.generation(),
        " and asks for one more; at most ", most_.of_peer, " are served"));
  }
  if (const int open = CountOf(of_run_, hello.run_id()); open >= most_.of_run) {
    return absl::ResourceExhaustedError(absl::StrCat(Name(hello.run_id()), " has ", open,
                                                     " streams open to this store; at most ",
                                                     most_.of_run, " are served"));
  }
  ++of_peer_[peer];
  ++of_run_[hello.run_id()];
  return MakePlace(this, [self = shared_from_this(), peer = std::move(peer)] {
    std::lock_guard<std::mutex> give(self->mutex_);
    Less(&self->of_peer_, peer);
    Less(&self->of_run_, std::get<0>(peer));
  });
}

}  // namespace zeroshard::store
