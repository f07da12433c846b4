#include "coordinator/core/placement.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/job_mesh.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

class Placer {
 public:
  Placer(const std::vector<RankNeed>& needs, const std::vector<WorkerRoom>& rooms, size_t tensor)
      : needs_(needs), ledger_(rooms), tensor_(tensor) {
    for (size_t worker = 0; worker < rooms.size(); ++worker) {
      const auto same = std::find_if(hosts_.begin(), hosts_.end(), [&](const auto& workers) {
        return rooms[workers.front()].host == rooms[worker].host;
      });
      if (same != hosts_.end()) {
        same->push_back(worker);
      } else {
        hosts_.push_back({worker});
      }
    }
  }

  std::optional<std::vector<size_t>> ByGroups() {
    std::vector<size_t> placed(needs_.size()), left;
    for (size_t first = 0; first < needs_.size(); first += tensor_) {
      const auto on_one = [&](const std::vector<size_t>& host) {
        return TakeAll(first, host, &placed);
      };
      if (std::none_of(hosts_.begin(), hosts_.end(), on_one)) left.push_back(first);
    }
    for (const size_t first : left) {
      for (size_t rank = first; rank < first + tensor_;) {
        const size_t taken = TakeFromFullest(rank, first + tensor_, &placed);
        if (taken == 0) return std::nullopt;
        rank += taken;
      }
    }
    return placed;
  }

  std::optional<std::vector<size_t>> LargestFirst() {
    std::vector<size_t> order(needs_.size()), placed(needs_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return needs_[a].Device() + needs_[a].copy > needs_[b].Device() + needs_[b].copy;
    });
    for (const size_t rank : order) {
      size_t worker = 0;
      while (worker < ledger_.size() && !ledger_.Take(worker, needs_[rank])) ++worker;
      if (worker == ledger_.size()) return std::nullopt;
      placed[rank] = worker;
    }
    return placed;
  }

 private:
  // The whole group that begins at `first`, or nothing.
  bool TakeAll(size_t first, const std::vector<size_t>& host, std::vector<size_t>* placed) {
    for (size_t rank = first; rank < first + tensor_; ++rank) {
      const std::optional<size_t> worker = TakeOne(needs_[rank], host);
      if (!worker) {
        for (size_t taken = first; taken < rank; ++taken)
          ledger_.GiveBack((*placed)[taken], needs_[taken]);
        return false;
      }
      (*placed)[rank] = *worker;
    }
    return true;
  }

  std::optional<size_t> TakeOne(const RankNeed& need, const std::vector<size_t>& host) {
    for (const size_t worker : host) {
      if (ledger_.Take(worker, need)) return worker;
    }
    return std::nullopt;
  }

  // As many of the ranks as one host has room for: of those that have room for the first, the one
  // with most workers left.
  size_t TakeFromFullest(size_t rank, size_t end, std::vector<size_t>* placed) {
    std::vector<const std::vector<size_t>*> order;
    for (const std::vector<size_t>& host : hosts_) order.push_back(&host);
    const auto left = [this](const std::vector<size_t>& host) {
      return std::count_if(host.begin(), host.end(),
                           [this](size_t worker) { return !ledger_.taken(worker); });
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](const auto* a, const auto* b) { return left(*a) > left(*b); });
    size_t taken = 0;
    for (const std::vector<size_t>* host : order) {
      while (rank + taken < end) {
        const std::optional<size_t> worker = TakeOne(needs_[rank + taken], *host);
        if (!worker) break;
        (*placed)[rank + taken++] = *worker;
      }
      if (taken > 0) break;
    }
    return taken;
  }

  const std::vector<RankNeed>& needs_;
  RoomLedger ledger_;
  const size_t tensor_;
  std::vector<std::vector<size_t>> hosts_;  // workers by host, in the order of their first ones
};

}  // namespace

std::vector<size_t> PlaceRanks(const std::vector<RankNeed>& needs,
                               const std::vector<WorkerRoom>& rooms, size_t tensor) {
  if (rooms.size() < needs.size() || tensor == 0 || needs.size() % tensor != 0) return {};
  std::optional<std::vector<size_t>> placed = Placer(needs, rooms, tensor).ByGroups();
  if (!placed) placed = Placer(needs, rooms, tensor).LargestFirst();
  return placed.value_or(std::vector<size_t>());
}

std::vector<size_t> WorkersFor(const v1::JobSpec& spec, const std::vector<RankNeed>& needs,
                               const std::vector<WorkerRoom>& rooms) {
  if (RanksOfReplica(spec) == 1) return PickWorkers(needs, rooms);
  return PlaceRanks(needs, rooms, std::max<uint32_t>(1, spec.parallel().tensor()));
}

v1::Mesh MeshMessage(const v1::JobSpec& spec, uint32_t ranks) {
  v1::Mesh mesh;
  mesh.set_pipeline(std::max<uint32_t>(1, spec.parallel().pipeline()));
  mesh.set_tensor(std::max<uint32_t>(1, spec.parallel().tensor()));
  mesh.set_data(std::max<uint32_t>(1, ranks / (mesh.pipeline() * mesh.tensor())));
  return mesh;
}

v1::MeshPosition PositionMessage(const v1::Mesh& mesh, uint32_t rank) {
  const MeshPosition at = PositionOf({.pipeline = static_cast<int>(mesh.pipeline()),
                                      .data = static_cast<int>(mesh.data()),
                                      .tensor = static_cast<int>(mesh.tensor())},
                                     static_cast<int>(rank));
  v1::MeshPosition message;
  message.set_pipeline(static_cast<uint32_t>(at.pipeline));
  message.set_data(static_cast<uint32_t>(at.data));
  message.set_tensor(static_cast<uint32_t>(at.tensor));
  return message;
}

std::string DescribePlacement(const std::vector<std::string>& hosts, size_t tensor) {
  if (tensor <= 1 || hosts.empty() || hosts.size() % tensor != 0) return "";
  const size_t groups = hosts.size() / tensor;
  std::vector<std::string> apart;
  for (size_t first = 0; first < hosts.size(); first += tensor) {
    const auto begin = hosts.begin() + static_cast<ptrdiff_t>(first);
    const std::set<std::string> on(begin, begin + static_cast<ptrdiff_t>(tensor));
    if (on.size() == 1) continue;
    constexpr size_t kShown = 4;
    std::vector<std::string> shown(on.begin(), on.end());
    if (on.size() > kShown) shown.resize(kShown);
    apart.push_back(absl::StrCat("ranks ", first, " to ", first + tensor - 1, " are on ",
                                 absl::StrJoin(shown, ", "), on.size() > kShown ? ", ..." : ""));
  }
  if (apart.empty()) {
    return groups == 1 ? "the tensor group is on one host"
                       : absl::StrCat("each of ", groups, " tensor groups is on one host");
  }
  return absl::StrCat(apart.size(), " of ", groups,
                      groups == 1 ? " tensor group" : " tensor groups",
                      apart.size() == 1 ? " is" : " are",
                      " on several hosts, as no one had room for it, and its sums travel between "
                      "them in every unit: ",
                      AtMostThree(apart));
}

}  // namespace zeroshard::coordinator
