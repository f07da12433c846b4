// A headless Chromium that looks at a page: driven over a pipe by its own protocol (DevTools), so
// that a test can measure, click and take pictures. Debian's package `chromium`.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace zeroshard {

// Not thread-safe. Every wait ends within `patience`.
class Browser {
 public:
  static bool Installed();
  // UNAVAILABLE: it does not start.
  static absl::StatusOr<std::unique_ptr<Browser>> Start(
      std::chrono::seconds patience = std::chrono::seconds(60));
  ~Browser();

  // CSS pixels. Takes effect on the page that is open, too.
  absl::Status Resize(int width, int height);
  absl::Status SetDark(bool dark);
  absl::Status Open(const std::string& url);
  // The value of a JavaScript expression. INVALID_ARGUMENT: it threw.
  absl::StatusOr<nlohmann::json> Evaluate(const std::string& expression);
  // Until it is true. DEADLINE_EXCEEDED.
  absl::Status WaitFor(const std::string& expression);
  absl::Status Press(const std::string& key);  // "ArrowLeft"
  // The whole page as a PNG.
  absl::Status Screenshot(const std::string& path);

  // Uncaught errors, console errors, refusals by the page's own policy, and dialogs, since Start.
  // What failed to load (a coordinator that is gone) does not count.
  const std::vector<std::string>& complaints() const { return complaints_; }

 private:
  using Clock = std::chrono::steady_clock;

  explicit Browser(std::chrono::seconds patience) : patience_(patience) {}
  absl::Status Launch();
  absl::StatusOr<nlohmann::json> Call(const std::string& method, const nlohmann::json& parameters);
  absl::StatusOr<nlohmann::json> NextMessage(Clock::time_point end);
  void Note(const nlohmann::json& event);

  const std::chrono::seconds patience_;
  pid_t pid_ = 0;
  int to_ = -1, from_ = -1;
  int next_id_ = 1;
  std::string profile_, session_, received_;
  std::vector<std::string> complaints_;
};

}  // namespace zeroshard
