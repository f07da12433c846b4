// A header is refused, or everything that readers rely on holds.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/safetensors/safetensors.h"
#include "tests/fuzz/fuzz_target.h"

namespace zeroshard {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "accepted a header although %s\n", what);
  std::abort();
}

void Check(const SafetensorsHeader& header, size_t file_size) {
  uint64_t total = 0;
  for (const auto& [name, tensor] : header.tensors) {
    Require(tensor.begin <= tensor.end, "a tensor ends before it begins");
    Require(tensor.end <= file_size - header.data_offset, "a tensor ends behind the file");
    unsigned __int128 elements = 1;
    bool empty = false;
    for (int64_t extent : tensor.shape) {
      Require(extent >= 0, "an extent is negative");
      empty = empty || extent == 0;
    }
    for (int64_t extent : tensor.shape) elements *= empty ? 0 : static_cast<uint64_t>(extent);
    Require(elements == static_cast<uint64_t>(tensor.elements()), "a shape is not its bytes");
    total += tensor.end - tensor.begin;
  }
  // Within the file and as many bytes as it has: with no overlap that is a tiling.
  Require(total == file_size - header.data_offset, "the tensors do not tile the data");
}

std::string File(const std::string& json, size_t data) {
  std::string file(8, '\0');
  const uint64_t length = json.size();
  std::memcpy(file.data(), &length, sizeof(length));
  return file + json + std::string(data, ' ');
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  return {
      File("{}", 0),
      File(R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],)"
           R"("data_offsets":[0,24]}})",
           24),
      File(R"({"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},)"
           R"("b":{"dtype":"I64","shape":[],"data_offsets":[8,16]},)"
           R"("c":{"dtype":"U8","shape":[0,7],"data_offsets":[16,16]}}    )",
           16),
  };
}

}  // namespace zeroshard

// The input twice: as a file, and as the header of one, whose right length and a few sizes of data
// let changed headers get past the first check.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> files = {input};
  if (size > 8) {
    for (size_t bytes : {0, 16, 24}) files.push_back(zeroshard::File(input.substr(8), bytes));
  }
  for (const std::string& file : files) {
    const auto header = zeroshard::ParseSafetensorsHeader(file, file.size(), "input");
    if (header.ok()) zeroshard::Check(*header, file.size());
  }
  return 0;
}
