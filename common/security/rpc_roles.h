// Which role may call which method. What is not in the table nobody may call.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/security/identity.h"

namespace zeroshard::security {

struct RpcRule {
  absl::string_view method;  // /package.Service/Method
  std::vector<Role> roles;   // any of them
};

absl::Span<const RpcRule> RpcRules();

// Null where the table does not have it.
const RpcRule* FindRule(absl::string_view method);

}  // namespace zeroshard::security
