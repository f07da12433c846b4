#include "common/member/member_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/member/backoff.h"
#include "common/member/channel.h"
#include "common/random_id.h"
#include "common/security/tls_probe.h"

namespace zeroshard {
namespace {

using Steady = std::chrono::steady_clock;

// While the transport does not take more than this, heartbeats and lines do not pile up: the next
// heartbeat says more, and lines wait in their own queue.
constexpr size_t kMostPending = 2;
// Heartbeats that the coordinator may leave unanswered before it counts as away.
constexpr int kMostSilentBeats = 3;
// Below this a third of the silence is no time for an answer.
constexpr absl::Duration kLeastShare = absl::Milliseconds(500);
// What finding out why nobody answers may take.
constexpr absl::Duration kProbe = absl::Seconds(1);

absl::Duration Since(Steady::time_point then) { return absl::FromChrono(Steady::now() - then); }

// What the coordinator asks for, within bounds that keep a wrong value from hurting.
absl::Duration Bounded(uint32_t milliseconds, absl::Duration fallback) {
  if (milliseconds == 0) return fallback;
  return std::clamp(absl::Milliseconds(milliseconds), absl::Milliseconds(5), absl::Minutes(10));
}

}  // namespace

MemberSession::MemberSession(MemberSessionOptions options, MemberHandler* handler)
    : options_(std::move(options)),
      handler_(handler),
      stub_(v1::Cluster::NewStub(MakeMemberChannel(options_.coordinator))),
      incarnation_(RandomId()),
      last_error_(absl::UnavailableError("not connected yet")),
      thread_([this] { Main(); }) {}

MemberSession::~MemberSession() { Leave("", absl::ZeroDuration()); }

absl::Status MemberSession::WaitWelcome(absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto wait = absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24 * 365)));
  if (welcomed_changed_.wait_for(lock, wait, [this] { return ever_welcomed_; })) {
    return absl::OkStatus();
  }
  if (absl::IsFailedPrecondition(last_error_)) {
    return absl::FailedPreconditionError(
        absl::StrCat("at ", options_.coordinator, " ", last_error_.message()));
  }
  const std::string text = absl::StrCat("no coordinator at ", options_.coordinator,
                                        " has accepted this member yet: ", last_error_.message());
  if (absl::IsUnauthenticated(last_error_)) return absl::UnauthenticatedError(text);
  return absl::DeadlineExceededError(text);
}

void MemberSession::Leave(const std::string& reason, absl::Duration timeout) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    goodbye_ = reason;
    goodbye_timeout_ = timeout;
  }
  leaving_ = true;
  wakeup_->Notify();
  if (thread_.joinable()) thread_.join();
}

std::string MemberSession::incarnation() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return incarnation_;
}

bool MemberSession::connected() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return welcomed_;
}

void MemberSession::Poke() {
  poked_ = true;
  wakeup_->Notify();
}

void MemberSession::SendReport(const v1::StoreReport& report) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [at, added] = reports_.insert_or_assign(report.run_id(), report);
    if (added) report_order_.push_back(report.run_id());
  }
  wakeup_->Notify();
}

void MemberSession::SendNextReport(const std::shared_ptr<SessionStream>& stream) {
  v1::MemberMessage message;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (report_order_.empty()) return;
    const auto at = reports_.find(report_order_.front());
    *message.mutable_store() = std::move(at->second);
    reports_.erase(at);
    report_order_.pop_front();
  }
  stream->Send(std::move(message));
}

