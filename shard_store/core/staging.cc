#include "shard_store/core/staging.h"

#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"

namespace zeroshard::store {
namespace {

std::string Range(uint64_t begin, uint64_t end) {
  return absl::StrCat("elements ", begin, " to ", end - 1);
}

}  // namespace

absl::Status Coverage::Check(uint64_t begin, uint64_t count) const {
  if (count == 0 || begin >= size_ || count > size_ - begin) {
    return absl::InvalidArgumentError(absl::StrCat(count, " elements from ", begin,
                                                   "; wanted at least one, all within the ", size_,
                                                   " that there are"));
  }
  const uint64_t end = begin + count;
  const auto after = ends_.lower_bound(begin);
  if (after != ends_.end() && after->first == begin && after->second == end) {
    return absl::OkStatus();
  }
  const auto overlaps = [&](std::map<uint64_t, uint64_t>::const_iterator other) {
    return absl::InvalidArgumentError(
        absl::StrCat(Range(begin, end), " overlap ", Range(other->first, other->second),
                     ", which are here already; a range may be said again, but not in other "
                     "pieces"));
  };
  if (after != ends_.end() && after->first < end) return overlaps(after);
  if (after != ends_.begin() && std::prev(after)->second > begin) return overlaps(std::prev(after));
  if (ends_.size() >= MostRanges(size_)) {
    return absl::InvalidArgumentError(
        absl::StrCat(Range(begin, end), " would be range ", ends_.size() + 1, " of a run of ",
                     size_, " elements, which may be made of ", MostRanges(size_),
                     "; send gradients in larger pieces (zero_optimization.reduce_bucket_size, "
                     "offload_optimizer.buffer_size)"));
  }
  return absl::OkStatus();
}

absl::Status Coverage::Add(uint64_t begin, uint64_t count) {
  absl::Status status = Check(begin, count);
  if (status.ok() && ends_.emplace(begin, begin + count).second) covered_ += count;
  return status;
}

void Coverage::Clear() {
  ends_.clear();
  covered_ = 0;
}

uint64_t Coverage::FirstGap() const {
  uint64_t next = 0;
  for (const auto& [begin, end] : ends_) {
    if (begin != next) break;
    next = end;
  }
  return next;
}

}  // namespace zeroshard::store
