// How the coordinator words names, ages and lists, so that every message reads alike.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "zeroshard/v1/cluster.pb.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard::coordinator {

inline constexpr char kNameRule[] =
    "1 to 63 letters, digits, '.', '_' or '-' that begin with a letter or digit";

// Whether `name` keeps kNameRule: safe as a folder, a label and a part of a run id.
bool IsName(absl::string_view name);

// In quotes, control characters escaped, cut to 80 bytes.
std::string Quoted(absl::string_view text);

// At most `most` bytes of UTF-8 text; what is longer ends with "..." and in a whole character.
std::string CutText(absl::string_view text, size_t most);

// "0.4 s", "2 min 5 s"; not negative.
std::string Age(absl::Duration age);

// "step 12, backward"; "no progress yet".
std::string Describe(const v1::Progress& progress);

// "SIGKILL"; "signal 77".
std::string SignalName(int signal);

// "RUNNING".
std::string NameOfState(v1::JobState state);
bool IsEnded(v1::JobState state);

// Why a job cannot be submitted: ALREADY_EXISTS.
absl::Status NameIsTaken(absl::string_view name, v1::JobState state, absl::string_view run_id);

// The first three and how many more: "a; b; c; and 4 more".
std::string AtMostThree(const std::vector<std::string>& items);

}  // namespace zeroshard::coordinator
