// How waits on the mesh end.
#include <algorithm>
#include <cstring>
#include <exception>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "worker/comm/mesh.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kTick = absl::Milliseconds(20);
constexpr int kIdleTicks = 10;
// The transport closes every connection when one of its own waits expires, which would accuse ranks
// that are well. So the watcher ends waits, and this is only a bound should it not run.
constexpr std::chrono::milliseconds kBackstop = std::chrono::hours(24);
// How long a rank that gives up tries to tell the others.
constexpr std::chrono::milliseconds kFarewellTime(200);
// How long the transport may take to tell all buffers of a connection that it broke.
constexpr std::chrono::milliseconds kSettle(100);

}  // namespace

absl::StatusOr<std::unique_ptr<MessageBuffer>> Mesh::Wrap(void* data, int64_t bytes) {
  if (context_ == nullptr) return absl::UnavailableError("the connections are closed");
  return context_->createUnboundBuffer(data, static_cast<size_t>(bytes));
}

absl::Status Mesh::PostReceive(MessageBuffer& buffer, int peer, uint64_t slot, int64_t offset,
                               int64_t bytes) {
  try {
    buffer.recv(peer, slot, static_cast<size_t>(offset), static_cast<size_t>(bytes));
    return absl::OkStatus();
  } catch (const std::exception&) {
    return LostError(peer);
  }
}

absl::Status Mesh::PostSend(MessageBuffer& buffer, int peer, uint64_t slot, int64_t offset,
                            int64_t bytes) {
  try {
    buffer.send(peer, slot, static_cast<size_t>(offset), static_cast<size_t>(bytes));
    return absl::OkStatus();
  } catch (const std::exception&) {
    return LostError(peer);
  }
}

void Mesh::Begin(absl::Duration timeout) {
  started_ = Clock::now();
  absl::MutexLock lock(&mutex_);
  timeout_ = absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24)));
  deadline_ = started_ + timeout_;
  expired_ = false;  // by an operation that was done just as its time was up
  busy_ = true;
  if (watcher_asleep_) wake_watcher_.Signal();
}

void Mesh::End() {
  absl::MutexLock lock(&mutex_);
  busy_ = false;
}

absl::Status Mesh::AwaitAll(absl::Span<Await> awaits) {
  while (!awaits.empty()) {
    if (awaits.front().completions == 0) {
      awaits.remove_prefix(1);
    } else if (absl::Status status = AwaitNext(awaits); !status.ok()) {
      return status;
    }
  }
  return absl::OkStatus();
}

// Waits once for the first of `rest`. OK does not mean that it completed: the caller looks.
absl::Status Mesh::AwaitNext(absl::Span<Await> rest) {
  Await& next = rest.front();
  bool stopped = false;
  {
    absl::MutexLock lock(&mutex_);
    stopped = expired_ || !interrupt_.ok();
    if (!stopped) {
      lost_peer_ = -1;
      waiting_ = &next;
      awaited_ = rest;
    }
  }
  bool done = false;
  bool broken = false;
  if (!stopped) {
    try {
      done = next.receive ? next.buffer->waitRecv(kBackstop) : next.buffer->waitSend(kBackstop);
    } catch (const std::exception&) {
      broken = true;
    }
  }
  int lost = -1;
  absl::Status interrupted;
  {
    absl::MutexLock lock(&mutex_);
    waiting_ = nullptr;
    awaited_ = {};
    if (done) {
      --next.completions;
      return absl::OkStatus();
    }
    interrupted = interrupt_;
    lost = lost_peer_;
    stopped = expired_;
  }
  if (!interrupted.ok()) {
    SayFarewell(interrupted);
    return interrupted;
  }
  if (broken) return LostError(next.peer);
  if (stopped) return DeadlineError(rest);
  if (lost >= 0) return DrainLost(rest, lost);
  return absl::OkStatus();  // woken on behalf of an earlier wait on this buffer
}

