// Who is to blame. When one rank fails, most others report a broken collective first; the verdict
// must name the cause. A pure function of what is known when it is asked. Thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "zeroshard/v1/cluster.pb.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard::coordinator {

struct RankEvidence {
  uint32_t rank = 0;
  std::string member;
  std::string host;
  int64_t pid = 0;
  v1::Progress progress;

  struct Exit {
    int code = 0;
    int signal = 0;
  };
  std::optional<Exit> exit;                    // a supervisor saw its process end
  std::optional<std::string> lost;             // why the coordinator gave it up
  std::optional<v1::ReportEndRequest> failed;  // its own report, not completed
  bool names_store = false;                    // that report says that a store of the job is gone
  std::map<uint32_t, std::string> accusers;    // peers that blame it, and what they say
  std::optional<absl::Duration> disconnected;  // how long its stream has been broken
  uint64_t order = 0;                          // when exit, lost or failed came first; 0: never
};

struct Blame {
  uint32_t rank = 0;
  std::string message;  // names rank, member, host, and signal where one is known
  // An error of a rank's own: another process in its place would meet it again. Else a process or
  // a link is gone, or was told to go.
  bool own_error = false;
};

// The strongest evidence wins, the earliest among equals:
//   1. a process that ended
//   2. a rank that was lost, or failed by an error of its own (no broken connection, no deadline),
//   or was told to leave
//   3. a rank whose stream is broken; of several, one blamed by most peers, then one with fewest
//   own accusations
//   4. a rank's own report that a store is gone: its peers lose the rank that ends for it
//   5. a rank blamed by peers, weighed as in 3
//   6. the first rank that reported anything
// `ranks` is not empty.
Blame Attribute(const std::vector<RankEvidence>& ranks);

// "rank 1 (worker-1 on host-b)".
std::string NameOfRank(uint32_t rank, const std::string& member, const std::string& host);

// A rank that stopped because its worker was told to leave blames itself and nobody else.
bool AskedToLeave(const v1::ReportEndRequest& end, uint32_t rank);

// Whether a rank's report of its end is about this store, as store links name them, and not about a
// peer.
bool NamesStore(const v1::ReportEndRequest& end, uint32_t rank, const v1::StoreMap::Store& store);

// Codes with which a rank says that a peer or a link broke, or that it was told to stop.
bool IsNetworkCode(const std::string& code);

}  // namespace zeroshard::coordinator
