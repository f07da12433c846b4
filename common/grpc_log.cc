#include "common/grpc_log.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/security/refusals.h"
#include "grpc/support/log.h"

namespace zeroshard {
namespace {

// What gRPC 1.51 says, at the level of debugging, where a server's connection ends before its
// handshake did (chttp2_server.cc). A server that shuts down says one of the other two there.
constexpr absl::string_view kHandshake = "Handshaking failed: ";
constexpr absl::string_view kShutdown = "OK", kStopped = "Listener stopped serving";

// The same failure, one line earlier and without saying that it was a server's.
constexpr absl::string_view kTwice = "Handshake failed with fatal error";

// A connection that ended before its peer was judged, of which gRPC does not say with whom; whoever
// called or was called says it.
constexpr absl::string_view kCancelled = "cancel_check_peer";

// "UNKNOWN:a {...children:[INTERNAL:b {...}]}" as "UNKNOWN:a: INTERNAL:b".
std::string WithoutDetails(absl::string_view error) {
  constexpr absl::string_view kChildren = "children:[";
  std::string text(error.substr(0, error.find(" {")));
  for (size_t at = error.find(kChildren); at != error.npos; at = error.find(kChildren)) {
    error.remove_prefix(at + kChildren.size());
    absl::StrAppend(&text, ": ", error.substr(0, error.find(" {")));
  }
  return text;
}

bool Asked() {
  const auto set = [](const char* name) {
    const char* const value = std::getenv(name);
    return value != nullptr && *value != '\0';
  };
  return set("GRPC_VERBOSITY") || set("GRPC_TRACE");
}

// What the environment asks for; else errors.
gpr_log_severity Least() {
  const char* const value = std::getenv("GRPC_VERBOSITY");
  const std::string text = value == nullptr ? "" : value;
  if (absl::EqualsIgnoreCase(text, "DEBUG")) return GPR_LOG_SEVERITY_DEBUG;
  if (absl::EqualsIgnoreCase(text, "INFO")) return GPR_LOG_SEVERITY_INFO;
  return GPR_LOG_SEVERITY_ERROR;
}

struct Bound {
  std::mutex mutex;
  LineBudget lines{10, 0.2};
  LineBudget handshakes{10, 0.2};
};

Bound& TheBound() {
  static auto* const bound = new Bound;  // gRPC's threads may outlive statics
  return *bound;
}

void WriteBounded(LineBudget* budget, absl::string_view text) {
  uint64_t left_out = 0;
  {
    std::lock_guard<std::mutex> lock(TheBound().mutex);
    if (!budget->Take(SystemClock::Get().Now(), &left_out)) return;
  }
  LogWarning(text, left_out == 0 ? "" : absl::StrCat(" (and ", left_out, " such lines before it)"));
}

void OnLine(gpr_log_func_args* line) {
  static const bool asked = Asked();
  static const gpr_log_severity least = Least();
  const absl::string_view text = line->message;
  absl::string_view reason = text;
  if (absl::ConsumePrefix(&reason, kHandshake) && reason != kShutdown &&
      !absl::StrContains(reason, kStopped)) {
    security::CountRefusal(security::Refusal::kHandshake);
    WriteBounded(
        &TheBound().handshakes,
        absl::StrCat("refused a connection whose handshake failed: ", WithoutDetails(reason)));
  }
  if (line->severity < least) return;
  if (asked) {
    LogInfo("gRPC: ", line->file, ":", line->line, ": ", text);
  } else if (!absl::StartsWith(text, kTwice) && !absl::StrContains(text, kCancelled)) {
    WriteBounded(&TheBound().lines, absl::StrCat("gRPC: ", WithoutDetails(text)));
  }
}

}  // namespace

bool LineBudget::Take(absl::Duration now, uint64_t* left_out) {
  const double passed = absl::ToDoubleSeconds(now - refilled_);
  left_ = std::min(burst_, left_ + passed * per_second_);
  refilled_ = now;
  if (left_ < 1) {
    ++left_out_;
    return false;
  }
  left_ -= 1;
  *left_out = std::exchange(left_out_, 0);
  return true;
}

void GuardGrpcLog() {
  static std::once_flag once;
  std::call_once(once, [] {
    gpr_set_log_function(OnLine);
    gpr_set_log_verbosity(GPR_LOG_SEVERITY_DEBUG);
  });
}

void SilenceGrpcLog() {
  if (Asked()) return;
  gpr_set_log_function([](gpr_log_func_args*) {});
}

}  // namespace zeroshard
