#include "common/checkpoint/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/check.h"
#include "common/checkpoint/files.h"
#include "common/checkpoint/names.h"
#include "common/files.h"
#include "common/plan/offload.h"
#include "common/safetensors/safetensors.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

absl::Status ReadAt(int fd, const std::string& path, uint64_t offset, size_t bytes, char* out) {
  while (bytes > 0) {
    constexpr size_t kMost = size_t{1} << 30;  // one call reads at most 2 GiB
    const ssize_t got = pread(fd, out, std::min(bytes, kMost), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoError(errno, "read", path);
    if (got == 0) {
      return absl::DataLossError(
          absl::StrCat(path, " ends at byte ", offset, "; wanted ", bytes, " bytes more"));
    }
    out += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

// One open state file.
class StateFile {
 public:
  static absl::StatusOr<std::unique_ptr<StateFile>> Open(const std::string& path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return ErrnoError(errno, "open", path);
    std::unique_ptr<StateFile> file(new StateFile(path, fd));
    ZS_RETURN_IF_ERROR(file->ReadHeader());
    return file;
  }
  ~StateFile() { close(fd_); }

  const std::string& path() const { return path_; }
  const SafetensorsHeader& header() const { return header_; }

  // Floats from `offset` bytes into the data.
  absl::Status Read(uint64_t offset, size_t count, float* out) const {
    return ReadAt(fd_, path_, header_.data_offset + offset, count * sizeof(float),
                  reinterpret_cast<char*>(out));
  }

 private:
  StateFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  absl::Status ReadHeader() {
    struct stat status;
    if (fstat(fd_, &status) != 0) return ErrnoError(errno, "examine", path_);
    const auto size = static_cast<uint64_t>(status.st_size);
    std::string head(std::min<uint64_t>(size, 8), '\0');
    ZS_RETURN_IF_ERROR(ReadAt(fd_, path_, 0, head.size(), head.data()));
    uint64_t length = 0;
    for (size_t i = 0; i < head.size(); ++i) {
      length |= static_cast<uint64_t>(static_cast<unsigned char>(head[i])) << (8 * i);
    }
    // A length that cannot be is refused from the first bytes alone.
    constexpr uint64_t kMaxHeader = 100'000'000;
    if (head.size() == 8 && length <= std::min(size - 8, kMaxHeader)) {
      head.resize(8 + length);
      ZS_RETURN_IF_ERROR(ReadAt(fd_, path_, 8, length, head.data() + 8));
    }
    ZS_ASSIGN_OR_RETURN(header_, ParseSafetensorsHeader(head, size, path_));
    return absl::OkStatus();
  }

  const std::string path_;
  const int fd_;
  SafetensorsHeader header_;
};

// A range of a tensor's elements and where they are.
struct Range {
  int64_t begin = 0, end = 0;
  const StateFile* file = nullptr;
  uint64_t offset = 0;  // bytes into its data
};

struct Tensor {
  std::vector<int64_t> shape;
  int64_t elements = 0;
  std::array<std::vector<Range>, kStateKinds> ranges;  // in order once checked
};

std::string Shown(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

class Reader;

class KindSource : public ParameterSource {
 public:
  KindSource(const Reader* reader, StateKind kind) : reader_(reader), kind_(kind) {}
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override;

 private:
  const Reader* const reader_;
  const StateKind kind_;
};

class Reader : public CheckpointReader {
 public:
  Reader(std::string path, Manifest manifest)
      : path_(std::move(path)), manifest_(std::move(manifest)) {}

  absl::Status OpenFiles() {
    for (const CheckpointFile& file : manifest_.files) {
      if (!IsStateFileName(file.name)) continue;
      ZS_ASSIGN_OR_RETURN(std::unique_ptr<StateFile> opened,
                          StateFile::Open(absl::StrCat(path_, "/", file.name)));
      files_.push_back(std::move(opened));
      ZS_RETURN_IF_ERROR(AddTensors(*files_.back()));
    }
    for (auto& [name, tensor] : tensors_) {
      for (int kind = 0; kind < kStateKinds; ++kind) {
        ZS_RETURN_IF_ERROR(CheckTiling(name, static_cast<StateKind>(kind), &tensor));
      }
    }
    return absl::OkStatus();
  }

  const Manifest& manifest() const override { return manifest_; }
  const std::string& path() const override { return path_; }

  absl::Status VerifyFiles(int share, int shares, const std::function<void(uint64_t)>& on_bytes,
                           const std::atomic<bool>* stop) const override {
    if (share < 0 || share >= shares) {
      return absl::InvalidArgumentError(absl::StrCat("share ", share, " of ", shares));
    }
    for (size_t i = static_cast<size_t>(share); i < manifest_.files.size();
         i += static_cast<size_t>(shares)) {
      const CheckpointFile& wanted = manifest_.files[i];
      ZS_ASSIGN_OR_RETURN(const CheckpointFile seen,
                          DescribeFile(path_, wanted.name, on_bytes, stop));
      if (seen.bytes == wanted.bytes && seen.crc32c == wanted.crc32c) continue;
      return absl::DataLossError(absl::StrFormat(
          "%s/%s is damaged: it has %d bytes and the CRC-32C %08x; its manifest wants %d bytes and "
          "%08x; restore the file or use another checkpoint",
          path_, wanted.name, seen.bytes, seen.crc32c, wanted.bytes, wanted.crc32c));
    }
    return absl::OkStatus();
  }

  absl::Status CheckModel(const ModelTable& model, bool moments) const override;

  std::unique_ptr<ParameterSource> Source(StateKind kind) const override {
    return std::make_unique<KindSource>(this, kind);
  }

  absl::Status Read(StateKind kind, const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const;

 private:
  absl::Status AddTensors(const StateFile& file);
  absl::Status CheckTiling(const std::string& name, StateKind kind, Tensor* tensor) const;

  const std::string path_;
  const Manifest manifest_;
  std::vector<std::unique_ptr<StateFile>> files_;
  std::map<std::string, Tensor> tensors_;
};

absl::Status Reader::AddTensors(const StateFile& file) {
  for (const auto& [text, entry] : file.header().tensors) {
    const auto error = [&file, &text = text](absl::string_view problem) {
      return absl::InvalidArgumentError(
          absl::StrCat(file.path(), ": tensor \"", text, "\": ", problem));
    };
    const std::optional<StateName> name = ParseStateName(text);
    if (!name) return error("wanted master, exp_avg or exp_avg_sq, a tensor and a range");
    if (entry.dtype != "F32") return error(absl::StrCat("type ", entry.dtype, "; wanted F32"));
    std::vector<int64_t> shape = entry.shape;
    if (!name->whole) {
      if (shape != std::vector<int64_t>{name->end - name->begin}) {
        return error(absl::StrCat("shape ", Shown(shape), "; wanted its range's elements"));
      }
      const auto found = file.header().metadata.find(ShapeKey(name->tensor));
      const auto whole =
          found == file.header().metadata.end() ? std::nullopt : ParseShape(found->second);
      if (!whole) {
        return error(absl::StrCat("the metadata have no shape for it (\"", ShapeKey(name->tensor),
                                  "\": \"2x3\")"));
      }
      shape = *whole;
    }
    const std::optional<int64_t> elements = ElementsOf(shape);
    if (!elements || (!name->whole && name->end > *elements)) {
      return error(absl::StrCat("its range is not within the shape ", Shown(shape)));
    }
    Tensor tensor{shape, *elements, {}};
    Tensor& known = tensors_.emplace(name->tensor, std::move(tensor)).first->second;
    if (known.shape != shape) {
      return error(absl::StrCat("shape ", Shown(shape), "; elsewhere it is ", Shown(known.shape)));
    }
    const int64_t begin = name->whole ? 0 : name->begin;
    const int64_t end = name->whole ? *elements : name->end;
    known.ranges[static_cast<int>(name->kind)].push_back({begin, end, &file, entry.begin});
  }
  return absl::OkStatus();
}

absl::Status Reader::CheckTiling(const std::string& name, StateKind kind, Tensor* tensor) const {
  std::vector<Range>& ranges = tensor->ranges[static_cast<int>(kind)];
  const auto error = [&](absl::string_view problem) {
    return absl::DataLossError(
        absl::StrCat(path_, ": ", NameOf(kind), " of tensor \"", name, "\": ", problem));
  };
  if (ranges.empty()) {
    if (kind == StateKind::kMaster) return error("it is in no file, but moments of it are");
    return absl::OkStatus();
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t at = 0;
  const StateFile* before = nullptr;
  for (const Range& range : ranges) {
    if (range.begin < at) {
      return error(absl::StrCat("elements ", range.begin, " to ", std::min(at, range.end),
                                " are there twice, in ", before->path(), " and ",
                                range.file->path()));
    }
    if (range.begin > at) {
      return error(absl::StrCat("elements ", at, " to ", range.begin, " are in no file"));
    }
    at = range.end;
    before = range.file;
  }
  if (at != tensor->elements) {
    return error(absl::StrCat("elements ", at, " to ", tensor->elements, " are in no file"));
  }
  // Reading looks ranges up by their end; empty ones would hide others.
  std::erase_if(ranges, [](const Range& range) { return range.begin == range.end; });
  return absl::OkStatus();
}

absl::Status Reader::CheckModel(const ModelTable& model, bool moments) const {
  std::vector<std::string> problems;
  std::set<std::string> wanted;
  for (const UnitTable& unit : model.units) {
    for (const ParameterInfo& parameter : unit.parameters) {
      wanted.insert(parameter.name);
      const auto found = tensors_.find(parameter.name);
      if (found == tensors_.end()) {
        problems.push_back(
            absl::StrCat("\"", parameter.name, "\" ", Shown(parameter.shape), " is not in it"));
        continue;
      }
      if (found->second.shape != parameter.shape) {
        problems.push_back(absl::StrCat("\"", parameter.name, "\" has the shape ",
                                        Shown(found->second.shape), " in it; the model wants ",
                                        Shown(parameter.shape)));
        continue;
      }
      if (!moments || !parameter.trainable || parameter.size == 0) continue;
      for (const StateKind kind : {StateKind::kExpAvg, StateKind::kExpAvgSq}) {
        if (kind == StateKind::kExpAvgSq && UsesSgd(manifest_.spec)) continue;
        if (found->second.ranges[static_cast<int>(kind)].empty()) {
          problems.push_back(absl::StrCat("\"", parameter.name, "\" has no ", NameOf(kind),
                                          " in it: it was frozen when it was saved"));
        }
      }
    }
  }
  for (const auto& [name, tensor] : tensors_) {
    if (!wanted.contains(name)) {
      problems.push_back(
          absl::StrCat("\"", name, "\" ", Shown(tensor.shape), " is not in the model"));
    }
  }
  if (problems.empty()) return absl::OkStatus();
  constexpr size_t kNamed = 10;
  const size_t more = problems.size() > kNamed ? problems.size() - kNamed : 0;
  problems.resize(problems.size() - more);
  return absl::InvalidArgumentError(absl::StrCat(
      "the checkpoint ", path_, " is not of this model: ", absl::StrJoin(problems, "; "),
      more > 0 ? absl::StrCat("; and ", more, " more") : "",
      "; use the model section it was trained with"));
}

absl::Status Reader::Read(StateKind kind, const ParameterInfo& tensor, int64_t begin, int64_t end,
                          float* out) const {
  const auto found = tensors_.find(tensor.name);
  if (found == tensors_.end()) {
    return absl::NotFoundError(absl::StrCat(path_, " has no tensor \"", tensor.name, "\""));
  }
  if (found->second.shape != tensor.shape) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor \"", tensor.name,
                                                   "\" has the shape ", Shown(found->second.shape),
                                                   "; wanted ", Shown(tensor.shape)));
  }
  if (begin < 0 || begin > end || end > found->second.elements) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": elements ", begin, " to ", end,
                                                   " of tensor \"", tensor.name, "\", which has ",
                                                   found->second.elements));
  }
  if (begin == end) return absl::OkStatus();
  const std::vector<Range>& ranges = found->second.ranges[static_cast<int>(kind)];
  if (ranges.empty()) {
    return absl::NotFoundError(
        absl::StrCat(path_, " has no ", NameOf(kind), " of tensor \"", tensor.name, "\""));
  }
  auto range = std::upper_bound(ranges.begin(), ranges.end(), begin,
                                [](int64_t at, const Range& range) { return at < range.end; });
  for (int64_t at = begin; at < end; ++range) {
    const int64_t stop = std::min(end, range->end);
    const absl::Status status =
        range->file->Read(range->offset + static_cast<uint64_t>(at - range->begin) * sizeof(float),
                          static_cast<size_t>(stop - at), out + (at - begin));
    if (!status.ok()) {
      return absl::Status(status.code(),
                          absl::StrCat(status.message(), ", for tensor \"", tensor.name, "\""));
    }
    at = stop;
  }
  return absl::OkStatus();
}

absl::Status KindSource::Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                              float* out) const {
  return reader_->Read(kind_, tensor, begin, end, out);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::Open(const std::string& given) {
  std::string path = given;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  ZS_ASSIGN_OR_RETURN(Manifest manifest, ReadAndCheckSizes(path));
  return OpenCollected(path, std::move(manifest));
}

absl::StatusOr<std::unique_ptr<CheckpointReader>> CheckpointReader::OpenCollected(
    const std::string& folder, Manifest manifest) {
  auto reader = std::make_unique<Reader>(folder, std::move(manifest));
  if (absl::Status status = reader->OpenFiles(); !status.ok()) {
    // A damaged header says anything: where a checksum tells which file it is, that is the error.
    ZS_RETURN_IF_ERROR(reader->VerifyFiles(0, 1, nullptr, nullptr));
    return status;
  }
  return reader;
}

}  // namespace zeroshard
