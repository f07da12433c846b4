// Pure helpers about shard stores: what a job keeps on them, where its chunks go, what a store's
// report means for a step. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/chunk_table.h"
#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::coordinator {

// What a job wants of the stores.
struct StoreNeeds {
  std::vector<uint64_t> chunks;  // by chunk: bytes of one replica, full staging included
  uint64_t bytes = 0;            // of all chunks, one replica counted
  uint32_t replicas = 1;         // that its specification asks for
  bool nvme = false;             // kept in the stores' NVMe folders
  // Of each store that has any of them, beside the chunks: of its folder, and of its memory (which
  // is not what `chunks` count). 0 of jobs in memory.
  uint64_t fixed = 0, memory = 0;
};
// INVALID_ARGUMENT from MakeModelTable.
absl::StatusOr<StoreNeeds> MakeStoreNeeds(const v1::JobSpec& spec,
                                          int64_t chunk_elements = kChunkElements);

// A store that could take chunks.
struct StoreRoom {
  std::string member;
  std::string host;
  uint64_t limit = 0;  // bytes of the wanted kind that it has
  uint64_t taken = 0;  // by other jobs
  uint64_t Free() const { return limit > taken ? limit - taken : 0; }
};

struct StoreCandidate {
  StoreRoom room;
  v1::StoreMap::Store store;
};
std::vector<StoreRoom> RoomsOf(const std::vector<StoreCandidate>& candidates);

// Where each chunk's replicas go: chunk c's are the rooms [c * replicas, (c + 1) * replicas) of the
// result, the first of them the one that writes its snapshots. Every store with room gets about as
// many bytes as any other, in runs of neighbouring chunks; replicas are on different stores, and on
// different hosts where there are enough hosts with room. RESOURCE_EXHAUSTED, with the numbers.
absl::StatusOr<std::vector<uint32_t>> PlaceChunks(const StoreNeeds& needs, uint32_t replicas,
                                                  const std::vector<StoreRoom>& rooms);

// The same where some rooms hold chunks already: `holders` are by chunk the rooms that do. Nothing
// moves that need not: a chunk with enough holders stays on the first of them, the others get what
// they lack on the least loaded store.
absl::StatusOr<std::vector<uint32_t>> RepairPlacement(
    const StoreNeeds& needs, uint32_t replicas, const std::vector<StoreRoom>& rooms,
    const std::vector<std::vector<uint32_t>>& holders);

// How a job should be on a store for its next step to be decided.
struct WantedOfStore {
  uint64_t generation = 0;
  uint64_t map_version = 0;
  uint64_t epoch = 0;
  uint64_t step = 0;         // that its chunks have
  uint64_t sealed_step = 0;  // 0: not asked for
};
// What the store lacks, in words; empty: nothing.
std::string WhatLacks(const v1::StoreReport& report, const WantedOfStore& wanted);
// Whether all that it lacks is chunks that it is still loading.
bool IsLoading(const v1::StoreReport& report, const WantedOfStore& wanted);

// Compares the digests of replicas. `reports` are by store of the map, null where there is none;
// one without digests (nothing was applied there since its chunks were loaded) is not compared. The
// first difference in words, naming both stores and the chunk; empty: none.
std::string CompareDigests(const v1::StoreMap& map,
                           const std::vector<const v1::StoreReport*>& reports);

// By store of the map: its chunks, rising.
std::vector<std::vector<uint32_t>> ChunksOfStores(const v1::StoreMap& map);

// "store-1 on host-b".
std::string NameOfStore(const v1::StoreMap::Store& store);

// "3.2 GB", "12 bytes".
std::string Bytes(uint64_t bytes);

}  // namespace zeroshard::coordinator
