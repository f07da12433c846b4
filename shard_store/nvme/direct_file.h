// A file that is read and written without the page cache, and the seam through which tests put
// faults between this folder and the kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard::nvme {

// Offsets, lengths and addresses of O_DIRECT are multiples of it: the largest logical block of
// common devices, and their page.
constexpr uint32_t kAlignment = 4096;

// What the kernel is asked to do passes here first. The program has none of these; tests override
// what they want to fail. Called from any thread.
class DiskHook {
 public:
  virtual ~DiskHook() = default;

  struct Attempt {
    bool write = false;
    std::string path;
    uint64_t offset = 0;
    uint32_t bytes = 0;
  };
  struct Verdict {
    enum {
      kDo,       // of at most `bytes`
      kPretend,  // nothing is done; the kernel's answer is `result`: bytes, or a negative errno
      kHang,     // nothing is done, and there is no answer
    } what = kDo;
    uint32_t bytes = UINT32_MAX;
    int64_t result = 0;
  };
  virtual Verdict OnOperation(const Attempt&) { return {}; }

  // Each returns the errno to fail with, 0: none.
  virtual int OnOpen(const std::string& path, int flags) { return 0; }
  virtual int OnAllocate(const std::string& path, uint64_t bytes) { return 0; }
  virtual int OnRingSetup() { return 0; }
  virtual int OnRegisterBuffers() { return 0; }
};

// Thread-safe.
class DirectFile {
 public:
  // A new file, read and written by its owner alone; ALREADY_EXISTS where there is one of that
  // name. Where the file system refuses O_DIRECT (EINVAL; tmpfs of old kernels) it is opened
  // without, with a warning: the page cache is used then.
  static absl::StatusOr<std::shared_ptr<DirectFile>> Create(const std::string& path,
                                                            DiskHook* hook = nullptr);
  ~DirectFile();
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  // Reserves the space for [0, bytes) and makes that the file's size. RESOURCE_EXHAUSTED with the
  // path, the bytes wanted and those free; UNIMPLEMENTED where the file system cannot.
  absl::Status Allocate(uint64_t bytes);
  // flock(LOCK_EX) without waiting: held until the file is closed, or its process ends.
  absl::Status Lock();

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  bool direct() const { return direct_; }

 private:
  DirectFile(int fd, std::string path, bool direct, DiskHook* hook)
      : fd_(fd), path_(std::move(path)), direct_(direct), hook_(hook) {}

  const int fd_;
  const std::string path_;
  const bool direct_;
  DiskHook* const hook_;
};

}  // namespace zeroshard::nvme
