#include "worker/comm/communicator.h"

#include <algorithm>
#include <utility>

namespace zeroshard {

const char* NameOf(CollectiveOp op) {
  switch (op) {
    case CollectiveOp::kAllGather:
      return "all_gather";
    case CollectiveOp::kReduceScatter:
      return "reduce_scatter";
    case CollectiveOp::kAllReduce:
      return "all_reduce";
    case CollectiveOp::kBroadcast:
      return "broadcast";
    case CollectiveOp::kSend:
      return "send";
  }
  return "?";
}

const char* NameOf(Phase phase) {
  switch (phase) {
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kStep:
      return "step";
  }
  return "?";
}

std::vector<Event> Communicator::AllGatherTogether(const std::vector<GatherPart>& parts, DType type,
                                                   const CollectiveInfo& info, const Event& after) {
  std::vector<Event> events;
  for (const GatherPart& part : parts)
    events.push_back(AllGather(part.buffer, part.count, type, info, after));
  return events;
}

// Sender, then receiver, is one order of all messages of the ranks: the first that is not done is
// the next one of both its ends, so that it can be.
Event Communicator::Exchange(std::vector<Message> messages, const CollectiveInfo& info,
                             const Event& after) {
  const auto ends = [this](const Message& m) {
    return m.send ? std::pair(rank(), m.peer) : std::pair(m.peer, rank());
  };
  std::stable_sort(messages.begin(), messages.end(),
                   [&](const Message& a, const Message& b) { return ends(a) < ends(b); });
  Event done = after;
  for (const Message& m : messages) {
    CollectiveInfo of = info;
    of.phase = m.phase;
    done = m.send ? Send(m.buffer, m.bytes, m.peer, of, after)
                  : Recv(m.buffer, m.bytes, m.peer, of, after);
  }
  return done;  // operations end in order, and after an error all of them have one
}

}  // namespace zeroshard
