// How much of a folder is in resident memory while it is read.
#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "common/hf/export.h"
#include "common/hf/weights.h"
#include "common/plan/model_table.h"
#include "gtest/gtest.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

// Any values will do.
class Ones : public ParameterSource {
 public:
  absl::Status Read(const ParameterInfo&, int64_t begin, int64_t end, float* out) const override {
    std::fill_n(out, end - begin, 1.0f);
    return absl::OkStatus();
  }
};

// Resident pages of mapped files, in bytes.
int64_t ResidentFileBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssFile:", 0) == 0) return std::stoll(line.substr(8)) * 1024;
  }
  return -1;
}

TEST(HfWeightsMemory, ARankHoldsOneUnitOfTheFilesAtATime) {
  v1::ModelSpec spec;
  spec.set_architecture("llama");
  spec.set_hidden_size(256);
  spec.set_layers(16);
  spec.set_heads(4);
  spec.set_intermediate_size(1024);
  spec.set_sequence_length(16);
  spec.set_vocab_size(256);
  const absl::StatusOr<ModelTable> model = MakeModelTable(spec);
  ASSERT_TRUE(model.ok()) << model.status();
  int64_t largest = 0;
  for (const UnitTable& unit : model->units) largest = std::max(largest, unit.length * 4);
  const int64_t whole = model->ParameterCount() * 4;
  ASSERT_GT(whole, 12 * largest);

  const TempFolder folder;
  HfExportOptions options;
  options.dtype = DType::kF32;
  const absl::Status exported = ExportHfFolder(spec, Ones(), folder / "model", options);
  ASSERT_TRUE(exported.ok()) << exported;

  std::vector<std::string> warnings;
  const auto weights = HfWeights::Open(folder / "model", *model, &warnings);
  ASSERT_TRUE(weights.ok()) << weights.status();
  const int64_t before = ResidentFileBytes();
  ASSERT_GE(before, 0) << "this system does not tell";
  int64_t peak = before;
  std::vector<float> piece(1 << 14);
  for (const UnitTable& unit : model->units) {  // rank 1 of 2
    const ShardLayout layout = ShardLayout::Make(unit.length, 2);
    for (const ParameterInfo& tensor : unit.parameters) {
      const int64_t from = std::max<int64_t>(0, layout.Begin(1) - tensor.offset);
      for (int64_t at = from; at < tensor.size; at += static_cast<int64_t>(piece.size())) {
        const int64_t end = std::min<int64_t>(tensor.size, at + static_cast<int64_t>(piece.size()));
        const absl::Status read = (*weights)->Read(tensor, at, end, piece.data());
        ASSERT_TRUE(read.ok()) << read;
        ASSERT_EQ(piece[0], 1.0f);
      }
    }
    peak = std::max(peak, ResidentFileBytes());
    (*weights)->DropPages();
  }
  // The system maps more than is touched: whole neighbourhoods of pages.
  EXPECT_LE(peak - before, largest + (4 << 20)) << "of " << whole;
  EXPECT_LE(ResidentFileBytes() - before, 1 << 20);
}

}  // namespace
}  // namespace zeroshard