bool Mesh::TakeWithin(Await& await, Clock::duration limit) {
  const auto until = Clock::now() + limit;
  int refusals = 0;  // the first may be on behalf of an earlier wait
  while (refusals < 2) {
    {
      absl::MutexLock lock(&mutex_);
      draining_ = true;
      drain_until_ = until;
      waiting_ = &await;
    }
    bool done = false;
    bool broken = false;
    try {
      done = await.receive ? await.buffer->waitRecv(kBackstop) : await.buffer->waitSend(kBackstop);
    } catch (const std::exception&) {
      broken = true;
    }
    absl::MutexLock lock(&mutex_);
    draining_ = false;
    waiting_ = nullptr;
    if (done) --await.completions;
    if (done || broken) return done;
    ++refusals;
  }
  return false;
}

absl::Status Mesh::DrainLost(absl::Span<Await> rest, int peer) {
  for (Await& await : rest) {
    while (await.peer == peer && await.completions > 0) {
      if (!TakeWithin(await, Clock::duration::zero())) return LostError(peer);
    }
  }
  return absl::OkStatus();
}

absl::Status Mesh::DeadlineError(absl::Span<Await> rest) {
  const double waited = std::chrono::duration<double>(Clock::now() - started_).count();
  blamed_ = rest.front().peer;
  std::set<int> missing{blamed_};
  SayFarewell(
      absl::DeadlineExceededError(absl::StrFormat("waited %.2f s for rank %d", waited, blamed_)));
  // From here on connections may be closed, so each wait may be the transport's own.
  for (Await& await : rest.subspan(1)) {
    try {
      while (await.completions > 0 && missing.count(await.peer) == 0) {
        const std::chrono::milliseconds instant(1);
        if (await.receive ? await.buffer->waitRecv(instant) : await.buffer->waitSend(instant)) {
          --await.completions;
        }
      }
    } catch (const std::exception&) {
      missing.insert(await.peer);
    }
  }
  return absl::DeadlineExceededError(absl::StrFormat(
      "waited %.2f s for %s %s; it is stuck, cut off, or runs other operations", waited,
      missing.size() == 1 ? "rank" : "ranks", absl::StrJoin(missing, ", ")));
}

// Only of a peer whose connection is broken: else the wait, expiring, would break all of them.
bool Mesh::SaidFarewell(int peer) {
  if (farewell_buffers_[peer] == nullptr) return false;
  try {
    return farewell_buffers_[peer]->waitRecv(kSettle) && farewells_[peer].magic == Farewell::kMagic;
  } catch (const std::exception&) {
    return false;
  }
}

std::set<int> Mesh::SilentlyBroken(int peer) {
  std::set<int> broken;
  {
    absl::MutexLock lock(&mutex_);
    for (int other = 0; other < size_; ++other) {
      if (other != rank_ && other != peer && IsBroken(other)) broken.insert(other);
    }
  }
  std::erase_if(broken, [this](int other) { return SaidFarewell(other); });
  broken.insert(peer);
  return broken;
}

absl::Status Mesh::LostError(int peer) {
  blamed_ = peer;
  absl::Status status;
  Farewell& farewell = farewells_[peer];
  if (SaidFarewell(peer)) {
    farewell.text.back() = '\0';
    if (farewell.blamed >= 0 && farewell.blamed < size_) blamed_ = farewell.blamed;
    const bool late = farewell.code == static_cast<int32_t>(absl::StatusCode::kDeadlineExceeded);
    status =
        absl::Status(late ? absl::StatusCode::kDeadlineExceeded : absl::StatusCode::kUnavailable,
                     absl::StrCat("rank ", peer, " left: ", farewell.text.data()));
  } else {
    // It may have left because of another whose end is just being noticed.
    std::this_thread::sleep_for(absl::ToChronoMilliseconds(kTick));
    const std::set<int> broken = SilentlyBroken(peer);
    status = absl::UnavailableError(absl::StrCat(
        broken.size() == 1 ? "rank " : "ranks ", absl::StrJoin(broken, ", "),
        broken.size() == 1 ? " is" : " are", " gone: the process ended or closed its connections"));
  }
  SayFarewell(status);
  return status;
}

