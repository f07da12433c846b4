// How ranks find each other: rank 0's unique id goes through the rendezvous, then NCCL connects.
//
// Keys and values, text: "nccl/<rank>" holds the world size in decimal; rank 0's is followed by a
// space and the id in hexadecimal. Keys belong to one generation of one job (whoever gives the
// rendezvous sees to that), so an id of another generation cannot be met there.
#pragma once

#include "absl/status/statusor.h"
#include "worker/comm/communicator.h"
#include "worker/comm/nccl/nccl_api.h"
#include "worker/comm/nccl/nccl_end.h"

namespace zeroshard {

// The least version whose ncclCommAbort may be called while another thread is in a call.
constexpr int kLeastNcclVersion = 21900;

// Within options.connect_timeout, and soon after options.cancelled (ABORTED). options.host is not
// looked at: NCCL chooses its interfaces by NCCL_SOCKET_IFNAME. DEADLINE_EXCEEDED names the keys,
// and as far as they are known the ranks, that did not come; FAILED_PRECONDITION: another world
// size, an NCCL that is too old, a GPU shared by two ranks; UNAVAILABLE: NCCL could not connect;
// ALREADY_EXISTS: two processes claim one rank.
absl::StatusOr<NcclComm*> ConnectNccl(NcclApi* api, const CommunicatorOptions& options,
                                      const NcclEnding& ending, Rendezvous* rendezvous);

}  // namespace zeroshard
