// Data files in a folder of the test's own.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/common/temp_folder.h"

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

}  // namespace zeroshard
