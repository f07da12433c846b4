#include "worker/comm/communicator.h"

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

}  // namespace zeroshard
