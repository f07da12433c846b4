// Data files in a folder of the test's own.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/common/temp_folder.h"
#include "worker/data/dataset.h"

namespace zeroshard {

class DataFolder : public TempFolder {
 public:
  std::string At(const std::string& name) const { return *this / name; }
  std::string Write(const std::string& name, const std::string& content) const {
    const std::string path = At(name);
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path;
  }
};

template <typename T>
std::string Raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// llm.c's 1024-byte header.
inline std::string Header(int32_t magic, int32_t version, int32_t count) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return Raw(header);
}

// A Megatron .idx file: the sequences' lengths in ids of `width` bytes and type `code`, and the
// sequences at which documents begin.
inline std::string MegatronIndexFile(uint8_t code, int width, const std::vector<int32_t>& lengths,
                                     const std::vector<int64_t>& documents) {
  std::vector<int64_t> pointers;
  int64_t at = 0;
  for (const int32_t length : lengths) {
    pointers.push_back(at);
    at += int64_t{length} * width;
  }
  return std::string("MMIDIDX\0\0", 9) + Raw<uint64_t>({1}) + Raw<uint8_t>({code}) +
         Raw<uint64_t>({lengths.size(), documents.size()}) + Raw(lengths) + Raw(pointers) +
         Raw(documents);
}

// The whole run, read in samples of one token.
inline std::vector<int32_t> RunOf(const TokenDataset& data) {
  std::vector<int32_t> all(data.token_count());
  for (int64_t i = 0; i < data.sample_count(); ++i) {
    int32_t target;
    data.Sample(i, absl::MakeSpan(&all[i], 1), absl::MakeSpan(&target, 1));
    if (i + 1 == data.sample_count()) all[i + 1] = target;
  }
  return all;
}

}  // namespace zeroshard
