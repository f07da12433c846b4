#include "coordinator/core/attribution.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

std::string Name(const RankEvidence& evidence) {
  return NameOfRank(evidence.rank, evidence.member, evidence.host);
}

std::string Says(const v1::ReportEndRequest& report) {
  return absl::StrCat(report.error_code().empty() ? "UNKNOWN" : report.error_code(), ": ",
                      report.message().empty() ? "no message" : report.message());
}

// Failed by itself, and blames nobody else.
bool OwnFault(const RankEvidence& evidence) {
  if (!evidence.failed) return false;
  if (AskedToLeave(*evidence.failed, evidence.rank)) return true;
  return !IsNetworkCode(evidence.failed->error_code()) &&
         (!evidence.failed->has_blamed_rank() || evidence.failed->blamed_rank() == evidence.rank);
}

std::string ExitText(const RankEvidence& evidence) {
  const RankEvidence::Exit& exit = *evidence.exit;
  std::string text = absl::StrCat(Name(evidence), ": its process");
  if (evidence.pid != 0) absl::StrAppend(&text, " (pid ", evidence.pid, ")");
  if (exit.signal != 0) {
    absl::StrAppend(&text, " was killed by signal ", exit.signal, " (", SignalName(exit.signal),
                    ")");
  } else {
    absl::StrAppend(&text, " ended with exit code ", exit.code);
  }
  return absl::StrCat(text, "; last progress: ", Describe(evidence.progress));
}

// A report of a rank that has an error of its own but names another rank as its place (a non-finite
// value that every rank saw).
const RankEvidence* ReportAgainst(const std::vector<RankEvidence>& ranks, uint32_t blamed) {
  const RankEvidence* first = nullptr;
  for (const RankEvidence& evidence : ranks) {
    if (evidence.failed && !IsNetworkCode(evidence.failed->error_code()) &&
        evidence.failed->has_blamed_rank() && evidence.failed->blamed_rank() == blamed &&
        (first == nullptr || evidence.order < first->order)) {
      first = &evidence;
    }
  }
  return first;
}

}  // namespace

std::string NameOfRank(uint32_t rank, const std::string& member, const std::string& host) {
  return absl::StrCat("rank ", rank, " (", member, " on ", host.empty() ? "an unknown host" : host,
                      ")");
}

bool AskedToLeave(const v1::ReportEndRequest& end, uint32_t rank) {
  return !end.completed() && end.error_code() == "CANCELLED" && end.has_blamed_rank() &&
         end.blamed_rank() == rank;
}

bool NamesStore(const v1::ReportEndRequest& end, uint32_t rank, const v1::StoreMap::Store& store) {
  if (end.completed() || (end.has_blamed_rank() && end.blamed_rank() != rank)) return false;
  return IsNetworkCode(end.error_code()) &&
         absl::StrContains(end.message(),
                           absl::StrCat("store ", store.member(), " at ", store.address()));
}

bool IsNetworkCode(const std::string& code) {
  return code == "UNAVAILABLE" || code == "ABORTED" || code == "CANCELLED" ||
         code == "DEADLINE_EXCEEDED";
}

Blame Attribute(const std::vector<RankEvidence>& ranks) {
  const auto earliest = [&](auto matches) {
    const RankEvidence* first = nullptr;
    for (const RankEvidence& evidence : ranks) {
      if (matches(evidence) && (first == nullptr || evidence.order < first->order)) {
        first = &evidence;
      }
    }
    return first;
  };

  if (const auto* dead = earliest([](const RankEvidence& e) { return e.exit.has_value(); })) {
    return Blame{dead->rank, ExitText(*dead), false};
  }

  const auto* guilty = earliest([&](const RankEvidence& e) {
    return e.lost.has_value() || OwnFault(e) ||
           (e.failed && !IsNetworkCode(e.failed->error_code()) && e.failed->has_blamed_rank() &&
            e.failed->blamed_rank() < ranks.size());
  });
  if (guilty != nullptr) {
    if (guilty->lost) {
      return Blame{guilty->rank,
                   absl::StrCat(Name(*guilty), ": ", *guilty->lost,
                                "; last progress: ", Describe(guilty->progress)),
                   false};
    }
    if (OwnFault(*guilty)) {
      return Blame{guilty->rank, absl::StrCat(Name(*guilty), ": ", Says(*guilty->failed)),
                   !AskedToLeave(*guilty->failed, guilty->rank)};
    }
    const RankEvidence& blamed = ranks[guilty->failed->blamed_rank()];
    if (OwnFault(blamed)) {
      return Blame{blamed.rank, absl::StrCat(Name(blamed), ": ", Says(*blamed.failed)),
                   !AskedToLeave(*blamed.failed, blamed.rank)};
    }
    const RankEvidence* report = ReportAgainst(ranks, blamed.rank);
    return Blame{blamed.rank,
                 absl::StrCat(Name(blamed), ": ", Says(*report->failed), " (reported by rank ",
                              report->rank, ")"),
                 true};
  }

  const RankEvidence* blamed = nullptr;
  const auto weight = [&](const RankEvidence& evidence) {
    size_t accuses = 0;
    for (const RankEvidence& other : ranks) accuses += other.accusers.contains(evidence.rank);
    return std::make_tuple(evidence.disconnected.has_value(), evidence.accusers.size(),
                           ranks.size() - std::min(accuses, ranks.size()));
  };
  for (const RankEvidence& evidence : ranks) {
    if (evidence.accusers.empty() && !evidence.disconnected) continue;
    if (blamed == nullptr || weight(evidence) > weight(*blamed)) blamed = &evidence;
  }
  const auto* without_store =
      earliest([](const RankEvidence& e) { return e.failed && e.names_store; });
  if (without_store != nullptr && (blamed == nullptr || !blamed->disconnected)) {
    return Blame{without_store->rank,
                 absl::StrCat(Name(*without_store), ": ", Says(*without_store->failed)), false};
  }
  if (blamed != nullptr) {
    std::string text = absl::StrCat(Name(*blamed), " stopped answering");
    if (blamed->disconnected) {
      absl::StrAppend(&text, "; its connection to the coordinator broke ",
                      Age(*blamed->disconnected), " ago");
    }
    if (!blamed->accusers.empty()) {
      absl::StrAppend(&text, "; ", blamed->accusers.size() == 1 ? "a peer" : "peers",
                      " lost it: rank ", blamed->accusers.begin()->first, " says ",
                      blamed->accusers.begin()->second);
    }
    return Blame{blamed->rank, absl::StrCat(text, "; last progress: ", Describe(blamed->progress)),
                 false};
  }

  const RankEvidence* first = earliest([](const RankEvidence& e) { return e.failed.has_value(); });
  if (first == nullptr) return Blame{ranks.front().rank, "the job failed without a report", false};
  return Blame{first->rank, absl::StrCat(Name(*first), ": ", Says(*first->failed)),
               !IsNetworkCode(first->failed->error_code())};
}

}  // namespace zeroshard::coordinator
