#include "common/security/refusals.h"

#include <atomic>
#include <iterator>

namespace zeroshard::security {
namespace {

std::atomic<uint64_t> counts[std::size(kAllRefusals)];

}  // namespace

const char* NameOf(Refusal refusal) {
  switch (refusal) {
    case Refusal::kUnauthenticated:
      return "unauthenticated";
    case Refusal::kRole:
      return "role";
    case Refusal::kFlood:
      return "flood";
    case Refusal::kHandshake:
      return "handshake";
  }
  return "";
}

void CountRefusal(Refusal refusal) {
  counts[static_cast<int>(refusal)].fetch_add(1, std::memory_order_relaxed);
}

uint64_t Refused(Refusal refusal) {
  return counts[static_cast<int>(refusal)].load(std::memory_order_relaxed);
}

}  // namespace zeroshard::security
