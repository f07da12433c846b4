#include "shard_store/service/bulk_stream.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/grpc_status.h"
#include "common/log.h"
#include "common/security/authoriser.h"
#include "common/status_macros.h"
#include "shard_store/service/said_once.h"
#include "shard_store/state/too_early.h"

namespace zeroshard::store {
namespace {

using bulk::FrameType;
using bulk::Header;

// A status travels in HTTP/2 headers, which have little room; the kError frame has it whole.
constexpr size_t kMostStatusText = 1024;

// Null: payloads travel in their frames.
std::shared_ptr<bulk::SharedRegion> MapRegion(const v1::BulkHello& hello) {
  if (hello.shared_region().empty()) return nullptr;
  auto region = bulk::SharedRegion::Map(hello.shared_region());
  if (region.ok()) return *std::move(region);
  // The peer is on another host.
  if (absl::IsNotFound(region.status())) return nullptr;
  // Each stream of each generation would say it again.
  static SaidOnce said;
  const std::string peer = absl::CHexEscape(hello.member().substr(0, 80));
  if (said.First(peer, absl::StatusCodeToString(region.status().code()))) {
    LogWarning("no shared memory with ", peer,
               ", which makes transfers slower: ", region.status().message());
  }
  return nullptr;
}

}  // namespace

std::shared_ptr<const void> PinTally::Count(std::shared_ptr<PinTally> tally,
                                            std::shared_ptr<const void> pin) {
  {
    std::lock_guard<std::mutex> lock(tally->mutex_);
    ++tally->count_;
  }
  const void* const address = tally.get();
  return std::shared_ptr<const void>(
      address, [tally = std::move(tally), pin = std::move(pin)](const void*) mutable {
        pin.reset();
        std::lock_guard<std::mutex> lock(tally->mutex_);
        --tally->count_;
        tally->changed_.notify_all();
      });
}

bool PinTally::AwaitNone(absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                           [this] { return count_ == 0; });
}

BulkStream* BulkStream::Start(grpc::CallbackServerContext* context, const OpenSession* open,
                              std::shared_ptr<PinTally> pins, std::shared_ptr<const void> silent) {
  std::shared_ptr<BulkStream> stream(
      new BulkStream(context, open, std::move(pins), std::move(silent)));
  stream->self_ = stream;
  std::weak_ptr<BulkStream> weak = stream;
  stream->hello_alarm_.Set(
      std::chrono::system_clock::now() + std::chrono::seconds(kHelloSeconds), [weak](bool rang) {
        const std::shared_ptr<BulkStream> late = weak.lock();
        if (!rang || late == nullptr) return;
        late->End(absl::DeadlineExceededError(
            absl::StrCat("no hello came on this stream within ", kHelloSeconds, " s")));
      });
  std::lock_guard<std::mutex> lock(stream->mutex_);
  stream->ReadOn();
  return stream.get();
}

// --- reading ---------------------------------------------------------------------------------

void BulkStream::OnReadDone(bool ok) {
  if (!ok) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reading_ = false;
      read_ended_ = true;
    }
    WriteNext();
    return;
  }
  // region_ is set on this thread, by the hello.
  auto frame = bulk::ReadFrame(incoming_, region_.get());
  incoming_.Clear();
  absl::Status status = frame.ok() ? Take(&*frame) : frame.status();
  if (IsTooEarly(status)) {
    WaitForPush(std::make_shared<bulk::ReceivedFrame>(*std::move(frame)));
  } else {
    Taken(std::move(status));
  }
}

void BulkStream::Taken(absl::Status status) {
  const bool goes_on = status.ok();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    reading_ = push_waits_ = false;
    if (goes_on) ReadOn();
  }
  if (goes_on) {
    WriteNext();
  } else {
    End(std::move(status));
  }
}

