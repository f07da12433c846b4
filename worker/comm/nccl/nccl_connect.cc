#include "worker/comm/nccl/nccl_connect.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/status_macros.h"
#include "worker/comm/nccl/nccl_errors.h"
#include "worker/comm/nccl/nccl_operation.h"

namespace zeroshard {
namespace {

// For naming who did not come: for one key, and for how many missing ranks.
constexpr absl::Duration kProbe = absl::Milliseconds(100);
constexpr size_t kMostNamed = 3;

std::string Key(int rank) { return absl::StrCat("nccl/", rank); }

bool Cancelled(const CommunicatorOptions& options) {
  return options.cancelled != nullptr && options.cancelled->load();
}

absl::Status CancelledError() { return absl::AbortedError("told to stop while connecting"); }

absl::Status CheckVersion(NcclApi* api) {
  int version = 0;
  const NcclResult result = api->Version(&version);
  if (result != NcclResult::kSuccess) return NcclError(api, result, nullptr, "ncclGetVersion");
  if (version >= kLeastNcclVersion) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("the NCCL library has version code ", version,
                                                    ", wanted at least ", kLeastNcclVersion,
                                                    " (2.19); install a newer libnccl"));
}

absl::Status CheckSize(const std::string& text, int peer, int size) {
  int theirs = 0;
  if (absl::SimpleAtoi(text, &theirs) && theirs == size) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", peer, " (rendezvous key \"", Key(peer), "\") says that there are \"",
      absl::CHexEscape(text.substr(0, 20)), "\" ranks, this one was told ", size,
      "; do all workers run the same build and belong to the same job and generation?"));
}

absl::StatusOr<std::string> ParseId(const std::string& value, int size) {
  const std::vector<std::string> parts = absl::StrSplit(value, ' ');
  ZS_RETURN_IF_ERROR(CheckSize(parts[0], 0, size));
  const std::string id = parts.size() == 2 ? absl::HexStringToBytes(parts[1]) : "";
  if (id.size() == kNcclIdBytes) return id;
  return absl::FailedPreconditionError(
      absl::StrCat("the NCCL id of rank 0 (rendezvous key \"", Key(0), "\") has ", id.size(),
                   " bytes, expected ", kNcclIdBytes, "; do all workers run the same build?"));
}

absl::StatusOr<std::string> ExchangeId(NcclApi* api, const CommunicatorOptions& options,
                                       Rendezvous* rendezvous) {
  std::string id;
  std::string value = absl::StrCat(options.size);
  if (options.rank == 0) {
    const NcclResult result = api->MakeUniqueId(&id);
    if (result != NcclResult::kSuccess) return NcclError(api, result, nullptr, "ncclGetUniqueId");
    absl::StrAppend(&value, " ", absl::BytesToHexString(id));
  }
  ZS_RETURN_IF_ERROR(rendezvous->Put(Key(options.rank), value));
  if (options.rank == 0) return id;
  absl::StatusOr<std::string> got = rendezvous->Get(Key(0), options.connect_timeout);
  if (Cancelled(options)) return CancelledError();
  if (absl::IsDeadlineExceeded(got.status())) {
    return Prefixed("rank 0, whose NCCL id all others need, did not come", got.status());
  }
  if (!got.ok()) return got.status();
  return ParseId(*got, options.size);
}

// Until all ranks have met. Does not end `comm`.
absl::Status AwaitPeers(NcclApi* api, NcclComm* comm, const CommunicatorOptions& options,
                        absl::Time deadline) {
  for (Backoff backoff;;) {
    NcclResult state = NcclResult::kInProgress;
    const NcclResult asked = api->AsyncError(comm, &state);
    if (asked != NcclResult::kSuccess && asked != NcclResult::kInProgress) state = asked;
    if (state == NcclResult::kSuccess) return absl::OkStatus();
    if (state != NcclResult::kInProgress) {
      return NcclError(api, state, comm, "connecting to the other ranks");
    }
    if (Cancelled(options)) return CancelledError();
    if (absl::Now() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat(
          "NCCL did not connect all ranks within ", absl::FormatDuration(options.connect_timeout)));
    }
    absl::SleepFor(backoff.Next());
  }
}

// Adds who is missing to an error: NCCL itself does not tell.
absl::Status NameMissing(const absl::Status& status, const CommunicatorOptions& options,
                         Rendezvous* rendezvous) {
  std::vector<std::string> missing;
  for (int peer = 0; peer < options.size && missing.size() < kMostNamed; ++peer) {
    if (peer == options.rank) continue;
    const absl::StatusOr<std::string> there = rendezvous->Get(Key(peer), kProbe);
    if (absl::IsDeadlineExceeded(there.status())) {
      missing.push_back(absl::StrCat(peer, " (rendezvous key \"", Key(peer), "\")"));
    } else if (!there.ok()) {
      return status;
    } else if (peer != 0) {
      ZS_RETURN_IF_ERROR(CheckSize(*there, peer, options.size));
    }
  }
  const std::string who =
      missing.empty()
          ? "all ranks published their keys, so one of them has died since or cannot be reached"
          : absl::StrCat("did not come: rank ", absl::StrJoin(missing, ", rank "),
                         missing.size() == kMostNamed ? " and maybe more" : "");
  return absl::Status(status.code(), absl::StrCat(status.message(), "; ", who));
}

absl::StatusOr<NcclComm*> Connect(NcclApi* api, const CommunicatorOptions& options,
                                  const NcclEnding& ending, Rendezvous* rendezvous) {
  const absl::Time deadline = absl::Now() + options.connect_timeout;
  ZS_RETURN_IF_ERROR(CheckVersion(api));
  std::string id;
  ZS_ASSIGN_OR_RETURN(id, ExchangeId(api, options, rendezvous));
  NcclComm* comm = nullptr;
  const NcclResult result = api->InitRank(options.size, id, options.rank, &comm);
  absl::Status status;
  if (result != NcclResult::kSuccess && result != NcclResult::kInProgress) {
    status = NcclError(api, result, comm, "ncclCommInitRankConfig");
  } else {
    status = AwaitPeers(api, comm, options, deadline);
  }
  if (status.ok()) return comm;
  if (comm != nullptr) {
    AbortComm(api, comm, ending, absl::StrCat("rank ", options.rank, " of ", options.size),
              std::string(status.message()));
  }
  if (!absl::IsDeadlineExceeded(status) && !absl::IsUnavailable(status)) return status;
  return NameMissing(status, options, rendezvous);
}

}  // namespace

absl::StatusOr<NcclComm*> ConnectNccl(NcclApi* api, const CommunicatorOptions& options,
                                      const NcclEnding& ending, Rendezvous* rendezvous) {
  absl::StatusOr<NcclComm*> comm = Connect(api, options, ending, rendezvous);
  if (comm.ok()) return comm;
  return Prefixed(
      absl::StrCat("rank ", options.rank, " of ", options.size, " could not join the collectives"),
      comm.status());
}

}  // namespace zeroshard