void Mesh::SayFarewell(const absl::Status& why) {
  if (farewell_said_ || own_farewell_buffers_.empty()) return;
  farewell_said_ = true;
  own_farewell_.magic = Farewell::kMagic;
  own_farewell_.code = static_cast<int32_t>(why.code());
  own_farewell_.blamed = blamed_;
  const size_t length = std::min(why.message().size(), own_farewell_.text.size() - 1);
  std::memcpy(own_farewell_.text.data(), why.message().data(), length);
  std::vector<Await> sent;
  for (int peer = 0; peer < size_; ++peer) {
    MessageBuffer* buffer = own_farewell_buffers_[peer].get();
    if (buffer == nullptr) continue;
    try {
      buffer->send(peer, kFarewellSlot, 0, sizeof(Farewell));
      sent.push_back({buffer, peer, false, 1});
    } catch (const std::exception&) {
      // That one is gone already.
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    if (!busy_) return;  // nothing under way that could hold them back, and no watcher to end waits
  }
  const auto until = Clock::now() + kFarewellTime;
  for (Await& await : sent) {
    TakeWithin(await, std::max<Clock::duration>(until - Clock::now(), Clock::duration::zero()));
  }
}

void Mesh::Interrupt(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (interrupt_.ok()) interrupt_ = status;
  WakeWaiter();
}

void Mesh::Close(const absl::Status& why) {
  if (context_ == nullptr) return;
  if (!why.ok()) SayFarewell(why);
  {
    absl::MutexLock lock(&mutex_);
    alive_.clear();
  }
  farewell_buffers_.clear();
  own_farewell_buffers_.clear();
  context_ = nullptr;
  device_ = nullptr;
}

void Mesh::WakeWaiter() {
  if (waiting_ == nullptr) return;
  if (waiting_->receive) {
    waiting_->buffer->abortWaitRecv();
  } else {
    waiting_->buffer->abortWaitSend();
  }
}

// A wait that is aborted beforehand returns at once, or throws where the connection broke.
bool Mesh::IsBroken(int peer) {
  if (alive_.empty() || alive_[peer] == nullptr) return false;
  try {
    alive_[peer]->abortWaitRecv();
    alive_[peer]->waitRecv(kBackstop);
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

void Mesh::EndWaits() {
  WakeWaiter();
  if (!connecting_) return;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) context_->getPair(peer)->close();
  }
}

bool Mesh::Cancelled() const { return cancelled_ != nullptr && cancelled_->load(); }

bool Mesh::TimeIsUp() const {
  if (Clock::now() < deadline_) return false;
  return presence_ == nullptr || presence_->Counted(started_) >= timeout_;
}

void Mesh::Check() {
  if (interrupt_.ok() && Cancelled()) {
    interrupt_ = absl::AbortedError("told to stop while connecting");
    EndWaits();
    return;
  }
  if (!expired_ && TimeIsUp()) {
    expired_ = true;
    EndWaits();
    return;
  }
  if (waiting_ == nullptr) return;
  if (draining_) {
    if (Clock::now() >= drain_until_) WakeWaiter();
    return;
  }
  for (const Await& await : awaited_) {
    if (await.completions > 0 && IsBroken(await.peer)) {
      lost_peer_ = await.peer;
      WakeWaiter();
      return;
    }
  }
}

void Mesh::Watch() {
  absl::MutexLock lock(&mutex_);
  int idle_ticks = 0;
  while (!stop_watcher_) {
    if (idle_ticks >= kIdleTicks) {
      watcher_asleep_ = true;
      wake_watcher_.Wait(&mutex_);
      watcher_asleep_ = false;
      idle_ticks = 0;
      continue;
    }
    absl::Duration wait = kTick;
    if (busy_) {
      const absl::Duration left = absl::FromChrono(deadline_ - Clock::now());
      if (left > absl::ZeroDuration()) wait = std::min(wait, left);  // else it is extended
    }
    wake_watcher_.WaitWithTimeout(&mutex_, wait);
    if (busy_) {
      idle_ticks = 0;
      Check();
    } else {
      ++idle_ticks;
    }
  }
}

}  // namespace zeroshard
