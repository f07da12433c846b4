// Answers as text for people and as JSON for programs.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "google/protobuf/message.h"
#include "nlohmann/json.hpp"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard {

// QUEUED, RUNNING, ...
std::string NameOf(v1::JobState state);
bool HasEnded(v1::JobState state);

// Every field under its own name in the schema's order: numbers as numbers (a non-finite one as
// null), states by name, absent sections left out. One line when dumped.
nlohmann::ordered_json ToJson(const google::protobuf::Message& message);

std::string FormatJobs(const v1::ListResponse& jobs);
std::string FormatStatus(const v1::JobStatus& status);
// "1.2 GB in 4 chunks, and 200 MB for gradients, 2 times".
std::string FormatStorePlan(const v1::StorePlan& plan);
std::string FormatNodes(const v1::NodesResponse& nodes);
// `now` is what ages are counted to.
std::string FormatCheckpoints(const v1::CheckpointsResponse& checkpoints, absl::Time now);

// "812.3 kB": decimal units, three digits or so.
std::string FormatBytes(uint64_t bytes);

}  // namespace zeroshard
