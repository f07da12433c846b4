// Answers as text for people and as JSON for programs.
#pragma once

#include <map>
#include <string>
#include <vector>

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
// One line of ASCII: every other character escaped, so that it means the same to a program and
// nothing to a terminal; what is no UTF-8 becomes U+FFFD.
std::string JsonLine(const nlohmann::ordered_json& json);

// "demo-1 FAILED: why", the reason Shown.
std::string FormatState(const v1::JobStatus& status);

std::string FormatJobs(const v1::ListResponse& jobs);
std::string FormatStatus(const v1::JobStatus& status);
// What ranks are planned to hold and to move in a step, a line a rank; where `measured` (by rank)
// knows the rank, a line below with what it said of itself, and by how much it differs where it
// does; "-", with a line that says why, for the traffic of one that no step was counted of yet.
std::string FormatShardPlans(const std::vector<v1::ShardPlan>& plans,
                             const std::map<uint32_t, v1::RankUsage>& measured);
// Columns as wide as their widest cell, the last one ragged. Cells are Shown: the last of a row up
// to kMostReason bytes, others up to kMostCell.
std::string FormatTable(const std::vector<std::vector<std::string>>& rows);
// "1.2 GB in 4 chunks, and 200 MB for gradients, 2 times".
std::string FormatStorePlan(const v1::StorePlan& plan);
std::string FormatNodes(const v1::NodesResponse& nodes);
// `now` is what ages are counted to.
std::string FormatCheckpoints(const v1::CheckpointsResponse& checkpoints, absl::Time now);

// "812.3 kB": decimal units, three digits or so.
std::string FormatBytes(uint64_t bytes);

}  // namespace zeroshard