// Meanwhile reading_ stays set: nothing else is read.
void BulkStream::WaitForPush(const std::shared_ptr<bulk::ReceivedFrame>& frame) {
  // An answer that is there at once is dealt with here, in turn, rather than deeper and deeper.
  struct Said {
    std::mutex mutex;
    bool waits = false;
    std::optional<absl::Status> ready;
  };
  while (true) {
    const std::shared_ptr<BulkSession> session = this->session();
    if (session == nullptr) return Taken(absl::CancelledError("the peer is gone"));
    {
      std::lock_guard<std::mutex> lock(mutex_);
      push_waits_ = true;
    }
    WriteNext();  // what waits for room waits no longer
    const auto said = std::make_shared<Said>();
    session->WaitForPush(frame->header,
                         [self = shared_from_this(), frame, said](const absl::Status& ready) {
                           {
                             std::lock_guard<std::mutex> lock(said->mutex);
                             if (!said->waits) {
                               said->ready = ready;
                               return;
                             }
                           }
                           if (!self->TakeAgain(frame.get(), ready)) self->WaitForPush(frame);
                         });
    {
      std::lock_guard<std::mutex> lock(said->mutex);
      said->waits = !said->ready.has_value();
      if (said->waits) return;
    }
    if (TakeAgain(frame.get(), *said->ready)) return;
  }
}

bool BulkStream::TakeAgain(bulk::ReceivedFrame* frame, const absl::Status& ready) {
  // The call may have ended meanwhile: a push would be taken for a hello then.
  absl::Status status = session() == nullptr ? absl::CancelledError("the peer is gone") : ready;
  if (status.ok()) status = Take(frame);
  if (IsTooEarly(status)) return false;
  Taken(std::move(status));
  return true;
}

void BulkStream::ReadOn() {
  if (reading_ || read_ended_ || ending_ || finished_) return;
  if (pulls_ >= kMostPulls || copies_ >= kMostCopies) return;
  reading_ = true;
  StartRead(&incoming_);  // never calls back on this thread
}

absl::Status BulkStream::Take(bulk::ReceivedFrame* frame) {
  const Header& header = frame->header;
  const std::shared_ptr<BulkSession> session = this->session();
  if (session == nullptr) return SayHello(*frame);
  if (header.generation != generation_) {
    return absl::FailedPreconditionError(
        absl::StrCat("a frame of generation ", header.generation,
                     " on a stream that was opened for generation ", generation_));
  }
  switch (header.type) {
    case FrameType::kPush: {
      ZS_RETURN_IF_ERROR(session->Push(header, frame->parts));
      frame->Release();  // before the acknowledgement, which says that its slot is free
      std::lock_guard<std::mutex> lock(mutex_);
      acknowledge_ = true;
      acknowledged_ = header.tag;
      return absl::OkStatus();
    }
    case FrameType::kPull:
      StartPull(session.get(), header);
      return absl::OkStatus();
    case FrameType::kState:
      return AnswerState(session.get(), header);
    case FrameType::kRoom:
      return absl::OkStatus();  // what waits for it is tried next
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "a frame of type ", static_cast<int>(header.type), " from the side that asks"));
  }
}

absl::Status BulkStream::SayHello(const bulk::ReceivedFrame& frame) {
  v1::BulkHello hello;
  if (frame.header.type != FrameType::kHello || !hello.ParseFromString(frame.Text())) {
    return absl::InvalidArgumentError("a Bulk stream must begin with a hello");
  }
  ZS_RETURN_IF_ERROR(security::CheckMember(
      *context_->auth_context(), hello.store() ? security::Role::kStore : security::Role::kWorker,
      hello.member()));
  hello_alarm_.Cancel();
  silent_ = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_ = hello.generation();
  }
  std::weak_ptr<BulkStream> weak = weak_from_this();
  ZS_ASSIGN_OR_RETURN(
      auto session, (*open_)(hello, [weak](const absl::Status& status) {
        if (auto stream = weak.lock(); stream != nullptr) {
          stream->End(status.ok() ? absl::AbortedError("the store ended the stream") : status);
        }
      }));
  std::shared_ptr<bulk::SharedRegion> region = MapRegion(hello);
  std::lock_guard<std::mutex> lock(mutex_);
  region_ = std::move(region);
  session_ = std::move(session);
  welcome_ = true;
  return absl::OkStatus();
}

std::shared_ptr<BulkSession> BulkStream::session() {
  std::lock_guard<std::mutex> lock(mutex_);
  return session_;
}

void BulkStream::StartPull(BulkSession* session, const Header& header) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++pulls_;
  }
  session->Pull(header, [weak = weak_from_this(), header](absl::StatusOr<PinnedParameters> data) {
    if (auto stream = weak.lock(); stream != nullptr) stream->OnPulled(header, std::move(data));
  });
}

