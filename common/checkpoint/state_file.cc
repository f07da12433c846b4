// Writing one rank's file.
#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checkpoint/names.h"
#include "common/checkpoint/store.h"
#include "common/checksum.h"
#include "common/status_macros.h"
#include "common/types.h"

namespace zeroshard {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little endian");

constexpr int64_t kAlign = 4096;              // bytes: where the data begins, at a page
constexpr size_t kSlice = size_t{512} << 10;  // bytes that stay cached from checksum to write
constexpr uint64_t kMaxHeader = 100'000'000;  // safetensors' own limit

absl::Status PieceError(const StatePiece& piece, absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat("state to be saved: ", NameOf(piece.kind),
                                                 " of \"", piece.tensor, "\" [",
                                                 absl::StrJoin(piece.shape, ", "), "], elements ",
                                                 piece.begin, " to ", piece.end, ": ", problem));
}

// Length, header and the spaces up to the data, and where the data ends.
struct Head {
  std::string text;
  uint64_t data_bytes = 0;
};

absl::StatusOr<Head> MakeHead(const std::vector<StatePiece>& pieces) {
  nlohmann::json metadata = {{"format", "pt"}};
  std::set<std::string> names;
  std::string tensors;
  Head head;
  for (const StatePiece& piece : pieces) {
    const std::optional<int64_t> elements = ElementsOf(piece.shape);
    if (!elements) return PieceError(piece, "a shape with a negative extent or too many elements");
    if (piece.begin < 0 || piece.begin > piece.end || piece.end > *elements) {
      return PieceError(piece, absl::StrCat("wanted a range within its ", *elements, " elements"));
    }
    const bool whole = piece.begin == 0 && piece.end == *elements;
    const std::string name =
        FormatStateName({piece.kind, piece.tensor, whole, piece.begin, piece.end});
    if (!ParseStateName(name)) return PieceError(piece, "a name is some text without a slash");
    if (!names.insert(name).second) return PieceError(piece, "it is there twice");
    std::vector<int64_t> shape = piece.shape;
    if (!whole) {
      metadata[ShapeKey(piece.tensor)] = FormatShape(piece.shape);
      shape = {piece.end - piece.begin};
    }
    const uint64_t bytes = static_cast<uint64_t>(piece.end - piece.begin) * sizeof(float);
    // Not one json object: that sorts its keys, and the order here is the data's.
    const nlohmann::json entry = {{"dtype", "F32"},
                                  {"shape", shape},
                                  {"data_offsets", {head.data_bytes, head.data_bytes + bytes}}};
    absl::StrAppend(&tensors, ",", nlohmann::json(name).dump(), ":", entry.dump());
    head.data_bytes += bytes;
  }
  std::string json = absl::StrCat("{\"__metadata__\":", metadata.dump(), tensors, "}");
  json.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(8 + json.size()), kAlign)) - 8, ' ');
  const uint64_t length = json.size();
  if (length > kMaxHeader) {
    return absl::InvalidArgumentError(absl::StrCat("state to be saved: ", pieces.size(),
                                                   " pieces need a header of ", length,
                                                   " bytes; wanted at most ", kMaxHeader));
  }
  for (int i = 0; i < 8; ++i) head.text += static_cast<char>(length >> (8 * i));
  head.text += json;
  return head;
}

// A file and the checksum of what went into it.
class ChecksummedFile {
 public:
  explicit ChecksummedFile(std::unique_ptr<WritableFile> file) : file_(std::move(file)) {}

  absl::Status Append(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const size_t part = std::min(bytes, kSlice);
      crc_ = ExtendCrc32c(crc_, at, part);
      ZS_RETURN_IF_ERROR(file_->Append(at, part));
      at += part;
      bytes -= part;
    }
    return absl::OkStatus();
  }
  absl::Status SyncAndClose() { return file_->SyncAndClose(); }
  uint32_t crc() const { return crc_; }

 private:
  const std::unique_ptr<WritableFile> file_;
  uint32_t crc_ = 0;
};

}  // namespace

absl::StatusOr<CheckpointFile> WriteStateFile(FileSystem* files, const std::string& folder,
                                              int rank, int world,
                                              const std::vector<StatePiece>& pieces) {
  return WriteStateFile(files, folder, rank, world, pieces,
                        [&pieces](size_t piece) { return pieces[piece].values; });
}

absl::StatusOr<CheckpointFile> WriteStateFile(FileSystem* files, const std::string& folder,
                                              int rank, int world,
                                              const std::vector<StatePiece>& pieces,
                                              const PieceValues& values) {
  if (rank < 0 || rank >= world) {
    return absl::InvalidArgumentError(
        absl::StrCat("state to be saved: rank ", rank, " of ", world, " ranks"));
  }
  Head head;
  try {
    ZS_ASSIGN_OR_RETURN(head, MakeHead(pieces));
  } catch (const nlohmann::json::exception& error) {  // a name that is no UTF-8
    return absl::InvalidArgumentError(absl::StrCat("state to be saved: ", error.what()));
  }
  CheckpointFile written;
  written.name = StateFileName(rank, world);
  written.bytes = head.text.size() + head.data_bytes;
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<WritableFile> created,
                      files->Create(absl::StrCat(folder, "/", written.name)));
  ChecksummedFile file(std::move(created));
  ZS_RETURN_IF_ERROR(file.Append(head.text.data(), head.text.size()));
  for (size_t i = 0; i < pieces.size(); ++i) {
    ZS_ASSIGN_OR_RETURN(const float* at, values(i));
    ZS_RETURN_IF_ERROR(
        file.Append(at, static_cast<size_t>(pieces[i].end - pieces[i].begin) * sizeof(float)));
  }
  ZS_RETURN_IF_ERROR(file.SyncAndClose());
  written.crc32c = file.crc();
  return written;
}

}  // namespace zeroshard
