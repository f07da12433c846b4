// What StoreHost::Push says of gradients that need only come again: UNAVAILABLE, told from others
// of that code, which a disk or a lost state may give too.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace zeroshard::store {

inline constexpr char kTooEarly[] = "zeroshard/too-early";

inline absl::Status TooEarly(absl::string_view message) {
  absl::Status status = absl::UnavailableError(message);
  status.SetPayload(kTooEarly, absl::Cord());
  return status;
}

inline bool IsTooEarly(const absl::Status& status) {
  return status.GetPayload(kTooEarly).has_value();
}

}  // namespace zeroshard::store