void MemberSession::Main() {
  Backoff backoff(options_.first_backoff, options_.most_backoff, RandomSeed());
  Steady::time_point complained = Steady::now() - std::chrono::hours(1);
  std::string last_complaint;
  while (!leaving_) {
    ServeStream();
    if (leaving_) return;

    bool fenced = false, was_welcomed = false;
    std::string complaint;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      was_welcomed = std::exchange(welcomed_, false);
      presence_->Lost();
      fenced = std::exchange(fenced_, false);
      complaint = std::string(last_error_.message());
    }
    if (was_welcomed) {
      backoff.Reset();
      complained = Steady::now() - std::chrono::hours(1);
    }
    if (Since(complained) >= options_.complain_every || complaint != last_complaint) {
      LogWarning("coordinator at ", options_.coordinator, ": ", complaint, "; trying again");
      complained = Steady::now();
      last_complaint = complaint;
    }
    if (fenced) {
      handler_->OnFenced(complaint);
      v1::Fence fence;
      v1::Progress progress;
      while (!leaving_ && handler_->Running(&fence, &progress)) {
        wakeup_->WaitFor(absl::Seconds(1));
      }
      std::lock_guard<std::mutex> lock(mutex_);
      incarnation_ = RandomId();
      reports_.clear();  // the words of another
      report_order_.clear();
    }
    absl::Duration most;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      most = ShareOfSilence();
    }
    WaitWhileAway(std::min(backoff.Next(), most));
  }
}

absl::Duration MemberSession::ShareOfSilence() const {
  return ever_welcomed_ ? std::max(silence_ / 3, kLeastShare) : absl::InfiniteDuration();
}

void MemberSession::WaitWhileAway(absl::Duration pause) {
  const auto start = Steady::now();
  for (absl::Duration left = pause; left > absl::ZeroDuration() && !leaving_;
       left = pause - Since(start)) {
    wakeup_->WaitFor(left);
  }
}

void MemberSession::ServeStream() {
  v1::MemberMessage hello = Hello();
  std::shared_ptr<SessionStream> stream =
      SessionStream::Open(stub_.get(), std::move(hello), wakeup_,
                          [this](const v1::CoordinatorMessage& message) { Receive(message); });
  {
    std::lock_guard<std::mutex> lock(mutex_);
    heard_ = Steady::now();
  }
  BeatUntilEnded(stream);
  const absl::Status ended = Explain(stream->status());
  std::lock_guard<std::mutex> lock(mutex_);
  if (refused_) {
    last_error_ = absl::FailedPreconditionError(
        absl::StrCat("the coordinator refused this member: ", refusal_));
  } else {
    last_error_ =
        ended.ok() ? absl::UnavailableError("the coordinator closed the connection") : ended;
  }
  refused_ = false;
}

absl::Status MemberSession::Explain(const absl::Status& ended) {
  if (leaving_ || !(absl::IsUnavailable(ended) || absl::IsDeadlineExceeded(ended))) return ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (welcomed_ || refused_) return ended;
  }
  if (explained_ != ended.message() || Since(explained_at_) >= options_.complain_every) {
    explanation_ = security::TlsTrouble(*security::ProcessSecurity(), options_.coordinator,
                                        security::Role::kCoordinator, kProbe);
    explained_ = std::string(ended.message());
    explained_at_ = Steady::now();
  }
  return explanation_.empty() ? ended : absl::UnauthenticatedError(explanation_);
}

void MemberSession::BeatUntilEnded(const std::shared_ptr<SessionStream>& stream) {
  const auto opened = Steady::now();
  auto next_beat = opened;
  while (!stream->Ended()) {
    if (leaving_) {
      SayGoodbye(stream);
      return;
    }
    bool welcomed, refused;
    absl::Duration interval, silence, quiet, patience;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      welcomed = welcomed_;
      refused = refused_;
      interval = interval_;
      silence = silence_;
      quiet = Since(heard_);
      patience = std::min(options_.welcome_timeout, ShareOfSilence());
    }
    if (refused) {
      stream->Cancel(absl::FailedPreconditionError("refused"));
    } else if (!welcomed && Since(opened) >= patience) {
      stream->Cancel(absl::DeadlineExceededError(
          absl::StrCat("no answer within ", absl::FormatDuration(patience))));
    } else if (welcomed && quiet >= silence) {
      stream->Cancel(absl::DeadlineExceededError(
          absl::StrCat("nothing heard for ", absl::FormatDuration(quiet))));
    }
    if (welcomed && (Steady::now() >= next_beat || poked_.exchange(false))) {
      if (stream->Pending() < kMostPending) stream->Send(Beat());
      next_beat = Steady::now() + absl::ToChronoNanoseconds(interval);
    }
    // One at a time: a heartbeat always finds its place.
    if (welcomed && stream->Pending() == 0) SendNextReport(stream);
    if (welcomed && stream->Pending() < kMostPending) {
      if (auto lines = log_queue_->Take(); lines.has_value()) {
        v1::MemberMessage message;
        *message.mutable_log() = *std::move(lines);
        stream->Send(std::move(message));
      }
    }
    const absl::Duration tick = absl::FromChrono(next_beat - Steady::now());
    const absl::Duration next = welcomed ? tick : patience - Since(opened);
    wakeup_->WaitFor(std::clamp(next, absl::Milliseconds(1), absl::Milliseconds(200)));
  }
}

