#include "worker/generate/memory_parameters.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/kernels/convert.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr int64_t kPiece = int64_t{1} << 20;  // elements read at a time

void* At(const Buffer& buffer, int64_t element, DType dtype) {
  return buffer.as<char>() + element * static_cast<int64_t>(SizeOf(dtype));
}

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryParameters>> MemoryParameters::Load(
    const ModelTable& model, const ParameterSource& source, Device* device, DType dtype) {
  auto loaded = std::make_unique<MemoryParameters>();
  std::vector<float> piece(static_cast<size_t>(kPiece));
  std::vector<char> rounded(static_cast<size_t>(kPiece) * SizeOf(dtype));
  for (const UnitTable& unit : model.units) {
    ZS_ASSIGN_OR_RETURN(Buffer flat,
                        device->Allocate(static_cast<size_t>(unit.length) * SizeOf(dtype),
                                         MemoryKind::kParameters));
    for (const ParameterInfo& tensor : unit.parameters) {
      for (int64_t begin = 0; begin < tensor.size; begin += kPiece) {
        const int64_t end = std::min(tensor.size, begin + kPiece);
        ZS_RETURN_IF_ERROR(source.Read(tensor, begin, end, piece.data()));
        cpu::Convert(piece.data(), DType::kF32, end - begin, rounded.data(), dtype, 1);
        ZS_RETURN_IF_ERROR(CopyAndWait(device, At(flat, tensor.offset + begin, dtype),
                                       rounded.data(),
                                       static_cast<size_t>(end - begin) * SizeOf(dtype)));
      }
    }
    source.DropPages();
    loaded->units_.push_back(std::move(flat));
  }
  const UnitTable& head = model.units.back();
  const ParameterInfo* matrix =
      model.config.tied ? &model.units.front().parameters.front() : head.Find("lm_head.weight");
  if (matrix == nullptr) {
    return absl::InternalError(absl::StrCat("the model's unit ", head.name, " has no head matrix"));
  }
  loaded->lm_head_ =
      At(model.config.tied ? loaded->units_.front() : loaded->units_.back(), matrix->offset, dtype);
  return loaded;
}

absl::StatusOr<LentParameters> MemoryParameters::Borrow(int unit) {
  const auto index = static_cast<size_t>(unit);
  if (unit < 0 || index >= units_.size()) {
    return absl::InternalError(absl::StrCat("there is no unit ", unit, " of ", units_.size()));
  }
  return LentParameters{.own = units_[index].data(),
                        .lm_head = index + 1 == units_.size() ? lm_head_ : nullptr};
}

}  // namespace zeroshard
