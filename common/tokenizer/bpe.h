// Byte-pair encoding of one word (Sennrich et al. 2016, algorithm 1, over bytes): of all
// neighbouring pairs that a merge joins, the one of the lowest rank, leftmost first, is joined
// until there is none.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace zeroshard {

// Merges of two tokens into one. Immutable once filled; thread-safe.
class BytePairs {
 public:
  static constexpr int32_t kNone = -1;

  // What an encoding call needs; one call at a time, kept from call to call.
  class Scratch;

  // kNone: text with this byte loses it.
  void SetByte(uint8_t byte, int32_t id) { bytes_[byte] = id; }
  // The later of two merges of one pair counts.
  void AddMerge(int32_t left, int32_t right, uint32_t rank, int32_t merged);
  // A word that is `id` whatever the merges say.
  void AddWord(absl::string_view word, int32_t id) {
    words_.insert_or_assign(std::string(word), id);
  }
  void Reserve(size_t merges) { merges_.reserve(merges); }

  // Appends the ids of a word. O(n log n) in its bytes.
  void Encode(absl::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const;

 private:
  struct Merge {
    uint32_t rank;
    int32_t merged;
  };
  static constexpr uint32_t kNoRank = UINT32_MAX;

  Merge Find(int32_t left, int32_t right) const {
    const auto merge = merges_.find(Key(left, right));
    return merge == merges_.end() ? Merge{kNoRank, kNone} : merge->second;
  }
  static uint64_t Key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  void Merges(absl::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const;
  void MergeShort(Scratch* scratch, std::vector<int32_t>* ids) const;
  void MergeLong(Scratch* scratch, std::vector<int32_t>* ids) const;

  std::array<int32_t, 256> bytes_ = [] {
    std::array<int32_t, 256> none;
    none.fill(kNone);
    return none;
  }();
  absl::flat_hash_map<uint64_t, Merge> merges_;
  absl::flat_hash_map<std::string, int32_t> words_;
};

class BytePairs::Scratch {
 public:
  Scratch() : slots_(kSlots) {}

 private:
  friend class BytePairs;

  // A short word and its ids, in one cache line. Words are found by their hash in one of two
  // neighbouring slots: the first holds what was asked for twice, the second what came last.
  struct alignas(64) Slot {
    std::array<uint64_t, 3> key = {};
    uint8_t length = 0;  // 0: free
    uint8_t count = 0;
    std::array<int32_t, 9> ids;
  };
  static constexpr size_t kSlots = size_t{1} << 16;  // 4 MiB
  static constexpr size_t kLongestWord = 24;

  // A token in a list of a word's.
  struct Node {
    int32_t id;
    int32_t before;
    int32_t after;
  };
  // A merge to do, unless what it joins has changed.
  struct Candidate {
    uint32_t rank;
    int32_t at;
    int32_t left;
    int32_t right;
    int32_t merged;
    bool operator<(const Candidate& other) const {  // the largest is taken first
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };

  std::vector<Slot> slots_;
  std::vector<int32_t> parts_;
  std::vector<Merge> pairs_;
  std::vector<Node> nodes_;
  std::vector<Candidate> heap_;
};

}  // namespace zeroshard
