#include "coordinator/core/stores.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/plan/model_table.h"
#include "common/plan/nvme_bytes.h"
#include "common/plan/offload.h"
#include "common/plan/zero_policy.h"
#include "common/status_macros.h"

namespace zeroshard::coordinator {
namespace {

// Of 128 bits: sums of many stores' limits, which a member may report as anything.
using Sum = unsigned __int128;

struct Host {
  std::vector<uint32_t> rooms;
};

// Rooms by host, hosts in the order of their first room.
std::vector<Host> ByHost(const std::vector<StoreRoom>& rooms) {
  std::vector<Host> hosts;
  std::vector<std::string> names;
  for (uint32_t room = 0; room < rooms.size(); ++room) {
    const auto found = std::find(names.begin(), names.end(), rooms[room].host);
    if (found == names.end()) {
      names.push_back(rooms[room].host);
      hosts.push_back({{room}});
    } else {
      hosts[static_cast<size_t>(found - names.begin())].rooms.push_back(room);
    }
  }
  return hosts;
}

// What a group of rooms takes where each takes at most `level`, and all together at most `most`.
Sum Takes(const std::vector<uint32_t>& group, const std::vector<uint64_t>& caps, uint64_t level,
          Sum most) {
  Sum sum = 0;
  for (const uint32_t room : group) sum += std::min(caps[room], level);
  return std::min(sum, most);
}

// The lowest level at which the groups take `wanted`; none where no level is enough.
std::optional<uint64_t> Level(const std::vector<Host>& groups, const std::vector<uint64_t>& caps,
                              uint64_t highest, Sum most, Sum wanted) {
  const auto enough = [&](uint64_t level) {
    Sum sum = 0;
    for (const Host& group : groups) sum += Takes(group.rooms, caps, level, most);
    return sum >= wanted;
  };
  if (!enough(highest)) return std::nullopt;
  uint64_t low = 0, high = highest;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (enough(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Bytes that each room takes of `replicas` times all chunks: equal ones but for what their caps
// say. A host takes no byte twice where the hosts allow it.
std::optional<std::vector<uint64_t>> Shares(const std::vector<Host>& hosts,
                                            const std::vector<uint64_t>& caps, uint64_t total,
                                            uint32_t replicas) {
  const Sum wanted = Sum{total} * replicas;
  std::vector<uint64_t> shares(caps.size(), 0);
  const std::optional<uint64_t> apart = Level(hosts, caps, total, total, wanted);
  if (apart) {
    for (const Host& host : hosts) {
      uint64_t level = *apart;
      if (Takes(host.rooms, caps, level, ~Sum{0}) > total) {
        level = *Level({host}, caps, level, ~Sum{0}, total);
      }
      for (const uint32_t room : host.rooms) shares[room] = std::min(caps[room], level);
      // Rounding up may have taken a byte too much for the host.
      Sum sum = Takes(host.rooms, caps, level, ~Sum{0});
      for (auto room = host.rooms.rbegin(); room != host.rooms.rend() && sum > total; ++room) {
        const uint64_t less = static_cast<uint64_t>(std::min(sum - total, Sum{shares[*room]}));
        shares[*room] -= less;
        sum -= less;
      }
    }
    return shares;
  }
  const std::optional<uint64_t> level = Level(hosts, caps, total, ~Sum{0}, wanted);
  if (!level) return std::nullopt;
  for (size_t room = 0; room < caps.size(); ++room) shares[room] = std::min(caps[room], *level);
  return shares;
}

// Lays all chunks `replicas` times on a line and cuts it into the rooms' shares. A share is at most
// as long as one pass, so that no room gets a chunk twice.
std::vector<uint32_t> CutLine(const StoreNeeds& needs, uint32_t replicas,
                              const std::vector<Host>& hosts, const std::vector<uint64_t>& shares) {
  std::vector<uint32_t> order;
  for (const Host& host : hosts) order.insert(order.end(), host.rooms.begin(), host.rooms.end());
  const size_t count = needs.chunks.size();
  std::vector<uint32_t> placement(count * replicas);
  size_t at = 0;
  Sum end = order.empty() ? 0 : shares[order[0]];
  Sum position = 0;
  for (uint32_t pass = 0; pass < replicas; ++pass) {
    for (size_t chunk = 0; chunk < count; ++chunk) {
      const Sum middle = position + needs.chunks[chunk] / 2;
      while (at + 1 < order.size() && middle >= end) end += shares[order[++at]];
      position += needs.chunks[chunk];
      // Who is first changes along the chunks, so that snapshots are written by all.
      const uint32_t place = (pass + static_cast<uint32_t>(chunk * replicas / count)) % replicas;
      placement[chunk * replicas + place] = order[at];
    }
  }
  return placement;
}

bool Fits(const StoreNeeds& needs, uint32_t replicas, const std::vector<StoreRoom>& rooms,
          const std::vector<uint32_t>& placement) {
  std::vector<Sum> taken(rooms.size(), 0);
  for (size_t chunk = 0; chunk < needs.chunks.size(); ++chunk) {
    std::set<uint32_t> seen;
    for (uint32_t replica = 0; replica < replicas; ++replica) {
      const uint32_t room = placement[chunk * replicas + replica];
      if (room >= rooms.size() || !seen.insert(room).second) return false;
      taken[room] += needs.chunks[chunk];
    }
  }
  for (size_t room = 0; room < rooms.size(); ++room) {
    if (taken[room] > rooms[room].Free()) return false;
  }
  return true;
}

absl::Status NoRoom(const StoreNeeds& needs, uint32_t replicas,
                    const std::vector<StoreRoom>& rooms) {
  Sum free = 0, limit = 0;
  for (const StoreRoom& room : rooms) {
    free += room.Free();
    limit += room.limit;
  }
  const auto cut = [](Sum sum) {
    return Bytes(static_cast<uint64_t>(std::min(sum, Sum{~uint64_t{0}})));
  };
  std::string text =
      absl::StrCat("its state and staging take ", cut(Sum{needs.bytes} * replicas),
                   needs.nvme ? " of the stores' NVMe folders" : " of the stores' memory",
                   replicas > 1 ? absl::StrCat(" (", replicas, " replicas of ", Bytes(needs.bytes),
                                               ", each on a store of its own)")
                                : "",
                   "; ", cut(free), " are free of ", cut(limit), " on ", rooms.size(),
                   rooms.size() == 1 ? " store" : " stores");
  if (needs.memory != 0) {
    absl::StrAppend(&text, "; each store takes ", Bytes(needs.fixed),
                    " more for its file, and one without ", Bytes(needs.memory),
                    " of free memory for the buffers counts as full");
  }
  if (rooms.size() < replicas) absl::StrAppend(&text, ", and at least ", replicas, " are wanted");
  if (needs.nvme && limit == 0) {
    absl::StrAppend(
        &text,
        "; no store has both an NVMe folder and that memory: start stores with --nvme-dir "
        "FOLDER");
  }
  return absl::ResourceExhaustedError(text);
}

}  // namespace

absl::StatusOr<StoreNeeds> MakeStoreNeeds(const v1::JobSpec& spec, int64_t chunk_elements) {
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(spec.model()));
  const DType type = ComputeType(spec);
  StoreNeeds needs;
  needs.replicas = std::max<uint32_t>(1, spec.store().replicas());
  needs.nvme = UsesNvme(spec);
  int64_t largest = 0;
  for (const Chunk& chunk : ChunkTable::Make(model, chunk_elements).chunks) {
    const ChunkBytes bytes = BytesOf(chunk, type, UsesSgd(spec));
    if (bytes.master != 0) largest = std::max(largest, chunk.size());
    needs.chunks.push_back(needs.nvme ? NvmeBytesOf(chunk.size(), bytes) : bytes.Total());
    needs.bytes += needs.chunks.back();
  }
  if (needs.nvme) {
    needs.fixed = NvmeFixedBytes(largest);
    needs.memory = NvmeMemoryBytes(chunk_elements);
  }
  return needs;
}

absl::StatusOr<std::vector<uint32_t>> PlaceChunks(const StoreNeeds& needs, uint32_t replicas,
                                                  const std::vector<StoreRoom>& rooms) {
  if (rooms.size() < replicas || replicas == 0) return NoRoom(needs, replicas, rooms);
  const std::vector<Host> hosts = ByHost(rooms);
  const uint64_t largest =
      needs.chunks.empty() ? 0 : *std::max_element(needs.chunks.begin(), needs.chunks.end());
  // The line is cut between chunks, which may give a store almost a chunk more than its share.
  for (const uint64_t spare : {uint64_t{0}, largest}) {
    std::vector<uint64_t> caps;
    for (const StoreRoom& room : rooms) {
      caps.push_back(std::min(needs.bytes, room.Free() - std::min(room.Free(), spare)));
    }
    const auto shares = Shares(hosts, caps, needs.bytes, replicas);
    if (!shares) continue;
    std::vector<uint32_t> placement = CutLine(needs, replicas, hosts, *shares);
    if (Fits(needs, replicas, rooms, placement)) return placement;
  }
  return RepairPlacement(needs, replicas, rooms,
                         std::vector<std::vector<uint32_t>>(needs.chunks.size()));
}

absl::StatusOr<std::vector<uint32_t>> RepairPlacement(
    const StoreNeeds& needs, uint32_t replicas, const std::vector<StoreRoom>& rooms,
    const std::vector<std::vector<uint32_t>>& holders) {
  if (rooms.size() < replicas || replicas == 0) return NoRoom(needs, replicas, rooms);
  const size_t count = needs.chunks.size();
  std::vector<std::vector<uint32_t>> places(count);
  std::vector<Sum> load(rooms.size(), 0);
  // What stays goes first: it takes room that is taken already.
  for (size_t chunk = 0; chunk < count; ++chunk) {
    places[chunk] = holders[chunk];
    if (places[chunk].size() > replicas) {
      std::stable_sort(places[chunk].begin(), places[chunk].end(),
                       [&](uint32_t a, uint32_t b) { return load[a] < load[b]; });
      places[chunk].resize(replicas);
    }
    for (const uint32_t room : places[chunk]) load[room] += needs.chunks[chunk];
  }
  for (size_t chunk = 0; chunk < count; ++chunk) {
    const uint64_t bytes = needs.chunks[chunk];
    while (places[chunk].size() < replicas) {
      std::optional<uint32_t> best;
      std::pair<bool, Sum> best_cost;
      for (uint32_t room = 0; room < rooms.size(); ++room) {
        const auto& taken = places[chunk];
        if (std::find(taken.begin(), taken.end(), room) != taken.end()) continue;
        if (load[room] + bytes > rooms[room].Free()) continue;
        const bool same_host = std::any_of(taken.begin(), taken.end(), [&](uint32_t other) {
          return rooms[other].host == rooms[room].host;
        });
        const std::pair<bool, Sum> cost{same_host, load[room]};
        if (best && best_cost <= cost) continue;
        best = room;
        best_cost = cost;
      }
      if (!best) return NoRoom(needs, replicas, rooms);
      places[chunk].push_back(*best);
      load[*best] += bytes;
    }
  }
  std::vector<uint32_t> placement;
  placement.reserve(count * replicas);
  for (const auto& chunk : places) placement.insert(placement.end(), chunk.begin(), chunk.end());
  return placement;
}

std::string WhatLacks(const v1::StoreReport& report, const WantedOfStore& wanted) {
  if (report.phase() == v1::STORE_PHASE_FAILED) return absl::StrCat("failed: ", report.problem());
  if (report.phase() == v1::STORE_PHASE_UNSPECIFIED) return "has said nothing of the job yet";
  if (report.version().epoch() != wanted.epoch || report.map_version() != wanted.map_version) {
    return absl::StrCat("has epoch ", report.version().epoch(), " and map ", report.map_version(),
                        "; wanted epoch ", wanted.epoch, " and map ", wanted.map_version);
  }
  if (report.generation() != wanted.generation) {
    return absl::StrCat("has generation ", report.generation(), " open; wanted ",
                        wanted.generation);
  }
  if (report.phase() == v1::STORE_PHASE_LOADING) {
    return report.problem().empty() ? "is loading its chunks" : report.problem();
  }
  if (report.version().step() != wanted.step) {
    return absl::StrCat(
        report.phase() == v1::STORE_PHASE_APPLYING ? "is applying a step to" : "has",
        " the state of step ", report.version().step(), "; wanted step ", wanted.step);
  }
  if (report.phase() != v1::STORE_PHASE_READY) return "is applying a step";
  if (wanted.sealed_step != 0 && report.sealed_step() != wanted.sealed_step) {
    return absl::StrCat("lacks gradients of step ", wanted.sealed_step);
  }
  return "";
}

bool IsLoading(const v1::StoreReport& report, const WantedOfStore& wanted) {
  return report.phase() == v1::STORE_PHASE_LOADING && report.version().epoch() == wanted.epoch &&
         report.map_version() == wanted.map_version && report.generation() == wanted.generation &&
         report.version().step() == wanted.step;
}

std::string CompareDigests(const v1::StoreMap& map,
                           const std::vector<const v1::StoreReport*>& reports) {
  const size_t replicas = map.replicas();
  if (replicas < 2) return "";
  const std::vector<std::vector<uint32_t>> chunks = ChunksOfStores(map);
  std::vector<size_t> next(chunks.size(), 0);
  const auto count = static_cast<size_t>(map.placement_size()) / replicas;
  for (size_t chunk = 0; chunk < count; ++chunk) {
    std::optional<std::pair<uint32_t, uint32_t>> first;  // store, digest
    for (size_t replica = 0; replica < replicas; ++replica) {
      const uint32_t store = map.placement(static_cast<int>(chunk * replicas + replica));
      if (store >= chunks.size()) continue;
      const size_t index = next[store]++;
      if (store >= reports.size() || reports[store] == nullptr) continue;
      const v1::StoreReport& report = *reports[store];
      if (static_cast<size_t>(report.chunk_digests_size()) != chunks[store].size()) continue;
      const uint32_t digest = report.chunk_digests(static_cast<int>(index));
      if (!first) {
        first = {store, digest};
      } else if (first->second != digest) {
        return absl::StrFormat("chunk %d is %08x on %s and %08x on %s", chunk, first->second,
                               NameOfStore(map.stores(static_cast<int>(first->first))), digest,
                               NameOfStore(map.stores(static_cast<int>(store))));
      }
    }
  }
  return "";
}

std::vector<std::vector<uint32_t>> ChunksOfStores(const v1::StoreMap& map) {
  std::vector<std::vector<uint32_t>> chunks(static_cast<size_t>(map.stores_size()));
  for (int place = 0; place < map.placement_size(); ++place) {
    const uint32_t store = map.placement(place);
    if (store >= chunks.size() || map.replicas() == 0) continue;
    const uint32_t chunk = static_cast<uint32_t>(place) / map.replicas();
    if (chunks[store].empty() || chunks[store].back() != chunk) chunks[store].push_back(chunk);
  }
  return chunks;
}

std::vector<StoreRoom> RoomsOf(const std::vector<StoreCandidate>& candidates) {
  std::vector<StoreRoom> rooms;
  for (const StoreCandidate& candidate : candidates) rooms.push_back(candidate.room);
  return rooms;
}

std::string NameOfStore(const v1::StoreMap::Store& store) {
  return absl::StrCat(store.member(), " on ", store.host());
}

std::string Bytes(uint64_t bytes) {
  const double size = static_cast<double>(bytes);
  if (size >= 1e9) return absl::StrFormat("%.1f GB", size * 1e-9);
  if (size >= 1e6) return absl::StrFormat("%.1f MB", size * 1e-6);
  if (size >= 1e3) return absl::StrFormat("%.1f kB", size * 1e-3);
  return absl::StrCat(bytes, " bytes");
}

}  // namespace zeroshard::coordinator