absl::Status BulkStream::AnswerState(BulkSession* session, const Header& header) {
  if (header.count == 0 || header.count > bulk::kMaxPayload / sizeof(float)) {
    return absl::InvalidArgumentError(absl::StrCat("state of ", header.count,
                                                   " elements was asked for; from 1 to ",
                                                   bulk::kMaxPayload / sizeof(float), " can be"));
  }
  auto values = std::make_shared<std::vector<float>>(header.count);
  ZS_RETURN_IF_ERROR(session->State(header, absl::MakeSpan(*values)));
  Answer answer;
  answer.header = header;
  answer.header.type = FrameType::kData;
  answer.header.dtype = DType::kF32;
  answer.copy = true;
  answer.data = {values, absl::MakeConstSpan(reinterpret_cast<const char*>(values->data()),
                                             values->size() * sizeof(float))};
  std::lock_guard<std::mutex> lock(mutex_);
  if (ending_ || finished_) return absl::OkStatus();
  ++pulls_;
  ++copies_;
  answers_.push_back(std::move(answer));
  return absl::OkStatus();
}

void BulkStream::OnPulled(const Header& header, absl::StatusOr<PinnedParameters> data) {
  if (data.ok() && (header.count == 0 || data->bytes.size() % header.count != 0)) {
    data = absl::InternalError(absl::StrCat("step ", header.step, ", chunk ", header.chunk, ": ",
                                            data->bytes.size(), " bytes for ", header.count,
                                            " elements"));
  }
  if (!data.ok()) {
    End(data.status());
    return;
  }
  Answer answer;
  answer.header = header;
  answer.header.type = FrameType::kData;
  // Of two bytes it is what was asked for: both ends have it from the specification.
  const DType narrow = header.dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  answer.header.dtype = data->bytes.size() / header.count == 4 ? DType::kF32 : narrow;
  answer.data = *std::move(data);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ending_ || finished_) return;
    answers_.push_back(std::move(answer));
  }
  WriteNext();
}

// --- writing ---------------------------------------------------------------------------------

void BulkStream::WriteNext() {
  Answer* answer = nullptr;  // the first one: stays while writing_ is set
  Header header;
  bool more = false;
  bool shared = false;
  std::optional<int> slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (writing_ || finished_) return;
    if (ending_) return MaybeFinish();
    header.generation = generation_;
    if (welcome_) {
      welcome_ = false;
      shared = region_ != nullptr;
      header.type = FrameType::kWelcome;
    } else if (acknowledge_) {
      acknowledge_ = false;
      header.type = FrameType::kAck;
      header.tag = acknowledged_;
    } else if (!answers_.empty()) {
      answer = &answers_.front();
      more = answers_.size() > 1;
      if (!TakeSlot(*answer, &slot)) return;
    } else {
      return MaybeFinish();
    }
    writing_ = true;
  }
  grpc::WriteOptions options;
  if (answer != nullptr) {
    header = answer->header;
    const size_t left = answer->data.bytes.size() - answer->sent;
    const auto payload =
        answer->data.bytes.subspan(answer->sent, std::min(left, bulk::kMaxPayload));
    header.count = static_cast<uint32_t>(payload.size() / SizeOf(header.dtype));
    if (slot.has_value()) {
      header.slot = static_cast<uint16_t>(*slot + 1);
      header.bytes = static_cast<uint32_t>(payload.size());
      header.payload_crc =
          bulk::CopyWithCrc32c(payload.data(), payload.size(), region_->Slot(*slot));
      outgoing_ = bulk::MakeSlotFrame(header);
    } else {
      header.payload_crc = Crc32c(payload.data(), payload.size());
      outgoing_ = bulk::MakeFrame(header, payload, PinTally::Count(pins_, answer->data.pin));
    }
    answer->header.begin += header.count;
    answer->sent += payload.size();
    more = more || answer->sent < answer->data.bytes.size();
    // What lies in a slot leaves at once: the one after it may have to wait until it is read.
    if (more && !slot.has_value()) options.set_buffer_hint();
  } else if (header.type == FrameType::kWelcome) {
    v1::BulkWelcome welcome;
    welcome.set_shared(shared);
    outgoing_ = bulk::MakeFrame(header, welcome.SerializeAsString());
  } else {
    outgoing_ = bulk::MakeFrame(header, {}, nullptr);
  }
  // The call cannot be finished while writing_ is set.
  StartWrite(&outgoing_, options);
}

bool BulkStream::TakeSlot(const Answer& answer, std::optional<int>* slot) {
  const size_t bytes = std::min(answer.data.bytes.size() - answer.sent, bulk::kMaxPayload);
  if (region_ == nullptr || bytes < bulk::kLeastShared) return true;
  *slot = region_->Take();
  // A kRoom frame is only heard while there is a read for it.
  if (slot->has_value() || !reading_ || push_waits_) return true;
  region_->SetWaiting();
  *slot = region_->Take();
  return slot->has_value();
}

