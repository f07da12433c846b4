#include "worker/zero/fill.h"

#include <algorithm>
#include <functional>

#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;  // elements; a multiple of 64

// Calls `use` with the values of elements [at, at + size) of the unit's flat vector, for all of
// `tensor` that lies in [begin, end).
absl::Status ReadPieces(
    const ParameterSource& source, const ParameterInfo& tensor, int64_t begin, int64_t end,
    const std::atomic<bool>* stop, std::vector<float>* piece,
    const std::function<absl::Status(int64_t at, absl::Span<const float>)>& use) {
  const int64_t last = std::min(end, tensor.offset + tensor.size);
  for (int64_t at = std::max(begin, tensor.offset); at < last; at += kPiece) {
    if (stop != nullptr && *stop) return absl::CancelledError("stopped while loading");
    const int64_t n = std::min(kPiece, last - at);
    piece->resize(static_cast<size_t>(n));
    ZS_RETURN_IF_ERROR(
        source.Read(tensor, at - tensor.offset, at - tensor.offset + n, piece->data()));
    ZS_RETURN_IF_ERROR(use(at, *piece));
  }
  return absl::OkStatus();
}

// Adds what is owned of `values`, and saved by this rank, to the unit's digest.
void DigestFilled(UnitState* unit, int64_t at, absl::Span<const float> values) {
  const int64_t from = std::max(at, unit->own_begin);
  const int64_t to = std::min(at + static_cast<int64_t>(values.size()), unit->own_end);
  if (from >= to) return;
  for (const SliceRun& run : unit->Runs({from, to})) {
    if (!run.home) continue;
    unit->filled.Add(
        unit->index, static_cast<uint64_t>(run.flat),
        values.subspan(static_cast<size_t>(run.local - at), static_cast<size_t>(run.size)),
        run.ends);
  }
}

}  // namespace

absl::Status FillParameters(const ParameterSource& source, std::vector<UnitState>* units,
                            Device* device, const std::atomic<bool>* stop) {
  std::vector<float> piece;
  for (UnitState& unit : *units) {
    const int64_t begin = unit.resident ? 0 : unit.own_begin;
    const int64_t end = unit.resident ? unit.layout.length : unit.own_end;
    unit.filled = {};
    for (const ParameterInfo& tensor : unit.table->parameters) {
      ZS_RETURN_IF_ERROR(ReadPieces(source, tensor, begin, end, stop, &piece,
                                    [&](int64_t at, absl::Span<const float> values) {
                                      if (!unit.KeepsMaster()) DigestFilled(&unit, at, values);
                                      return SetRange(&unit, at, values, device);
                                    }));
    }
    source.DropPages();
  }
  return absl::OkStatus();
}

absl::Status FillMoments(StateKind kind, const ParameterSource& source,
                         std::vector<UnitState>* units, Device* device,
                         const std::atomic<bool>* stop) {
  std::vector<float> piece;
  for (UnitState& unit : *units) {
    if (!unit.trained) continue;
    const Buffer& moments = kind == StateKind::kExpAvg ? unit.exp_avg : unit.exp_avg_sq;
    for (const ParameterInfo& tensor : unit.table->parameters) {
      if (!tensor.trainable) continue;
      ZS_RETURN_IF_ERROR(ReadPieces(source, tensor, unit.state_begin, unit.state_end, stop, &piece,
                                    [&](int64_t at, absl::Span<const float> values) {
                                      return CopyAndWait(
                                          device, moments.as<float>() + (at - unit.state_begin),
                                          values.data(), values.size() * sizeof(float));
                                    }));
    }
    source.DropPages();
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
