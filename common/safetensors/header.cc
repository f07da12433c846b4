// Reading the header: a SAX reader, because a JSON tree would silently keep one of two equal keys.
#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/safetensors/safetensors.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr char kMetadata[] = "__metadata__";

// Bytes an element; 0 for a name that is no type.
uint64_t ElementSize(absl::string_view dtype) {
  for (absl::string_view name : {"BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"}) {
    if (dtype == name) return 1;
  }
  for (absl::string_view name : {"I16", "U16", "F16", "BF16"}) {
    if (dtype == name) return 2;
  }
  for (absl::string_view name : {"I32", "U32", "F32"}) {
    if (dtype == name) return 4;
  }
  for (absl::string_view name : {"I64", "U64", "F64"}) {
    if (dtype == name) return 8;
  }
  return 0;
}

std::string Shape(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// Names come from the file: they may be long, or hold line ends.
std::string OneLine(std::string message) {
  constexpr size_t kMost = 600;
  if (message.size() > kMost) message = message.substr(0, kMost) + "...";
  for (char& c : message) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return message;
}

// Accepts exactly the header's grammar. Every method returns false at the first thing that does not
// belong there, with the reason in error().
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return Unexpected("null"); }
  bool boolean(bool value) override { return Unexpected(value ? "true" : "false"); }
  bool number_integer(int64_t value) override { return Unexpected(absl::StrCat(value)); }
  bool number_float(double, const std::string& text) override { return Unexpected(text); }
  bool binary(nlohmann::json::binary_t&) override { return Unexpected("binary data"); }

  bool number_unsigned(uint64_t value) override {
    if (state_ == State::kShape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return Unexpected(absl::StrCat(value));
      }
      tensor_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (state_ == State::kOffsets && offsets_ < 2) {
      (offsets_++ == 0 ? tensor_.begin : tensor_.end) = value;
      return true;
    }
    return Unexpected(absl::StrCat(value));
  }

  bool string(std::string& value) override {
    if (state_ == State::kMetadataValue) {
      state_ = State::kMetadata;
      header_.metadata[key_] = std::move(value);
      return true;
    }
    if (state_ == State::kType) {
      if (ElementSize(value) == 0) {
        return Fail(absl::StrCat("tensor \"", tensor_.name, "\" has the dtype \"", value,
                                 "\"; wanted a type of the format, such as F32 or BF16"));
      }
      state_ = State::kTensor;
      tensor_.dtype = std::move(value);
      return true;
    }
    return Unexpected(absl::StrCat("the text \"", value, "\""));
  }

  bool key(std::string& value) override {
    switch (state_) {
      case State::kTop:
        key_ = value;
        if (header_.tensors.count(value) > 0 || (value == kMetadata && seen_metadata_)) {
          return Fail(absl::StrCat("\"", value, "\" is there twice; wanted each key once"));
        }
        state_ = State::kEntry;
        return true;
      case State::kMetadata:
        key_ = value;
        if (header_.metadata.count(value) > 0) {
          return Fail(absl::StrCat(kMetadata, " has the key \"", value, "\" twice"));
        }
        state_ = State::kMetadataValue;
        return true;
      case State::kTensor:
        return TensorKey(value);
      default:
        return Unexpected(absl::StrCat("the key \"", value, "\""));
    }
  }

  bool start_object(size_t) override {
    if (state_ == State::kStart) {
      state_ = State::kTop;
      return true;
    }
    if (state_ != State::kEntry) return Unexpected("an object");
    if (key_ == kMetadata) {
      seen_metadata_ = true;
      state_ = State::kMetadata;
      return true;
    }
    tensor_ = SafetensorsEntry();
    tensor_.name = key_;
    seen_type_ = seen_shape_ = seen_offsets_ = false;
    state_ = State::kTensor;
    return true;
  }

  bool end_object() override {
    if (state_ == State::kTop) {
      state_ = State::kEnd;
      return true;
    }
    if (state_ == State::kTensor) {
      if (!seen_type_) return Fail(Missing("dtype"));
      if (!seen_shape_) return Fail(Missing("shape"));
      if (!seen_offsets_) return Fail(Missing("data_offsets"));
      header_.tensors.emplace(tensor_.name, std::move(tensor_));
    }
    state_ = State::kTop;
    return true;
  }

  bool start_array(size_t) override {
    if (state_ == State::kShapeStart) {
      state_ = State::kShape;
    } else if (state_ == State::kOffsetsStart) {
      offsets_ = 0;
      state_ = State::kOffsets;
    } else {
      return Unexpected("a list");
    }
    return true;
  }

  bool end_array() override {
    if (state_ == State::kOffsets && offsets_ != 2) {
      return Fail(absl::StrCat("tensor \"", tensor_.name, "\" has ", offsets_,
                               " data_offsets; wanted two, begin and end"));
    }
    state_ = State::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    return Fail(
        absl::StrCat("the header is no JSON object, at its byte ", position, ": ", error.what()));
  }

  const std::string& error() const { return error_; }
  SafetensorsHeader Take() { return std::move(header_); }

 private:
  enum class State {
    kStart,
    kTop,    // between entries
    kEntry,  // behind the key of an entry
    kMetadata,
    kMetadataValue,
    kTensor,  // between a tensor's keys
    kType,
    kShapeStart,
    kShape,
    kOffsetsStart,
    kOffsets,
    kEnd,
  };

  bool TensorKey(const std::string& key) {
    bool* seen = nullptr;
    if (key == "dtype") {
      seen = &seen_type_;
      state_ = State::kType;
    } else if (key == "shape") {
      seen = &seen_shape_;
      state_ = State::kShapeStart;
    } else if (key == "data_offsets") {
      seen = &seen_offsets_;
      state_ = State::kOffsetsStart;
    } else {
      return Unexpected(absl::StrCat("the key \"", key, "\""));
    }
    if (*seen) {
      return Fail(absl::StrCat("tensor \"", tensor_.name, "\" has \"", key, "\" twice"));
    }
    *seen = true;
    return true;
  }

  std::string Missing(const char* what) const {
    return absl::StrCat("tensor \"", tensor_.name, "\" has no \"", what,
                        "\"; wanted dtype, shape and data_offsets");
  }

  bool Unexpected(const std::string& seen) {
    switch (state_) {
      case State::kMetadataValue:
        return Fail(absl::StrCat(kMetadata, " has ", seen, " under \"", key_, "\"; wanted text"));
      case State::kEntry:
        return Fail(absl::StrCat("\"", key_, "\" is ", seen, "; wanted an object"));
      case State::kStart:
        return Fail(absl::StrCat("the header is ", seen, "; wanted a JSON object"));
      case State::kType:
        return Fail(
            absl::StrCat("tensor \"", tensor_.name, "\" has ", seen, " as dtype; wanted text"));
      case State::kShapeStart:
      case State::kShape:
        return Fail(absl::StrCat("tensor \"", tensor_.name, "\" has ", seen,
                                 " in its shape; wanted a list of whole numbers below 2^63"));
      case State::kOffsetsStart:
      case State::kOffsets:
        return Fail(absl::StrCat("tensor \"", tensor_.name, "\" has ", seen,
                                 " in its data_offsets; wanted two whole numbers"));
      default:
        return Fail(absl::StrCat("tensor \"", tensor_.name, "\" has ", seen,
                                 "; wanted dtype, shape and data_offsets alone"));
    }
  }

  bool Fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
    return false;
  }

  State state_ = State::kStart;
  std::string key_;
  SafetensorsEntry tensor_;
  bool seen_type_ = false, seen_shape_ = false, seen_offsets_ = false, seen_metadata_ = false;
  int offsets_ = 0;
  SafetensorsHeader header_;
  std::string error_;
};

