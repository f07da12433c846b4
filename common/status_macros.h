// Early return of an absl::Status.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define ZS_RETURN_IF_ERROR(expression)     \
  do {                                     \
    absl::Status zs_status = (expression); \
    if (!zs_status.ok()) return zs_status; \
  } while (false)

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)
#define ZS_ASSIGN_OR_RETURN(target, expression) \
  ZS_ASSIGN_OR_RETURN_IMPL(ZS_CONCAT(zs_result_, __LINE__), target, expression)
#define ZS_ASSIGN_OR_RETURN_IMPL(result, target, expression) \
  auto result = (expression);                                \
  if (!result.ok()) return result.status();                  \
  target = *std::move(result)