void MemberSession::SayGoodbye(const std::shared_ptr<SessionStream>& stream) {
  std::string reason;
  absl::Duration timeout;
  bool welcomed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    reason = goodbye_;
    timeout = goodbye_timeout_;
    welcomed = welcomed_;
  }
  const auto start = Steady::now();
  if (welcomed && timeout > absl::ZeroDuration()) {
    while (auto lines = log_queue_->Take()) {
      v1::MemberMessage message;
      *message.mutable_log() = *std::move(lines);
      stream->Send(std::move(message));
    }
    v1::MemberMessage goodbye;
    goodbye.mutable_goodbye()->set_reason(reason);
    stream->Send(std::move(goodbye), /*last=*/true);
    while (!stream->Ended() && Since(start) < timeout) wakeup_->WaitFor(timeout - Since(start));
  }
  stream->Cancel(absl::CancelledError("leaving"));
  while (!stream->Ended()) wakeup_->WaitFor(absl::Seconds(1));
}

void MemberSession::Receive(const v1::CoordinatorMessage& message) {
  bool welcomed = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    heard_ = Steady::now();
    if (message.has_welcome()) {
      const v1::Welcome& welcome = message.welcome();
      if (welcome.cluster_id() == cluster_id_ && welcome.term() < term_) {
        refused_ = true;  // ours to refuse: somebody else has taken over since
        refusal_ = absl::StrCat("its term ", welcome.term(), " is over; term ", term_, " was seen");
      } else {
        cluster_id_ = welcome.cluster_id();
        term_ = welcome.term();
        interval_ = Bounded(welcome.heartbeat_interval_ms(), absl::Seconds(1));
        silence_ = std::max(Bounded(welcome.member_timeout_ms(), absl::Seconds(10)), interval_ * 2);
        welcomed = welcomed_ = true;
        ever_welcomed_ = true;
      }
      welcomed_changed_.notify_all();
    } else if (message.has_refused()) {
      refused_ = true;
      fenced_ = message.refused().fenced();
      refusal_ = message.refused().reason();
    }
    if (welcomed_)
      presence_->Heard(heard_, absl::ToChronoNanoseconds(kMostSilentBeats * interval_));
  }
  if (welcomed) {
    LogInfo("welcomed by the coordinator at ", options_.coordinator, " (cluster ",
            message.welcome().cluster_id(), ", term ", message.welcome().term(), ")");
    handler_->OnWelcome();
  }
  if (message.has_assign()) handler_->OnAssign(message.assign());
  if (message.has_stop()) handler_->OnStop(message.stop());
  if (message.has_store()) handler_->OnStore(message.store());
  wakeup_->Notify();
}

v1::MemberMessage MemberSession::Hello() {
  v1::MemberMessage message;
  v1::Hello* hello = message.mutable_hello();
  *hello = options_.hello;
  hello->set_incarnation(incarnation());
  v1::Fence fence;
  v1::Progress progress;
  if (handler_->Running(&fence, &progress)) *hello->mutable_running() = std::move(fence);
  if (hello->has_running() || !progress.phase().empty()) {
    *hello->mutable_progress() = std::move(progress);
  }
  return message;
}

v1::MemberMessage MemberSession::Beat() {
  v1::MemberMessage message;
  v1::Heartbeat* beat = message.mutable_heartbeat();
  beat->set_sequence(++sequence_);
  v1::Fence fence;
  v1::Progress progress;
  if (handler_->Running(&fence, &progress)) *beat->mutable_running() = std::move(fence);
  if (beat->has_running() || !progress.phase().empty()) {
    *beat->mutable_progress() = std::move(progress);
  }
  return message;
}

}  // namespace zeroshard
