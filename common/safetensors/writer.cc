#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/files.h"
#include "common/safetensors/safetensors.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr uint64_t kAlign = 64;  // bytes: where the data begins

const char* TypeName(DType type) {
  switch (type) {
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kI32:
      return "I32";
    case DType::kU8:
      return "U8";
  }
  return "?";
}

absl::StatusOr<uint64_t> ByteSize(const SafetensorsLayout& tensor) {
  uint64_t bytes = SizeOf(tensor.dtype);
  for (int64_t extent : tensor.shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(extent), &bytes)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor \"", tensor.name, "\" has the shape [", absl::StrJoin(tensor.shape, ", "),
          "]; wanted extents from 0 whose product ", "fits 64 bits"));
    }
  }
  return bytes;
}

// Length, header and the spaces up to the data.
absl::StatusOr<std::string> Head(const std::vector<SafetensorsLayout>& tensors,
                                 const std::map<std::string, std::string>& metadata,
                                 uint64_t* data_bytes) {
  // Not a json object: that sorts its keys, and readers that map files like them in data order.
  std::string text = absl::StrCat("{\"__metadata__\":", nlohmann::json(metadata).dump());
  std::set<std::string> names = {"__metadata__"};
  uint64_t at = 0;
  for (const SafetensorsLayout& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", tensor.name, "\" is there twice, or its name is reserved"));
    }
    absl::StatusOr<uint64_t> bytes = ByteSize(tensor);
    if (!bytes.ok()) return bytes.status();
    if (*bytes > std::numeric_limits<uint64_t>::max() / 2 - at) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", tensor.name, "\" ends beyond 2^63 bytes"));
    }
    nlohmann::json entry = {{"dtype", TypeName(tensor.dtype)},
                            {"shape", tensor.shape},
                            {"data_offsets", {at, at + *bytes}}};
    absl::StrAppend(&text, ",", nlohmann::json(tensor.name).dump(), ":", entry.dump());
    at += *bytes;
  }
  *data_bytes = at;
  text += "}";
  const uint64_t padded = RoundUp(static_cast<int64_t>(8 + text.size()), kAlign) - 8;
  text.resize(padded, ' ');
  std::string head(8, '\0');
  for (int i = 0; i < 8; ++i) head[i] = static_cast<char>(padded >> (8 * i));
  return head + text;
}

absl::Status WriteAll(int fd, const char* data, uint64_t size, const std::string& path) {
  constexpr uint64_t kPiece = uint64_t{1} << 30;  // one call writes at most 2 GiB
  while (size > 0) {
    const ssize_t written = write(fd, data, std::min(size, kPiece));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return ErrnoError(written < 0 ? errno : EIO, "write", path);
    data += written;
    size -= static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

absl::Status SyncFolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoError(errno, "open", folder);
  const int result = fsync(fd);
  const int error = errno;
  close(fd);
  return result == 0 ? absl::OkStatus() : ErrnoError(error, "sync", folder);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, const std::vector<SafetensorsLayout>& tensors,
    std::map<std::string, std::string> metadata) {
  metadata["format"] = "pt";
  uint64_t data_bytes = 0;
  std::string head;
  try {
    absl::StatusOr<std::string> text = Head(tensors, metadata, &data_bytes);
    if (!text.ok()) return text.status();
    head = *std::move(text);
  } catch (const nlohmann::json::exception& error) {  // a name that is no UTF-8
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.what()));
  }
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoError(errno, "create", temporary);
  auto writer =
      std::unique_ptr<SafetensorsWriter>(new SafetensorsWriter(path, temporary, fd, data_bytes));
  if (absl::Status status = WriteAll(fd, head.data(), head.size(), temporary); !status.ok()) {
    return status;
  }
  return writer;
}

SafetensorsWriter::SafetensorsWriter(std::string path, std::string temporary, int fd,
                                     uint64_t data_bytes)
    : path_(std::move(path)), temporary_(std::move(temporary)), fd_(fd), data_bytes_(data_bytes) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ < 0) return;
  close(fd_);
  unlink(temporary_.c_str());
}

absl::Status SafetensorsWriter::Append(const void* data, uint64_t bytes) {
  if (fd_ < 0 || bytes > data_bytes_ - written_) {
    return absl::FailedPreconditionError(absl::StrCat(path_, ": ", bytes, " bytes more than the ",
                                                      written_, " of ", data_bytes_,
                                                      " that were written"));
  }
  if (absl::Status s = WriteAll(fd_, static_cast<const char*>(data), bytes, temporary_); !s.ok()) {
    return s;
  }
  written_ += bytes;
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  if (fd_ < 0 || written_ != data_bytes_) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": ", written_, " bytes were written; wanted ", data_bytes_));
  }
  if (fsync(fd_) != 0) return ErrnoError(errno, "sync", temporary_);
  const int fd = std::exchange(fd_, -1);
  absl::Status status;
  if (close(fd) != 0) {
    status = ErrnoError(errno, "close", temporary_);
  } else if (rename(temporary_.c_str(), path_.c_str()) != 0) {
    status = ErrnoError(errno, "rename", temporary_);
  }
  if (!status.ok()) {
    unlink(temporary_.c_str());
    return status;
  }
  return SyncFolderOf(path_);
}

absl::Status WriteSafetensors(const std::string& path,
                              const std::vector<SafetensorsTensor>& tensors,
                              std::map<std::string, std::string> metadata) {
  std::vector<SafetensorsLayout> layouts;
  for (const SafetensorsTensor& t : tensors) layouts.push_back({t.name, t.dtype, t.shape});
  ZS_ASSIGN_OR_RETURN(const auto writer,
                      SafetensorsWriter::Create(path, layouts, std::move(metadata)));
  for (const SafetensorsTensor& tensor : tensors) {
    uint64_t bytes = SizeOf(tensor.dtype);
    for (const int64_t extent : tensor.shape) bytes *= static_cast<uint64_t>(extent);
    ZS_RETURN_IF_ERROR(writer->Append(tensor.data, bytes));
  }
  return writer->Finish();
}

}  // namespace zeroshard
