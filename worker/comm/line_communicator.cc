#include "worker/comm/line_communicator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "worker/comm/arguments.h"

namespace zeroshard {
namespace {

std::string Describe(const MeshLine& line) {
  return absl::StrCat("line ", line.line, " of dimension \"", line.dimension, "\" (ranks ",
                      absl::StrJoin(line.ranks, ", "), ")");
}

class LineRendezvous : public Rendezvous {
 public:
  LineRendezvous(const MeshLine& line, Rendezvous* generation)
      : prefix_(absl::StrCat(line.dimension, "/", line.line, "/")), generation_(*generation) {}

  absl::Status Put(const std::string& key, const std::string& value) override {
    return generation_.Put(prefix_ + key, value);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    return generation_.Get(prefix_ + key, timeout);
  }

 private:
  const std::string prefix_;
  Rendezvous& generation_;
};

// This rank's place in the line.
absl::StatusOr<int> PlaceIn(const MeshLine& line, const CommunicatorOptions& job) {
  const auto refused = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(Describe(line), ": ", why));
  };
  const bool named = !line.dimension.empty() &&
                     std::all_of(line.dimension.begin(), line.dimension.end(), absl::ascii_islower);
  if (!named || line.line < 0) {
    return refused("wanted a dimension of small letters, and a line that counts from 0");
  }
  int place = -1;
  for (size_t i = 0; i < line.ranks.size(); ++i) {
    const int rank = line.ranks[i];
    if (rank < 0 || rank >= job.size) {
      return refused(absl::StrCat("rank ", rank, " is none of the job's ", job.size));
    }
    if (std::count(line.ranks.begin(), line.ranks.end(), rank) > 1) {
      return refused(absl::StrCat("rank ", rank, " is there twice"));
    }
    if (rank == job.rank) place = static_cast<int>(i);
  }
  if (place < 0)
    return refused(absl::StrCat("rank ", job.rank, ", which asks for it, is not in it"));
  return place;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> MakeLineCommunicator(const MeshLine& line,
                                                                   const CommunicatorOptions& job,
                                                                   Rendezvous* rendezvous,
                                                                   Device* device,
                                                                   const CommunicatorMaker& make) {
  const absl::StatusOr<int> place = PlaceIn(line, job);
  if (!place.ok()) return place.status();
  if (line.ranks.size() > 1 && rendezvous == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(Describe(line), ": no rendezvous to meet the other ranks at"));
  }
  CommunicatorOptions options = job;
  options.rank = *place;
  options.size = static_cast<int>(line.ranks.size());
  options.line = absl::StrCat(line.dimension, " line ", line.line, " (ranks ",
                              absl::StrJoin(line.ranks, ", "), " of the job)");
  options.job_ranks = line.ranks;
  absl::StatusOr<std::unique_ptr<Communicator>> made;
  if (rendezvous == nullptr) {
    made = make(options, nullptr, device);
  } else {
    LineRendezvous keys(line, rendezvous);
    made = make(options, &keys, device);
  }
  if (!made.ok()) return Prefixed(Describe(line), made.status());
  return made;
}

}  // namespace zeroshard
