#include "coordinator/core/text.h"

#include <string.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace zeroshard::coordinator {

bool IsName(absl::string_view name) {
  if (name.empty() || name.size() > 63 || !absl::ascii_isalnum(name.front())) return false;
  return std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
  });
}

std::string Quoted(absl::string_view text) {
  const bool cut = text.size() > 80;
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, 80)), cut ? "..." : "", "\"");
}

std::string CutText(absl::string_view text, size_t most) {
  if (text.size() <= most) return std::string(text);
  size_t end = most < 3 ? 0 : most - 3;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
  return absl::StrCat(text.substr(0, end), "...");
}

std::string Age(absl::Duration age) {
  age = std::max(age, absl::ZeroDuration());
  if (age < absl::Minutes(2)) return absl::StrFormat("%.1f s", absl::ToDoubleSeconds(age));
  const int64_t seconds = absl::ToInt64Seconds(age);
  return absl::StrCat(seconds / 60, " min ", seconds % 60, " s");
}

std::string Describe(const v1::Progress& progress) {
  if (progress.step() == 0 && progress.phase().empty()) return "no progress yet";
  std::string text = absl::StrCat("step ", progress.step());
  if (!progress.phase().empty()) {
    absl::StrAppend(&text, ", ", absl::CHexEscape(progress.phase().substr(0, 80)));
  }
  return text;
}

std::string SignalName(int signal) {
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? absl::StrCat("signal ", signal) : absl::StrCat("SIG", name);
}

std::string NameOfState(v1::JobState state) {
  return std::string(absl::StripPrefix(v1::JobState_Name(state), "JOB_STATE_"));
}

bool IsEnded(v1::JobState state) {
  return state == v1::JOB_STATE_COMPLETED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

absl::Status NameIsTaken(absl::string_view name, v1::JobState state, absl::string_view run_id) {
  return absl::AlreadyExistsError(
      absl::StrCat("job ", name, " is ", NameOfState(state), " (run ", run_id,
                   "). Wait for it, cancel it, or submit under another name"));
}

std::string AtMostThree(const std::vector<std::string>& items) {
  std::string text;
  for (size_t i = 0; i < items.size() && i < 3; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : "; ", items[i]);
  }
  if (items.size() > 3) absl::StrAppend(&text, "; and ", items.size() - 3, " more");
  return text;
}

}  // namespace zeroshard::coordinator
