// A folder of a test's own, gone with it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

namespace zeroshard {

class TempFolder {
 public:
  explicit TempFolder(const std::string& parent = ::testing::TempDir()) {
    std::string pattern = parent + "/zeroshard_XXXXXX";
    const char* made = mkdtemp(pattern.data());
    EXPECT_NE(made, nullptr) << pattern;
    path_ = pattern;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// One in memory, where there is such a place with room: for tests that write much and show nothing
// of what a disk does, which would spend their time waiting for it to sync.
class MemoryFolder : public TempFolder {
 public:
  MemoryFolder() : TempFolder(Parent()) {}

 private:
  static std::string Parent() {
    const char* memory = "/dev/shm";
    constexpr uintmax_t kRoom = uintmax_t{256} << 20;
    std::error_code error;
    const auto space = std::filesystem::space(memory, error);
    if (error || space.available < kRoom || access(memory, W_OK) != 0) return ::testing::TempDir();
    return memory;
  }
};

inline std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace zeroshard
