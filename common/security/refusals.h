// What this process has refused to its peers, for its metrics.
#pragma once

#include <cstdint>

namespace zeroshard::security {

enum class Refusal {
  kUnauthenticated,  // neither a role in the certificate nor a token that is known
  kRole,             // a role that may not call the method, or a name that is not the peer's
  kFlood,            // a connection over the limits of connection_gate.h
  kHandshake,        // a connection on which TLS was not agreed on, or nothing was said in time
};
inline constexpr Refusal kAllRefusals[] = {Refusal::kUnauthenticated, Refusal::kRole,
                                           Refusal::kFlood, Refusal::kHandshake};

const char* NameOf(Refusal refusal);  // the label's value

// Thread-safe; of the whole process.
void CountRefusal(Refusal refusal);
uint64_t Refused(Refusal refusal);

}  // namespace zeroshard::security
