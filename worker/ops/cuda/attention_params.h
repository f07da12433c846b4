// What an attention kernel is given, and the index arithmetic of its tiles: which block does what,
// which tiles hold a visible pair, which element of a mask a pair has. Plain functions of their
// arguments, for the host as well.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/dropout_mask.h"
#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda::attention {

// As AttentionArgs; pointers are to the call's element type.
struct Params {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  int64_t ld_q = 0, ld_k = 0, ld_v = 0;
  int batch = 0, seq = 0, heads = 0, kv_heads = 0, head_dim = 0;
  const int32_t* document_start = nullptr;  // [batch, seq] or null
  float scale = 1;                          // of scores
  DropoutRule dropout{};                    // these two: for kernels with dropout only
  int64_t first_sample = 0;

  void* out = nullptr;   // [batch * seq, heads * head_dim]; forward writes it
  float* lse = nullptr;  // [batch, heads, seq]; forward writes it
  // Backward only.
  const void* d_out = nullptr;
  float* delta = nullptr;  // [batch, heads, seq]: sum(out * d_out) of a row
  void *d_q = nullptr, *d_k = nullptr, *d_v = nullptr;

  ZS_HOST_DEVICE int64_t ld_out() const { return static_cast<int64_t>(heads) * head_dim; }
  ZS_HOST_DEVICE int kv_head(int head) const { return head / (heads / kv_heads); }
  // Element of a [batch * seq, ld] matrix where a head's sequence starts.
  ZS_HOST_DEVICE int64_t Start(int sample, int head, int64_t ld) const {
    return static_cast<int64_t>(sample) * seq * ld + static_cast<int64_t>(head) * head_dim;
  }
  // Element of lse and delta where a head's rows start.
  ZS_HOST_DEVICE int64_t Rows(int sample, int head) const {
    return (static_cast<int64_t>(sample) * heads + head) * seq;
  }
  ZS_HOST_DEVICE const int32_t* Starts(int sample) const {
    return document_start == nullptr ? nullptr
                                     : document_start + static_cast<int64_t>(sample) * seq;
  }
};

ZS_HOST_DEVICE int Tiles(int count, int tile) { return (count + tile - 1) / tile; }

// What one block of a launch computes: a tile of a sample's head.
struct Task {
  int tile, head, sample;
};
// Query tiles, the last ones first: they see the most keys, and a launch should not end with them.
ZS_HOST_DEVICE Task QueryTask(int64_t block, int tiles, int heads, int batch) {
  const int64_t per_tile = static_cast<int64_t>(heads) * batch;
  const auto rest = static_cast<int>(block % per_tile);
  return {tiles - 1 - static_cast<int>(block / per_tile), rest % heads, rest / heads};
}
// Key tiles, the first ones first: they are seen by the most queries.
ZS_HOST_DEVICE Task KeyTask(int64_t block, int kv_heads, int batch) {
  const int64_t per_tile = static_cast<int64_t>(kv_heads) * batch;
  const auto rest = static_cast<int>(block % per_tile);
  return {static_cast<int>(block / per_tile), rest % kv_heads, rest / kv_heads};
}

ZS_HOST_DEVICE int StartOf(const int32_t* starts, int query) {
  return starts == nullptr || starts[query] < 0 ? 0 : starts[query];
}
ZS_HOST_DEVICE bool Visible(int query, int start, int key) { return key <= query && key >= start; }

struct TileRange {
  int begin, end;
};
// The key tiles with a pair that some query of [first, end) sees. Starts never fall: the first
// query sees the furthest back.
ZS_HOST_DEVICE TileRange KeyTiles(const int32_t* starts, int first, int end, int key_tile) {
  return {StartOf(starts, first) / key_tile, Tiles(end, key_tile)};
}
// The query tiles with a pair that sees some key of [first, end).
ZS_HOST_DEVICE TileRange QueryTiles(const int32_t* starts, int seq, int first, int end,
                                    int query_tile) {
  int below = first / query_tile, above = Tiles(seq, query_tile);
  const int begin = below;
  if (starts == nullptr) return {begin, above};
  while (below < above) {  // the first tile whose first query starts at `end` or behind
    const int middle = (below + above) / 2;
    if (StartOf(starts, middle * query_tile) < end) {
      below = middle + 1;
    } else {
      above = middle;
    }
  }
  return {begin, below};
}
// Whether a tile of queries [first_query, end_query) and keys [first_key, end_key) has a pair that
// must not be seen. Queries behind the sequence do not count.
ZS_HOST_DEVICE bool HasHiddenPair(const int32_t* starts, int first_query, int end_query,
                                  int first_key, int end_key) {
  return end_key - 1 > first_query || StartOf(starts, end_query - 1) > first_key;
}

// The mask of one sample.
class DropoutOfSample {
 public:
  ZS_HOST_DEVICE DropoutOfSample(const Params& p, int sample)
      : rule_(p.dropout),
        stream_(DropoutStreamOf(rule_, static_cast<uint64_t>(p.first_sample + sample))) {}

  // Elements of the call.
  ZS_HOST_DEVICE float Factor(int64_t element) const {
    return DropoutFactor(rule_, stream_, InMask(element));
  }
  // Of two neighbours, which mostly share a block.
  ZS_HOST_DEVICE void FactorsOfTwo(int64_t element, float* factors) const {
    const uint64_t index = InMask(element);
    float block[4];
    DropoutFactors(rule_, stream_, index / 4, block);
    const uint64_t word = index % 4;  // selects, so that the block stays in registers
    factors[0] = word < 2 ? (word == 0 ? block[0] : block[1]) : (word == 2 ? block[2] : block[3]);
    factors[1] = word == 0 ? block[1] : word == 1 ? block[2] : block[3];
    if (word == 3) factors[1] = Factor(element + 1);
  }

 private:
  ZS_HOST_DEVICE uint64_t InMask(int64_t element) const {
    return rule_.first_element + static_cast<uint64_t>(element);
  }

  const DropoutRule& rule_;
  const DropoutStream stream_;
};
// Of the attention weights: its element of a pair.
ZS_HOST_DEVICE int64_t DropoutElement(int head, int seq, int query, int key) {
  return (static_cast<int64_t>(head) * seq + query) * seq + key;
}

}  // namespace zeroshard::cuda::attention