// shape x dtype against the offsets; nothing may overflow.
std::optional<std::string> CheckExtent(const SafetensorsEntry& t) {
  const auto say = [&t](auto... what) { return absl::StrCat("tensor \"", t.name, "\" ", what...); };
  if (t.end < t.begin) {
    return say("ends at ", t.end, ", before it begins at ", t.begin);
  }
  uint64_t bytes = ElementSize(t.dtype);
  // A zero anywhere makes the tensor empty, whatever the other extents multiply to.
  const bool empty = std::find(t.shape.begin(), t.shape.end(), 0) != t.shape.end();
  for (int64_t extent : t.shape) {
    if (empty) break;
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes) ||
        bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return say("has the shape ", Shape(t.shape), " of ", t.dtype,
                 ", more bytes than 2^63; wanted ", t.end - t.begin,
                 " bytes, as its data_offsets say");
    }
  }
  if (empty) bytes = 0;
  if (bytes != t.end - t.begin) {
    return say("has the shape ", Shape(t.shape), " of ", t.dtype, ", ", bytes,
               " bytes; wanted the ", t.end - t.begin, " bytes of its data_offsets [", t.begin,
               ", ", t.end, "]");
  }
  return std::nullopt;
}

// The tensors must tile the data.
std::optional<std::string> CheckTiling(const SafetensorsHeader& header, uint64_t file_size) {
  std::vector<const SafetensorsEntry*> order;
  for (const auto& [name, tensor] : header.tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::make_pair(a->begin, a->end) < std::make_pair(b->begin, b->end);
  });
  uint64_t at = 0;
  const SafetensorsEntry* before = nullptr;
  for (const SafetensorsEntry* tensor : order) {
    if (tensor->begin != at) {
      return absl::StrCat(
          "tensor \"", tensor->name, "\" begins at ", tensor->begin, ", ",
          tensor->begin < at ? "inside" : "behind a gap after", " ",
          before == nullptr ? "the header" : absl::StrCat("tensor \"", before->name, "\""),
          ", which ends at ", at, "; wanted ", at);
    }
    at = tensor->end;
    before = tensor;
  }
  // The extents are below 2^63 each and do not overlap, but their end may still pass the file's.
  const uint64_t held = file_size - header.data_offset;
  if (at != held) {
    return absl::StrCat("the file has ", file_size, " bytes; wanted 8 + ", header.data_offset - 8,
                        " of header + ", at, " of data",
                        at < held ? ": there are bytes too many" : ": it is cut short");
  }
  return std::nullopt;
}

}  // namespace

