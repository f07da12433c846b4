#include "client/progress.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/render.h"

namespace zeroshard {
namespace {

constexpr size_t kRecentSteps = 20;
constexpr absl::Duration kPlainInterval = absl::Seconds(5);

}  // namespace

void ProgressMeter::Add(const v1::StepRecord& record) {
  ++steps_seen_;
  tokens_ += static_cast<double>(record.tokens());
  seconds_ += record.seconds();
  recent_.push_back(record);
  if (recent_.size() > kRecentSteps) recent_.pop_front();
}

double ProgressMeter::TokensPerSecond() const { return seconds_ > 0 ? tokens_ / seconds_ : 0; }

double ProgressMeter::RecentTokensPerSecond() const {
  double tokens = 0;
  double seconds = 0;
  for (const v1::StepRecord& record : recent_) {
    tokens += static_cast<double>(record.tokens());
    seconds += record.seconds();
  }
  return seconds > 0 ? tokens / seconds : 0;
}

double ProgressMeter::SecondsPerStep() const {
  double seconds = 0;
  for (const v1::StepRecord& record : recent_) seconds += record.seconds();
  return recent_.empty() ? 0 : seconds / static_cast<double>(recent_.size());
}

std::string FormatProgress(const v1::JobStatus& status, const v1::StepRecord& last,
                           const ProgressMeter& meter) {
  std::string text = absl::StrCat("step ", last.step(), "/", status.steps());
  absl::StrAppendFormat(&text, "  loss %.4f", last.loss());
  absl::StrAppend(&text, "  ", FormatCount(meter.RecentTokensPerSecond()), " tokens/s");
  if (last.step() < status.steps()) {
    absl::StrAppend(
        &text, "  ",
        FormatDuration(static_cast<double>(status.steps() - last.step()) * meter.SecondsPerStep()),
        " left");
  }
  return text;
}

void ProgressView::ShowState(const v1::JobStatus& status) {
  const std::string state = absl::StrCat(status.run_id(), " ", NameOf(status.state()),
                                         status.reason().empty() ? "" : ": ", status.reason());
  if (state == shown_state_) return;
  shown_state_ = state;
  console_->Print(state);
}

void ProgressView::Update(const v1::WatchUpdate& update) {
  if (away_) console_->Print("the coordinator answers again");
  away_ = false;
  const v1::JobStatus& status = update.status();
  const bool ended = HasEnded(status.state());
  if (!ended) ShowState(status);
  if (!update.records().empty()) last_ = *update.records().rbegin();
  if (last_.step() != 0) {
    console_->Live(FormatProgress(status, last_, *meter_));
    const absl::Duration now = clock_->Now();
    const bool due = !printed_any_ || now - printed_at_ >= kPlainInterval || ended;
    if (!console_->terminal() && due && last_.step() != printed_step_) {
      console_->Print(FormatProgress(status, last_, *meter_));
      printed_any_ = true;
      printed_at_ = now;
      printed_step_ = last_.step();
    }
  }
}

void ProgressView::Away(const std::string& reason) {
  if (!away_) console_->Print(absl::StrCat("the coordinator is away, trying again: ", reason));
  away_ = true;
}

}  // namespace zeroshard
