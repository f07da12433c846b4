// Which rank an error is about, where a status knows it: a peer that is gone, the rank that
// produced a non-finite value. Carried as a payload, so that it survives layers that pass a status
// on.
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

}  // namespace zeroshard
