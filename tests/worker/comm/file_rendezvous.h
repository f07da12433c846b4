// A rendezvous of processes in a folder: one file a key.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/notification.h"
#include "worker/comm/communicator.h"

namespace zeroshard {

class FileRendezvous : public Rendezvous {
 public:
  explicit FileRendezvous(std::string folder) : folder_(std::move(folder)) {}

  absl::Status Put(const std::string& key, const std::string& value) override {
    const std::string path = PathOf(key);
    std::ofstream(path + ".new", std::ios::binary) << value;
    std::filesystem::rename(path + ".new", path);
    return absl::OkStatus();
  }

  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    const absl::Time deadline = absl::Now() + timeout;
    absl::Notification never;
    while (true) {
      std::ifstream file(PathOf(key), std::ios::binary);
      if (file) return std::string(std::istreambuf_iterator<char>(file), {});
      if (absl::Now() >= deadline) return absl::DeadlineExceededError(absl::StrCat("no ", key));
      never.WaitForNotificationWithTimeout(absl::Milliseconds(2));
    }
  }

 private:
  std::string PathOf(const std::string& key) const {
    return absl::StrCat(folder_, "/", absl::StrReplaceAll(key, {{"/", "_"}}));
  }
  const std::string folder_;
};

}  // namespace zeroshard
