#include "shard_store/state/memory_chunk.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/kernels/convert.h"

namespace zeroshard::store {

float* MemoryChunk::Kind(StateKind kind) const {
  const Buffer* buffer = kind == StateKind::kMaster   ? master.get()
                         : kind == StateKind::kExpAvg ? exp_avg.get()
                                                      : exp_avg_sq.get();
  return buffer == nullptr ? nullptr : buffer->as<float>();
}

void MemoryChunk::Read(StateKind kind, int64_t begin, absl::Span<float> out) const {
  if (IsRoundedMaster(kind)) {
    cpu::Convert(parameters->data() + begin * static_cast<int64_t>(SizeOf(type)), type,
                 static_cast<int64_t>(out.size()), out.data(), DType::kF32, 1);
  } else {
    std::memcpy(out.data(), Kind(kind) + begin, out.size() * sizeof(float));
  }
}

void MemoryChunk::Write(StateKind kind, int64_t begin, absl::Span<const float> values) {
  if (IsRoundedMaster(kind)) {
    cpu::Convert(values.data(), DType::kF32, static_cast<int64_t>(values.size()),
                 parameters->data() + begin * static_cast<int64_t>(SizeOf(type)), type, 1);
  } else {
    std::memcpy(Kind(kind) + begin, values.data(), values.size() * sizeof(float));
  }
}

void MemoryChunk::RoundParameters() {
  if (parameters == nullptr || Rounded()) return;
  cpu::RoundParameters(master->as<float>(), size(), rounding, parameters->data(), type, 1);
}

absl::StatusOr<std::shared_ptr<MemoryChunk>> DescribeChunk(uint32_t id, const Chunk& chunk,
                                                           const ModelTable& model, DType type,
                                                           const Rounding& rounding) {
  if (chunk.unit < 0 || static_cast<size_t>(chunk.unit) >= model.units.size() || chunk.begin < 0 ||
      chunk.begin >= chunk.end || chunk.end > model.units[static_cast<size_t>(chunk.unit)].length) {
    return absl::InvalidArgumentError(absl::StrCat(
        "chunk ", id, ": elements ", chunk.begin, " to ", chunk.end, " of unit ", chunk.unit,
        ", which this model does not have; it has ", model.units.size(), " units"));
  }
  auto described = std::make_shared<MemoryChunk>();
  described->id = id;
  described->chunk = chunk;
  described->type = type;
  described->rounding = rounding.At(chunk.unit, chunk.begin);
  for (const ParameterInfo& tensor : model.units[static_cast<size_t>(chunk.unit)].parameters) {
    const int64_t begin = std::max(chunk.begin, tensor.offset);
    const int64_t end = std::min(chunk.end, tensor.offset + tensor.size);
    if (begin >= end) continue;
    described->tensors.push_back(
        {&tensor, begin - chunk.begin, end - chunk.begin, begin - tensor.offset});
  }
  return described;
}

absl::Status AllocateChunks(const std::vector<std::shared_ptr<MemoryChunk>>& chunks,
                            bool momentum_only, const std::string& what, MemoryBudget* budget) {
  std::vector<std::pair<std::shared_ptr<Buffer>*, uint64_t>> wanted;
  uint64_t left = 0;
  for (const auto& chunk : chunks) {
    const ChunkBytes bytes = zeroshard::BytesOf(chunk->chunk, chunk->type, momentum_only);
    left += bytes.Total();
    wanted.insert(wanted.end(), {{&chunk->master, bytes.master},
                                 {&chunk->exp_avg, bytes.exp_avg},
                                 {&chunk->exp_avg_sq, bytes.exp_avg_sq},
                                 {&chunk->parameters, bytes.parameters},
                                 {&chunk->staging, bytes.staging}});
  }
  if (absl::Status status = budget->Take(left, what); !status.ok()) return status;
  for (const auto& [buffer, bytes] : wanted) {
    if (bytes == 0) continue;
    left -= bytes;
    absl::StatusOr<std::shared_ptr<Buffer>> allocated =
        Buffer::Allocate(static_cast<size_t>(bytes), budget);
    if (allocated.ok()) {
      *buffer = *std::move(allocated);
      continue;
    }
    budget->Give(left);
    for (const auto& [other, unused] : wanted) other->reset();
    return allocated.status();
  }
  return absl::OkStatus();
}

}  // namespace zeroshard::store
