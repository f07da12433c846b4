#include "common/hf/weights.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/hf/files.h"
#include "common/hf/tensor_map.h"
#include "common/safetensors/float_types.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr int64_t kTile = 64;  // elements; a tile of fp32 fits the first-level cache

// Where one of our tensors lies: element (row, col) of ours is element
// start + row * row_stride + col * col_stride there.
struct Place {
  const SafetensorsFile* file = nullptr;
  const SafetensorsEntry* entry = nullptr;
  FloatType type = FloatType::kF32;
  int64_t size = 0;
  int64_t cols = 0;
  int64_t start = 0;
  bool transposed = false;
  int64_t width = 0;  // of a row there
};

// Elements from `first` on, side by side there.
void ReadRun(const Place& place, int64_t first, int64_t count, float* out) {
  const absl::string_view bytes = place.file->Bytes(*place.entry);
  ToFloats(place.type, bytes.data() + first * SizeOf(place.type), count, out);
}

// Columns [col, col + count) of one of our rows, each from another row there.
void ReadStrided(const Place& place, int64_t row, int64_t col, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    ReadRun(place, place.start + row + (col + i) * place.width, 1, out + i);
  }
}

// Our rows [first, last), by tiles: runs there become columns here.
void ReadRows(const Place& place, int64_t first, int64_t last, float* out) {
  float tile[kTile][kTile];  // [col][row]
  for (int64_t row = first; row < last; row += kTile) {
    const int64_t rows = std::min(kTile, last - row);
    for (int64_t col = 0; col < place.cols; col += kTile) {
      const int64_t cols = std::min(kTile, place.cols - col);
      for (int64_t c = 0; c < cols; ++c) {
        ReadRun(place, place.start + row + (col + c) * place.width, rows, tile[c]);
      }
      for (int64_t r = 0; r < rows; ++r) {
        float* to = out + (row - first + r) * place.cols + col;
        for (int64_t c = 0; c < cols; ++c) to[c] = tile[c][r];
      }
    }
  }
}

void ReadTransposed(const Place& place, int64_t begin, int64_t end, float* out) {
  const int64_t first = CeilDiv(begin, place.cols);  // whole rows: [first, last)
  const int64_t last = end / place.cols;
  if (first > last) {  // within one row
    ReadStrided(place, last, begin - last * place.cols, end - begin, out);
    return;
  }
  const int64_t head = first * place.cols - begin;
  if (head > 0) ReadStrided(place, first - 1, place.cols - head, head, out);
  ReadRows(place, first, last, out + head);
  const int64_t tail = end - last * place.cols;
  if (tail > 0) ReadStrided(place, last, 0, tail, out + (end - begin - tail));
}

class Weights : public HfWeights {
 public:
  Weights(HfFiles files, std::unordered_map<std::string, Place> places)
      : files_(std::move(files)), places_(std::move(places)) {}

  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    const auto found = places_.find(tensor.name);
    if (found == places_.end()) {
      return absl::NotFoundError(
          absl::StrCat("the model that was opened has no tensor \"", tensor.name, "\""));
    }
    const Place& place = found->second;
    if (begin < 0 || begin > end || end > place.size) {
      return absl::OutOfRangeError(absl::StrCat(place.file->path(), ": elements ", begin, " to ",
                                                end, " of \"", tensor.name, "\", which has ",
                                                place.size));
    }
    if (begin == end) return absl::OkStatus();
    if (place.transposed) {
      ReadTransposed(place, begin, end, out);
    } else {
      ReadRun(place, place.start + begin, end - begin, out);
    }
    return absl::OkStatus();
  }

  void DropPages() const override {
    for (const auto& file : files_.files) file->DropPages();
  }

 private:
  const HfFiles files_;
  const std::unordered_map<std::string, Place> places_;
};

