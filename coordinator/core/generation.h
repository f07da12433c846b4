// What the ranks of one generation of a run share through the coordinator: rendezvous keys and
// barriers, and the calls that wait for them. Dies with the generation. Not thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/core/events.h"
#include "coordinator/core/options.h"

namespace zeroshard::coordinator {

class Generation {
 public:
  Generation(const CoreOptions& options, std::string run_id, uint64_t number, uint32_t world);

  uint64_t number() const { return number_; }

  // What a coordinator that started again knows of it.
  void Restore(std::map<std::string, std::string> keys, const std::vector<std::string>& barriers);

  // Answers `request`, and every Get that waited for the key, once the key is on disk.
  // ALREADY_EXISTS: another value is there. INVALID_ARGUMENT, RESOURCE_EXHAUSTED: a limit.
  void Put(RequestId request, const std::string& key, const std::string& value, Decision* out);

  // Answers now or when the key comes, the deadline passes or the generation closes.
  void Get(RequestId request, uint32_t rank, const std::string& key, absl::Duration deadline,
           Decision* out);

  // True when this arrival completed the barrier; `*took` is then the time since its first arrival.
  bool Arrive(RequestId request, uint32_t rank, const std::string& name, absl::Duration now,
              absl::Duration deadline, Decision* out, absl::Duration* took);

  // Ends the waits whose deadline has passed. `describe` words a rank and its last progress.
  void Expire(absl::Duration now, const std::function<std::string(uint32_t)>& describe,
              Decision* out);

  void Drop(RequestId request);

  // Answers everything that waits with `status`.
  void Close(const absl::Status& status, Decision* out);

  // Of the barriers under way, the most ranks that one still waits for; 0: none is.
  size_t MostMissing() const;

  // Which ranks have not come to the barrier, one text each.
  std::vector<std::string> Missing(const std::string& name,
                                   const std::function<std::string(uint32_t)>& describe) const;

 private:
  struct Waiting {
    uint32_t rank = 0;
    absl::Duration deadline;
    std::string key;      // of a Get, or
    std::string barrier;  // of an arrival
  };
  struct Barrier {
    std::set<uint32_t> arrived;
    absl::Duration first_arrival;
  };

  bool TooManyWait(RequestId request, uint32_t rank, Decision* out) const;
  void Remember(const std::string& barrier);

  const CoreOptions& options_;
  const std::string run_id_;
  const uint64_t number_;
  const uint32_t world_;
  std::map<std::string, std::string> keys_;
  size_t key_bytes_ = 0;
  std::map<std::string, Barrier> barriers_;  // incomplete
  std::set<std::string> complete_;
  std::deque<std::string> complete_order_;
  std::map<RequestId, Waiting> waiting_;
};

}  // namespace zeroshard::coordinator
