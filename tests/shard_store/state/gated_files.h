// Real files whose writer can be held up, or made to fail.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/checkpoint/file_system.h"

namespace zeroshard::store {

class GatedFiles : public FileSystem {
 public:
  // Whoever appends from now on waits for Open; of what comes after a file's header, once these
  // many bytes have passed.
  void Close(std::optional<uint64_t> data = std::nullopt) {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    waiting_ = false;
    data_ = data;
  }
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = false;
    changed_.notify_all();
  }
  void WaitForWriter() {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(30), [this] { return waiting_; }))
        << "nobody writes";
  }
  // Create throws this from now on; empty: no more.
  void Throw(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex_);
    thrown_ = what;
  }
  void Fail(const std::string& problem) {
    std::lock_guard<std::mutex> lock(mutex_);
    problem_ = problem;
  }

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!thrown_.empty()) throw std::runtime_error(thrown_);
    }
    auto file = Real().Create(path);
    if (!file.ok()) return file.status();
    return std::make_unique<File>(this, *std::move(file));
  }
  absl::Status MakeFolder(const std::string& path) override { return Real().MakeFolder(path); }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Real().Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override { return Real().RemoveAll(path); }
  absl::Status SyncFolder(const std::string& path) override { return Real().SyncFolder(path); }

 private:
  class File : public WritableFile {
   public:
    File(GatedFiles* owner, std::unique_ptr<WritableFile> file)
        : owner_(*owner), file_(std::move(file)) {}
    absl::Status Append(const void* data, size_t bytes) override {
      std::unique_lock<std::mutex> lock(owner_.mutex_);
      if (!owner_.problem_.empty()) return absl::ResourceExhaustedError(owner_.problem_);
      const bool header = std::exchange(at_header_, false);
      if (owner_.closed_ && owner_.data_ && (header || *owner_.data_ >= bytes)) {
        if (!header) *owner_.data_ -= bytes;
        lock.unlock();
        return file_->Append(data, bytes);
      }
      owner_.waiting_ = owner_.closed_;
      owner_.changed_.notify_all();
      owner_.changed_.wait(lock, [this] { return !owner_.closed_; });
      lock.unlock();
      return file_->Append(data, bytes);
    }
    absl::Status SyncAndClose() override { return file_->SyncAndClose(); }

   private:
    GatedFiles& owner_;
    const std::unique_ptr<WritableFile> file_;
    bool at_header_ = true;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false, waiting_ = false;
  std::optional<uint64_t> data_;
  std::string problem_, thrown_;
};

}  // namespace zeroshard::store
