// Who is there: names, incarnations, sessions, and who was heard of when. Decides about Hello; what
// a loss means for a job is the core's business. Not thread-safe.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/core/durable_log.h"
#include "coordinator/core/events.h"
#include "coordinator/core/options.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard::coordinator {

// The run and generation that a member was given, until it says that it is idle again.
struct Assignment {
  std::string run_id;
  uint64_t generation = 0;
  uint32_t rank = 0;
};

struct Member {
  v1::Hello hello;
  SessionId session = 0;           // 0: its stream is broken
  absl::Duration last_heard;       // liveness
  absl::Duration disconnected_at;  // when session is 0
  bool lost = false;               // kept only to be shown
  std::string lost_reason;
  int64_t since_unix_ms = 0;  // that it is registered, or lost: to be shown
  bool says_running = false;  // what its last message said
  bool leaving = false;       // a store that was asked to leave
  std::optional<Assignment> assignment;
  std::optional<absl::Duration> stop_deadline;  // the assignment is over; when it must be idle
};

// "worker-2" before "worker-10": runs of digits compare as numbers.
struct NaturalLess {
  bool operator()(const std::string& a, const std::string& b) const;
};

class Membership {
 public:
  // Whether a Hello is accepted, and what it displaces.
  struct Verdict {
    enum Kind { kNew, kReturned, kRefused, kFenced } kind = kRefused;
    std::string reason;                   // why refused
    SessionId stale_session = 0;          // an older stream of the same incarnation: close it
    std::optional<std::string> replaces;  // this name's old process is lost now, because `reason`
  };

  Membership(const CoreOptions& options, std::map<std::string, FenceRecord> fences)
      : options_(options), fences_(std::move(fences)) {}

  // Judges only; the caller declares `replaces` lost and then calls Admit.
  Verdict Judge(const v1::Hello& hello, absl::Duration now) const;
  Member& Admit(SessionId session, const v1::Hello& hello, absl::Duration now);

  // nullptr: no such member, or it is lost.
  Member* Find(const std::string& name);
  const Member* Find(const std::string& name) const;
  Member* FindBySession(SessionId session);

  void Disconnect(Member& member, absl::Duration now);
  // The member is lost: its incarnation is fenced for ever, its name is free.
  FenceRecord Fence(Member& member, const std::string& reason, const Moment& moment);
  // The same for a process that a coordinator knows from its log only.
  FenceRecord FenceAbsent(const std::string& incarnation, const std::string& name,
                          const std::string& reason, const Moment& moment);
  // Goodbye, or an exit: the name is free, nothing to show.
  void Remove(const std::string& name);
  // Lost entries that were shown long enough.
  void Prune(absl::Duration now);

  const std::map<std::string, Member, NaturalLess>& all() const { return members_; }
  std::map<std::string, Member, NaturalLess>& all() { return members_; }
  const std::map<std::string, FenceRecord>& fences() const { return fences_; }

 private:
  const CoreOptions& options_;
  std::map<std::string, Member, NaturalLess> members_;
  std::unordered_map<SessionId, std::string> sessions_;
  std::map<std::string, FenceRecord> fences_;
};

}  // namespace zeroshard::coordinator
