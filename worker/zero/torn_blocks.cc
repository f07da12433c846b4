#include "worker/zero/torn_blocks.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_format.h"
#include "common/status_macros.h"

namespace zeroshard {

absl::StatusOr<std::vector<BlockPart>> GatherParts(Communicator* job,
                                                   const std::vector<BlockPart>& own,
                                                   const CollectiveInfo& info) {
  constexpr int64_t kMost = int64_t{1} << 20;  // of a rank: 280 MiB
  const auto rank = static_cast<size_t>(job->rank());
  std::vector<int64_t> counts(static_cast<size_t>(job->size()));
  counts[rank] = static_cast<int64_t>(own.size());
  ZS_RETURN_IF_ERROR(job->AllGatherHost(counts.data(), sizeof(int64_t), info));
  const auto [fewest, largest] = std::minmax_element(counts.begin(), counts.end());
  if (*fewest < 0 || *largest > kMost) {
    return absl::InternalError(absl::StrFormat(
        "%s: rank %d has %d parts of blocks, wanted at most %d; the slices are too small for it",
        info.unit, largest - counts.begin(), *largest, kMost));
  }
  if (*largest == 0) return std::vector<BlockPart>();
  const auto room = static_cast<size_t>(*largest);
  std::vector<BlockPart> all(room * counts.size());
  std::copy(own.begin(), own.end(), all.begin() + static_cast<int64_t>(rank * room));
  ZS_RETURN_IF_ERROR(
      job->AllGatherHost(all.data(), *largest * static_cast<int64_t>(sizeof(BlockPart)), info));
  std::vector<BlockPart> gathered;
  for (size_t r = 0; r < counts.size(); ++r) {
    const auto first = all.begin() + static_cast<int64_t>(r * room);
    gathered.insert(gathered.end(), first, first + counts[r]);
  }
  return gathered;
}

std::vector<BlockPart> OfKind(const std::vector<BlockPart>& parts, size_t kind) {
  std::vector<BlockPart> some;
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(some),
               [kind](const BlockPart& part) { return part.kind == kind; });
  return some;
}

std::vector<BlockPart> PartsOf(const PartedDigest* digests, size_t kinds) {
  std::vector<BlockPart> parts;
  for (size_t kind = 0; kind < kinds; ++kind) {
    for (BlockPart part : digests[kind].parts) {
      part.kind = static_cast<uint32_t>(kind);
      parts.push_back(part);
    }
  }
  return parts;
}

}  // namespace zeroshard
