#include "worker/train/agreement.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/status_payloads.h"

namespace zeroshard {
namespace {

struct Entry {
  int32_t code = 0;
  uint32_t length = 0;
  char message[kAgreedMessageBytes] = {};
};

}  // namespace

absl::Duration CollectiveDeadline(const v1::JobSpec& spec) {
  return absl::Seconds(std::max<uint32_t>(1, spec.timeouts().collective_seconds()));
}

absl::Status Agree(Communicator* comm, const absl::Status& own, const std::string& what) {
  if (comm->size() == 1) return own;
  std::vector<Entry> entries(static_cast<size_t>(comm->size()));
  Entry& mine = entries[static_cast<size_t>(comm->rank())];
  mine.code = static_cast<int32_t>(own.code());
  mine.length = static_cast<uint32_t>(std::min(own.message().size(), kAgreedMessageBytes));
  own.message().copy(mine.message, mine.length);
  ZS_RETURN_IF_ERROR(comm->AllGatherHost(entries.data(), sizeof(Entry), {.unit = what}));
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    const Entry& e = entries[rank];
    if (e.code == 0) continue;
    const size_t length = std::min<size_t>(e.length, kAgreedMessageBytes);
    absl::Status status(static_cast<absl::StatusCode>(e.code),
                        absl::StrCat("rank ", rank, ": ", absl::string_view(e.message, length)));
    SetBlamedRank(static_cast<uint32_t>(rank), &status);
    return status;
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
