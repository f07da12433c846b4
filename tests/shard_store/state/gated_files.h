// Real files whose writer can be held up, or made to fail.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "common/checkpoint/file_system.h"

namespace zeroshard::store {

class GatedFiles : public FileSystem {
 public:
  // Whoever appends from now on waits for Open.
  void Close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    waiting_ = false;
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
  void Fail(const std::string& problem) {
    std::lock_guard<std::mutex> lock(mutex_);
    problem_ = problem;
  }

  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
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
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false, waiting_ = false;
  std::string problem_;
};

}  // namespace zeroshard::store
