#include "tests/faults/tally.h"

#include <filesystem>
#include <iostream>
#include <numeric>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "tests/cluster/process.h"

namespace zeroshard::cluster {
namespace {

constexpr std::array<const char*, kRoles> kRoleNames = {"worker", "rank 0", "coordinator", "store"};
constexpr std::array<const char*, kMoments> kMomentNames = {
    "while the daemons start", "while the job starts", "in the first step", "later"};

template <typename Names, typename Counts>
std::string Listed(const Names& names, const Counts& counts) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < names.size(); ++i) parts.push_back(absl::StrCat(names[i], " ", counts[i]));
  return absl::StrJoin(parts, ", ");
}

}  // namespace

std::string Words(const std::vector<Kill>& kills) {
  std::vector<std::string> parts;
  for (const Kill& kill : kills) {
    parts.push_back(absl::StrCat(kill.victim, kill.role == Role::kRankZero ? " (rank 0) " : " ",
                                 kill.moment == Moment::kLater
                                     ? absl::StrCat("after ", kill.steps, " steps")
                                     : kMomentNames[static_cast<size_t>(kill.moment)],
                                 absl::StrFormat(" at %.1f s", kill.seconds)));
  }
  return absl::StrCat("killed ", parts.empty() ? "nothing" : absl::StrJoin(parts, ", "));
}

pid_t ParentOf(pid_t pid) {
  const std::string stat = ReadText(absl::StrCat("/proc/", pid, "/stat"));
  // The name before it, in parentheses, may hold any of these characters.
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return 0;
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(name_end + 1), ' ', absl::SkipEmpty());
  int parent = 0;
  return fields.size() > 1 && absl::SimpleAtoi(fields[1], &parent) ? parent : 0;
}

Tally::Tally(const std::string& kind) : kind_(kind) {
  const std::filesystem::path folder(ZEROSHARD_FAULT_SUMMARIES);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  file_.open(folder / absl::StrCat(kind, ".txt"));
  EXPECT_TRUE(file_) << "cannot write " << folder / absl::StrCat(kind, ".txt");
}

void Tally::Print(const std::string& line) {
  std::cout << kind_ << ": " << line << std::endl;
  file_ << kind_ << ": " << line << std::endl;
}

void Tally::Add(uint64_t seed, const std::vector<Kill>& kills, double seconds, bool same) {
  ++runs_;
  for (const Kill& kill : kills) {
    ++roles_[static_cast<size_t>(kill.role)];
    ++moments_[static_cast<size_t>(kill.moment)];
  }
  Print(absl::StrFormat("seed %d: %s; %s after %.1f s", seed, Words(kills),
                        same ? "completed, the same" : "FAILED", seconds));
}

void Tally::End() { Print(Summary()); }

std::string Tally::Summary() const {
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun_;
  return absl::StrFormat("%d runs, %d kills (%s; %s) in %.0f s", runs_,
                         std::accumulate(roles_.begin(), roles_.end(), uint64_t{0}),
                         Listed(kRoleNames, roles_), Listed(kMomentNames, moments_), took.count());
}

std::vector<std::string> Tally::Missing() const {
  std::vector<std::string> missing;
  for (size_t i = 0; i < roles_.size(); ++i) {
    if (roles_[i] == 0) missing.push_back(kRoleNames[i]);
  }
  for (size_t i = 0; i < moments_.size(); ++i) {
    if (moments_[i] == 0) missing.push_back(kMomentNames[i]);
  }
  return missing;
}

}  // namespace zeroshard::cluster
