#include "client/progress.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/render.h"

namespace zeroshard {
namespace {

constexpr size_t kRecentSteps = 20;
constexpr absl::Duration kPlainInterval = absl::Seconds(5);

bool SameEvent(const v1::JobEvent& a, const v1::JobEvent& b) {
  return a.unix_ms() == b.unix_ms() && a.state() == b.state() && a.reason() == b.reason();
}

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
                           std::optional<double> eval, const ProgressMeter& meter) {
  std::string text = absl::StrCat("step ", last.step(), "/", status.steps());
  absl::StrAppendFormat(&text, "  loss %.4f", last.loss());
  if (eval) absl::StrAppendFormat(&text, "  eval %.4f", *eval);
  absl::StrAppend(&text, "  ", FormatCount(meter.RecentTokensPerSecond()), " tokens/s");
  if (last.step() < status.steps()) {
    absl::StrAppend(
        &text, "  ",
        FormatDuration(static_cast<double>(status.steps() - last.step()) * meter.SecondsPerStep()),
        " left");
  }
  if (status.steps_lost() != 0) {
    absl::StrAppend(&text, "  ", status.steps_lost(), status.steps_lost() == 1 ? " step" : " steps",
                    " lost");
  }
  return text;
}

void ProgressView::ShowState(const v1::JobStatus& status) {
  const std::string state = FormatState(status);
  if (state == shown_state_) return;
  shown_state_ = state;
  console_->Print(state);
}

void ProgressView::Update(const v1::WatchUpdate& update) {
  if (away_) console_->Print("the coordinator answers again");
  away_ = false;
  const v1::JobStatus& status = update.status();
  ShowEvents(status);
  if (!HasEnded(status.state())) ShowState(status);
  for (const v1::StepRecord& record : update.records()) {
    last_ = record;
    if (record.has_eval_loss()) eval_ = record.eval_loss();
  }
  if (last_.step() != 0) ShowSteps(status);
  for (const v1::SampleRecord& sample : update.samples()) {
    console_->Print(absl::StrCat("step ", sample.step(), ": ",
                                 Shown(sample.prompt() + sample.text(), kMostMessage)));
  }
}

// What happened without a change of state (checkpoints), and states that have passed since the last
// update. Those of before this view are not news. The coordinator forgets old events of a long job,
// so that their number says nothing.
void ProgressView::ShowEvents(const v1::JobStatus& status) {
  const auto& events = status.events();
  if (events.empty()) return;
  int first = 0;
  for (int i = events.size(); i > 0 && first == 0; --i) {
    if (SameEvent(events[i - 1], last_event_)) first = i;
  }
  const bool any_seen = last_event_.unix_ms() != 0;
  for (int i = std::max(1, first); i < events.size(); ++i) {
    const v1::JobEvent& event = events[i];
    // What a submission found is told to whoever comes later too.
    const bool news = any_seen || event.state() == v1::JOB_STATE_QUEUED;
    // A reason that is also the state's is shown with it.
    if (!news || event.reason() == status.reason()) continue;
    if (event.state() == events[i - 1].state()) {
      console_->Print(Shown(event.reason()));
    } else if (i + 1 < events.size()) {
      v1::JobStatus passed;
      passed.set_run_id(status.run_id());
      passed.set_state(event.state());
      passed.set_reason(event.reason());
      ShowState(passed);
    }
  }
  last_event_ = *events.rbegin();
}

void ProgressView::ShowSteps(const v1::JobStatus& status) {
  const std::string line = FormatProgress(status, last_, eval_, *meter_);
  console_->Live(line);
  const absl::Duration now = clock_->Now();
  const bool due = !printed_any_ || now - printed_at_ >= kPlainInterval || HasEnded(status.state());
  if (console_->terminal() || !due || last_.step() == printed_step_) return;
  console_->Print(line);
  printed_any_ = true;
  printed_at_ = now;
  printed_step_ = last_.step();
}

void ProgressView::Away(const std::string& reason) {
  if (!away_)
    console_->Print(absl::StrCat("the coordinator is away, trying again: ", Shown(reason)));
  away_ = true;
}

}  // namespace zeroshard
