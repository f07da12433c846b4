// What an error is about, where a status knows it: which rank (a peer that is gone, the one that
// produced a non-finite value), and whether a value was not finite. Carried as payloads, so that
// they survive layers that pass a status on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {

inline constexpr char kBlamedRankPayload[] = "zeroshard/blamed_rank";

// No effect on an OK status.
inline void SetBlamedRank(uint32_t rank, absl::Status* status) {
  status->SetPayload(kBlamedRankPayload, absl::Cord(absl::StrCat(rank)));
}

inline std::optional<uint32_t> BlamedRank(const absl::Status& status) {
  const absl::optional<absl::Cord> text = status.GetPayload(kBlamedRankPayload);
  uint32_t rank = 0;
  if (!text.has_value() || !absl::SimpleAtoi(std::string(*text), &rank)) return std::nullopt;
  return rank;
}

inline constexpr char kNonFinitePayload[] = "zeroshard/nonfinite";

// The status is about a loss or a gradient that is not finite. No effect on an OK status.
inline void MarkNonFinite(absl::Status* status) {
  status->SetPayload(kNonFinitePayload, absl::Cord("1"));
}

inline bool IsNonFinite(const absl::Status& status) {
  return status.GetPayload(kNonFinitePayload).has_value();
}

}  // namespace zeroshard