void BulkStream::OnWriteDone(bool ok) {
  outgoing_.Clear();
  std::deque<Answer> done;  // let go of without the lock
  {
    std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    if (!ok) {
      cancelled_ = true;
      done = BeginEnd(absl::CancelledError("the peer is gone"));
    } else if (ending_) {
      done = TakeAnswers();
    } else if (!answers_.empty() && answers_.front().sent == answers_.front().data.bytes.size()) {
      if (answers_.front().copy) --copies_;
      --pulls_;
      done.push_back(std::move(answers_.front()));
      answers_.pop_front();
      ReadOn();
    }
  }
  done.clear();
  WriteNext();
}

// --- the end ---------------------------------------------------------------------------------

std::deque<BulkStream::Answer> BulkStream::TakeAnswers() {
  std::deque<Answer> taken;
  const size_t stay = writing_ && !saying_why_ ? 1 : 0;
  while (answers_.size() > stay) {
    taken.push_back(std::move(answers_.back()));
    answers_.pop_back();  // where the others are does not change
  }
  return taken;
}

std::deque<BulkStream::Answer> BulkStream::BeginEnd(absl::Status status) {
  if (end_.ok()) end_ = std::move(status);
  if (!ending_ && !finished_) {
    const auto now = std::chrono::system_clock::now();
    const auto cut = [weak = weak_from_this()](bool last) {
      return [weak, last](bool rang) {
        const std::shared_ptr<BulkStream> stream = weak.lock();
        if (rang && stream != nullptr) stream->Cut(last);
      };
    };
    end_alarm_.Set(now + std::chrono::seconds(kEndSeconds), cut(false));
    last_alarm_.Set(now + std::chrono::seconds(kLastSeconds), cut(true));
  }
  ending_ = true;
  return TakeAnswers();
}

void BulkStream::End(absl::Status status) {
  std::deque<Answer> answers;  // let go of without the lock
  {
    std::lock_guard<std::mutex> lock(mutex_);
    answers = BeginEnd(std::move(status));
  }
  answers.clear();
  WriteNext();
}

void BulkStream::Cut(bool last) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (self_ == nullptr || cutting_) return;  // gRPC is done with it
    if (!last && (!writing_ || saying_why_)) return;
    cutting_ = true;  // the call, and its context, stay until this is done
  }
  context_->TryCancel();
  std::lock_guard<std::mutex> lock(mutex_);
  cutting_ = false;
  cut_.notify_all();
}

void BulkStream::MaybeFinish() {
  if (finished_ || writing_) return;
  if (!ending_) {
    if (!read_ended_ || reading_ || pulls_ > 0) return;
    if (session_ != nullptr)  // nothing is to be let go of: all was sent
      BeginEnd(absl::CancelledError("all that was asked for on this stream was answered"));
  }
  if (!end_.ok() && !cancelled_ && !saying_why_) {
    saying_why_ = writing_ = true;
    outgoing_ = bulk::MakeErrorFrame(end_);
    StartWrite(&outgoing_);
    return;
  }
  // Who hears the reason cancels, whether or not it had more to say. gRPC's call may never end
  // where it is finished while frames wait for a peer that reads nothing, not even by a
  // cancellation after it; cancelled first it does.
  if (saying_why_ && session_ != nullptr && !cancelled_) return;
  finished_ = true;
  Finish(ToGrpcStatus(absl::Status(end_.code(), end_.message().substr(0, kMostStatusText))));
}

void BulkStream::OnCancel() {
  std::deque<Answer> answers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    answers = BeginEnd(absl::CancelledError("the peer is gone"));
  }
  answers.clear();
  WriteNext();
}

void BulkStream::OnDone() {
  hello_alarm_.Cancel();
  end_alarm_.Cancel();
  last_alarm_.Cancel();
  std::shared_ptr<BulkSession> session;  // closed without the lock
  std::deque<Answer> answers;
  std::shared_ptr<BulkStream> self;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    cut_.wait(lock, [this] { return !cutting_; });  // which waits for nothing
    session = std::move(session_);
    answers.swap(answers_);
    self = std::move(self_);
  }
  session.reset();
  answers.clear();
}

}  // namespace zeroshard::store