int64_t SafetensorsEntry::elements() const {
  return static_cast<int64_t>((end - begin) / ElementSize(dtype));
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view head, uint64_t file_size,
                                                         const std::string& where) {
  const auto refuse = [&where](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", what...));
  };
  uint64_t length = 0;
  if (file_size < sizeof(length) || head.size() < sizeof(length)) {
    return refuse("the file has ", file_size,
                  " bytes; wanted a safetensors file, at least 8 bytes and a header");
  }
  std::memcpy(&length, head.data(), sizeof(length));
  if (length > kMaxHeader) {
    return refuse("its first 8 bytes say that the header has ", length, " bytes; wanted at most ",
                  kMaxHeader, " (is this a safetensors file?)");
  }
  if (length > file_size - sizeof(length) || length > head.size() - sizeof(length)) {
    return refuse("the file has ", file_size, " bytes; wanted 8 + ", length,
                  " of header + the data: it is cut short");
  }
  const absl::string_view text = head.substr(sizeof(length), length);
  if (text.empty() || text.front() != '{') {
    return refuse("the header does not begin with '{'; wanted a JSON object");
  }
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &reader)) {
    return refuse(OneLine(reader.error()));
  }
  SafetensorsHeader header = reader.Take();
  header.data_offset = sizeof(length) + length;
  for (const auto& [name, tensor] : header.tensors) {
    if (const auto error = CheckExtent(tensor)) return refuse(OneLine(*error));
  }
  if (const auto error = CheckTiling(header, file_size)) return refuse(OneLine(*error));
  return header;
}

}  // namespace zeroshard