std::string Shape(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// Finds the model's tensors in the files, and says what is left over.
class Opener {
 public:
  Opener(const std::string& folder, const ModelTable& model, const HfFiles& files,
         std::vector<std::string>* warnings)
      : folder_(folder), model_(model), files_(files), warnings_(warnings) {
    const std::string embedding = HfEmbeddingName(model.config.architecture);
    bare_ = files.tensors.count(embedding) == 0 &&
            files.tensors.count(std::string(Bare(embedding))) > 0;
  }

  absl::StatusOr<std::unordered_map<std::string, Place>> Run() {
    for (const HfTensor& tensor : MakeHfTensors(model_)) PlaceOne(tensor);
    ZS_RETURN_IF_ERROR(Problems());
    ZS_RETURN_IF_ERROR(CheckRest());
    return std::move(places_);
  }

 private:
  absl::string_view Bare(absl::string_view name) const {
    return absl::StripPrefix(name, HfPrefix(model_.config.architecture));
  }

  void PlaceOne(const HfTensor& tensor) {
    const std::string name = bare_ ? std::string(Bare(tensor.name)) : tensor.name;
    const auto found = files_.tensors.find(name);
    if (found == files_.tensors.end()) {
      missing_.push_back(name);
      return;
    }
    used_.insert(name);
    const auto& [file, entry] = found->second;
    if (entry->shape != tensor.shape) {
      wrong_.push_back(absl::StrCat(name, " has the shape ", Shape(entry->shape), ", wanted ",
                                    Shape(tensor.shape)));
      return;
    }
    const std::optional<FloatType> type = FloatTypeOf(entry->dtype);
    if (!type) {
      wrong_.push_back(
          absl::StrCat(name, " is of type ", entry->dtype, ", wanted F32, F16 or BF16"));
      return;
    }
    int64_t start = 0;
    for (const ParameterInfo& part : tensor.parts) {
      Place place{file,
                  entry,
                  *type,
                  part.size,
                  part.shape.back(),
                  start,
                  tensor.transposed,
                  tensor.shape.back()};
      start += tensor.transposed ? part.shape.front() : part.size;
      places_.emplace(part.name, place);
    }
  }

  absl::Status Problems() const {
    if (missing_.empty() && wrong_.empty()) return absl::OkStatus();
    std::string text = absl::StrCat(folder_, ":");
    if (!missing_.empty()) {
      absl::StrAppend(&text, " of the model's tensors ", missing_.size(),
                      " are not in the files: ", ListNames(missing_));
    }
    if (std::find(missing_.begin(), missing_.end(), "lm_head.weight") != missing_.end()) {
      absl::StrAppend(&text,
                      " (tie_word_embeddings is false, or absent in a Llama's config.json, so that "
                      "the head has weights of its own, and they are never made up)");
    }
    if (!wrong_.empty()) {
      absl::StrAppend(&text, missing_.empty() ? " " : "; and ", wrong_.size(),
                      " tensors are not what config.json says: ", ListNames(wrong_));
    }
    return absl::InvalidArgumentError(text);
  }

  absl::Status CheckRest() {
    const Architecture architecture = model_.config.architecture;
    std::vector<std::string> unused, biases;
    for (const auto& [name, place] : files_.tensors) {
      if (used_.count(name) > 0) continue;
      const absl::string_view bare = Bare(name);
      if (IsHfBuffer(architecture, bare)) continue;
      if (name == "lm_head.weight" && model_.config.tied) {
        CompareHead(place);
      } else if (IsHfBias(architecture, model_.config.layers, bare)) {
        biases.push_back(name);
      } else {
        unused.push_back(name);
      }
    }
    if (!biases.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          folder_, ": the files hold ", biases.size(),
          " biases that the model has not, as config.json says (attention_bias, mlp_bias): ",
          ListNames(biases)));
    }
    if (!unused.empty()) {
      warnings_->push_back(absl::StrCat(folder_, ": ", unused.size(),
                                        " tensors of the files are not part of the model and not "
                                        "used: ",
                                        ListNames(unused)));
    }
    return absl::OkStatus();
  }

  // A tied head that has a tensor of its own all the same: the embedding counts, as in
  // transformers.
  void CompareHead(const HfFiles::Place& head) {
    const std::string name = HfEmbeddingName(model_.config.architecture);
    const auto& embedding = files_.tensors.at(bare_ ? std::string(Bare(name)) : name);
    const std::string differs = FirstDifference(embedding, head);
    if (differs.empty()) return;
    warnings_->push_back(absl::StrCat(
        folder_,
        ": WARNING: tie_word_embeddings is true, but lm_head.weight is not the embedding (",
        differs,
        "): the embedding is used as the head and lm_head.weight is ignored, as transformers does. "
        "If the model was trained with a head of its own, set tie_word_embeddings to false in "
        "config.json"));
  }

  static std::string FirstDifference(const HfFiles::Place& a, const HfFiles::Place& b) {
    const std::optional<FloatType> a_type = FloatTypeOf(a.entry->dtype);
    const std::optional<FloatType> b_type = FloatTypeOf(b.entry->dtype);
    if (a.entry->shape != b.entry->shape || !b_type) {
      return absl::StrCat("it is ", b.entry->dtype, " ", Shape(b.entry->shape), ", the embedding ",
                          a.entry->dtype, " ", Shape(a.entry->shape));
    }
    constexpr int64_t kPiece = 1 << 18;  // elements
    constexpr int64_t kDrop = 64 * kPiece;
    std::vector<float> left(kPiece), right(kPiece);
    const int64_t size = a.entry->elements();
    for (int64_t begin = 0; begin < size; begin += kPiece) {
      const int64_t count = std::min(kPiece, size - begin);
      ToFloats(*a_type, a.file->Bytes(*a.entry).data() + begin * SizeOf(*a_type), count,
               left.data());
      ToFloats(*b_type, b.file->Bytes(*b.entry).data() + begin * SizeOf(*b_type), count,
               right.data());
      for (int64_t i = 0; i < count; ++i) {
        if (std::bit_cast<uint32_t>(left[i]) == std::bit_cast<uint32_t>(right[i])) continue;
        const int64_t width = a.entry->shape.back();
        return absl::StrCat("first at row ", (begin + i) / width, ", column ", (begin + i) % width,
                            ": ", right[i], " beside ", left[i]);
      }
      if (begin % kDrop == 0) {
        a.file->DropPages();
        b.file->DropPages();
      }
    }
    return "";
  }

  const std::string& folder_;
  const ModelTable& model_;
  const HfFiles& files_;
  std::vector<std::string>* const warnings_;
  bool bare_ = false;
  std::set<std::string> used_;
  std::unordered_map<std::string, Place> places_;
  std::vector<std::string> missing_, wrong_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HfWeights>> HfWeights::Open(const std::string& folder,
                                                           const ModelTable& model,
                                                           std::vector<std::string>* warnings) {
  ZS_ASSIGN_OR_RETURN(HfFiles files, OpenHfFiles(folder, warnings));
  Opener opener(folder, model, files, warnings);
  ZS_ASSIGN_OR_RETURN(auto places, opener.Run());
  return std::make_unique<Weights>(std::move(files), std::move(places));
}

}  // namespace zeroshard
