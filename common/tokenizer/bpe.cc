#include "common/tokenizer/bpe.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace zeroshard {
namespace {

// Up to here the next merge is looked for among all: cheaper than keeping them in order.
constexpr size_t kShort = 96;

uint64_t Load8(const char* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

uint64_t Load4(const char* from) {
  uint32_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// Up to 24 bytes as three numbers, which with the length tell words apart.
std::array<uint64_t, 3> KeyOf(absl::string_view word) {
  const char* data = word.data();
  const size_t size = word.size();
  if (size >= 16) return {Load8(data), Load8(data + 8), Load8(data + size - 8)};
  if (size >= 8) return {Load8(data), Load8(data + size - 8), 0};
  if (size >= 4) return {Load4(data) | Load4(data + size - 4) << 32, 0, 0};
  const auto byte = [data](size_t i) {
    return static_cast<uint64_t>(static_cast<uint8_t>(data[i]));
  };
  return {byte(0) | byte(size / 2) << 8 | byte(size - 1) << 16, 0, 0};
}

uint64_t Mix(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t HashOf(const std::array<uint64_t, 3>& key, size_t length) {
  return Mix(Mix(key[0] ^ 0x9E3779B97F4A7C15, key[1] ^ 0xD1B54A32D192ED03) ^ length,
             key[2] ^ 0x8CB92BA72F3D8DD7);
}

}  // namespace

void BytePairs::AddMerge(int32_t left, int32_t right, uint32_t rank, int32_t merged) {
  merges_.insert_or_assign(Key(left, right), Merge{rank, merged});
}

void BytePairs::Encode(absl::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const {
  if (word.empty()) return;
  if (word.size() > Scratch::kLongestWord) {
    Merges(word, scratch, ids);
    return;
  }
  const std::array<uint64_t, 3> key = KeyOf(word);
  Scratch::Slot* first = &scratch->slots_[HashOf(key, word.size()) % (Scratch::kSlots / 2) * 2];
  Scratch::Slot* second = first + 1;
  const auto holds = [&](const Scratch::Slot& slot) {
    return slot.length == word.size() && slot.key == key;
  };
  if (holds(*first)) {
    ids->insert(ids->end(), first->ids.begin(), first->ids.begin() + first->count);
    return;
  }
  if (holds(*second)) {
    std::swap(*first, *second);
    ids->insert(ids->end(), first->ids.begin(), first->ids.begin() + first->count);
    return;
  }
  const size_t before = ids->size();
  Merges(word, scratch, ids);
  const size_t count = ids->size() - before;
  if (count > second->ids.size()) return;
  second->key = key;
  second->length = static_cast<uint8_t>(word.size());
  second->count = static_cast<uint8_t>(count);
  std::copy(ids->begin() + static_cast<ptrdiff_t>(before), ids->end(), second->ids.begin());
}

void BytePairs::Merges(absl::string_view word, Scratch* scratch, std::vector<int32_t>* ids) const {
  if (!words_.empty()) {
    if (const auto whole = words_.find(word); whole != words_.end()) {
      ids->push_back(whole->second);
      return;
    }
  }
  scratch->parts_.clear();
  for (const char c : word) {
    const int32_t id = bytes_[static_cast<uint8_t>(c)];
    if (id != kNone) scratch->parts_.push_back(id);
  }
  if (scratch->parts_.size() <= kShort) {
    MergeShort(scratch, ids);
  } else {
    MergeLong(scratch, ids);
  }
}

void BytePairs::MergeShort(Scratch* scratch, std::vector<int32_t>* ids) const {
  std::vector<int32_t>& parts = scratch->parts_;
  std::vector<Merge>& pairs = scratch->pairs_;  // pairs[i] joins parts[i] and parts[i + 1]
  pairs.clear();
  for (size_t i = 0; i + 1 < parts.size(); ++i) pairs.push_back(Find(parts[i], parts[i + 1]));
  while (!pairs.empty()) {
    size_t best = 0;
    for (size_t i = 1; i < pairs.size(); ++i) {
      if (pairs[i].rank < pairs[best].rank) best = i;
    }
    if (pairs[best].rank == kNoRank) break;
    parts[best] = pairs[best].merged;
    parts.erase(parts.begin() + static_cast<ptrdiff_t>(best) + 1);
    pairs.erase(pairs.begin() + static_cast<ptrdiff_t>(best));
    if (best > 0) pairs[best - 1] = Find(parts[best - 1], parts[best]);
    if (best < pairs.size()) pairs[best] = Find(parts[best], parts[best + 1]);
  }
  ids->insert(ids->end(), parts.begin(), parts.end());
}

void BytePairs::MergeLong(Scratch* scratch, std::vector<int32_t>* ids) const {
  using Node = Scratch::Node;
  using Candidate = Scratch::Candidate;
  const std::vector<int32_t>& parts = scratch->parts_;
  // Positions are 32 bits: a word of more than 2 GiB of one kind of character is cut.
  constexpr size_t kMost = std::numeric_limits<int32_t>::max() - 1;
  for (size_t from = 0; from < parts.size(); from += kMost) {
    const auto size = static_cast<int32_t>(std::min(kMost, parts.size() - from));
    std::vector<Node>& nodes = scratch->nodes_;
    std::vector<Candidate>& heap = scratch->heap_;
    nodes.clear();
    heap.clear();
    for (int32_t i = 0; i < size; ++i) {
      nodes.push_back({parts[from + static_cast<size_t>(i)], i - 1, i + 1 < size ? i + 1 : -1});
    }
    const auto candidate = [&](int32_t at, Candidate* found) {
      const Node& node = nodes[static_cast<size_t>(at)];
      if (node.after < 0) return false;
      const int32_t right = nodes[static_cast<size_t>(node.after)].id;
      const Merge merge = Find(node.id, right);
      *found = {merge.rank, at, node.id, right, merge.merged};
      return merge.rank != kNoRank;
    };
    Candidate found;
    for (int32_t i = 0; i < size; ++i) {
      if (candidate(i, &found)) heap.push_back(found);
    }
    std::make_heap(heap.begin(), heap.end());
    const auto add = [&](int32_t at) {
      if (!candidate(at, &found)) return;
      heap.push_back(found);
      std::push_heap(heap.begin(), heap.end());
    };
    while (!heap.empty()) {
      const Candidate top = heap.front();
      std::pop_heap(heap.begin(), heap.end());
      heap.pop_back();
      Node& node = nodes[static_cast<size_t>(top.at)];
      if (node.id != top.left || node.after < 0 ||
          nodes[static_cast<size_t>(node.after)].id != top.right) {
        continue;
      }
      Node& gone = nodes[static_cast<size_t>(node.after)];
      node.id = top.merged;
      node.after = gone.after;
      gone.id = kNone;
      gone.after = -1;
      if (node.after >= 0) nodes[static_cast<size_t>(node.after)].before = top.at;
      add(top.at);
      if (node.before >= 0) add(node.before);
    }
    for (int32_t at = 0; at >= 0; at = nodes[static_cast<size_t>(at)].after) {
      ids->push_back(nodes[static_cast<size_t>(at)].id);
    }
    // A word like this is rare: its memory is not worth keeping.
    constexpr size_t kKept = 1 << 20;
    if (nodes.capacity() > kKept) std::vector<Node>().swap(nodes);
    if (heap.capacity() > kKept) std::vector<Candidate>().swap(heap);
  }
}

}  // namespace zeroshard
