#include "client/byte_progress.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/render.h"

namespace zeroshard {

void ByteProgress::Set(uint64_t done) {
  done_ = done;
  const absl::Duration now = SystemClock::Get().Now();
  if (!console_->terminal() || now - drawn_ < absl::Milliseconds(100)) return;
  drawn_ = now;
  constexpr int kCells = 30;
  const double share =
      static_cast<double>(done_) / static_cast<double>(std::max({done_, total_, uint64_t{1}}));
  const int full = static_cast<int>(share * kCells);
  const double seconds = std::max(absl::ToDoubleSeconds(now - begun_), 1e-9);
  const double left = seconds * (1 - share) / std::max(share, 1e-9);
  console_->Live(
      absl::StrCat(name_, " [", std::string(full, '#'), std::string(kCells - full, '.'), "] ",
                   absl::StrFormat("%3.0f", share * 100), " %  ",
                   FormatBytes(static_cast<uint64_t>(static_cast<double>(done_) / seconds)), "/s  ",
                   FormatDuration(left), " left"));
}

}  // namespace zeroshard
