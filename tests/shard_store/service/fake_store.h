// A store without a mind of its own behind the real service: remembers what was pushed, answers
// pulls as the test tells it. Serves on a free port.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/bulk/transport/channel_arguments.h"
#include "common/bulk/transport/frame_buffer.h"
#include "common/grpc_server.h"
#include "shard_store/service/bulk_service.h"
#include "shard_store/state/too_early.h"

namespace zeroshard::store {

class FakeStore {
 public:
  static constexpr std::chrono::seconds kPatience{30};

  explicit FakeStore(const StreamLimits::Most& most = {}) : most_(most) { Start(); }
  ~FakeStore() { Stop(); }

  void Start() {
    service_ = std::make_unique<BulkService>(
        [this](const v1::BulkHello& hello, std::function<void(const absl::Status&)> on_end) {
          return Open(hello, std::move(on_end));
        },
        most_);
    GrpcServer::Options options;
    options.listen = address_;
    options.services = {service_.get()};
    options.max_message_bytes = bulk::kMaxMessageBytes;
    options.arguments = bulk::BulkArguments();
    auto server = GrpcServer::Start(options);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    address_ = server_->address();
  }
  // Every stream breaks, as when the process dies.
  void Stop() {
    server_.reset();
    service_.reset();
  }
  const std::string& address() const { return address_; }

  using Place = std::pair<uint64_t, uint32_t>;  // step, chunk
  struct Waiting {
    bulk::Header header;
    BulkSession::PullHandler handler;
  };
  struct Facts {
    // What the test sets.
    std::function<absl::Status(const v1::BulkHello&)> refuse;  // null: nobody
    std::function<absl::Status(const bulk::Header&)> on_push;  // null: staged
    bool hold_pushes = false;                                  // WaitForPush waits until Release
    std::map<Place, std::shared_ptr<const std::string>> parameters;
    // What was heard.
    std::vector<v1::BulkHello> hellos;
    std::map<Place, std::map<uint32_t, std::string>> pushed;  // bytes, by first element
    int push_frames = 0;
    int pulls = 0;
    int sessions = 0;  // open now
    std::vector<Waiting> waiting;
    std::vector<std::function<void(const absl::Status&)>> early;
    std::vector<std::function<void(const absl::Status&)>> ends;
  };
  void With(const std::function<void(Facts&)>& change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change(state_);
    changed_.notify_all();
  }
  bool Await(const std::function<bool(const Facts&)>& holds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return holds(state_); });
  }

  // The chunk has this version: pulls that wait for it are answered.
  void Publish(uint64_t step, uint32_t chunk, std::string bytes) {
    std::vector<Waiting> ready;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      state_.parameters[{step, chunk}] = std::make_shared<const std::string>(std::move(bytes));
      std::vector<Waiting> others;
      for (Waiting& waiting : state_.waiting) {
        const bool now = waiting.header.step == step && waiting.header.chunk == chunk;
        (now ? ready : others).push_back(std::move(waiting));
      }
      state_.waiting = std::move(others);
    }
    for (Waiting& waiting : ready) Answer(waiting.header, std::move(waiting.handler));
  }
  // Pushes are no longer too early.
  void Release() {
    std::vector<std::function<void(const absl::Status&)>> early;
    With([&](Facts& state) {
      state.hold_pushes = false;
      early.swap(state.early);
    });
    for (const auto& ready : early) ready(absl::OkStatus());
  }
  // As a store does when it opens another generation.
  void EndStreams(const absl::Status& status) {
    std::vector<std::function<void(const absl::Status&)>> ends;
    With([&](Facts& state) { ends.swap(state.ends); });
    for (const auto& end : ends) end(status);
  }

 private:
  class Session : public BulkSession {
   public:
    explicit Session(FakeStore* store) : store_(store) {}
    ~Session() override {
      store_->With([](Facts& state) { --state.sessions; });
    }
    absl::Status Push(const bulk::Header& header,
                      absl::Span<const absl::Span<const char>> parts) override {
      absl::Status status;
      store_->With([&](Facts& state) {
        if (state.hold_pushes) {
          status = TooEarly("too early");
          return;
        }
        if (state.on_push) status = state.on_push(header);
        if (!status.ok()) return;
        std::string& bytes = state.pushed[{header.step, header.chunk}][header.begin];
        bytes.resize(header.bytes);
        bulk::CopyTo(parts, bytes.data());
        ++state.push_frames;
      });
      return status;
    }
    void WaitForPush(const bulk::Header&, std::function<void(const absl::Status&)> ready) override {
      bool now = false;
      store_->With([&](Facts& state) {
        now = !state.hold_pushes;
        if (!now) state.early.push_back(std::move(ready));
      });
      if (now) ready(absl::OkStatus());
    }
    void Pull(const bulk::Header& header, PullHandler handler) override {
      bool there = false;
      store_->With([&](Facts& state) {
        ++state.pulls;
        there = state.parameters.count({header.step, header.chunk}) > 0;
        if (!there) state.waiting.push_back({header, std::move(handler)});
      });
      if (there) store_->Answer(header, std::move(handler));
    }
    absl::Status State(const bulk::Header& header, absl::Span<float> values) override {
      // Values that say where they are from.
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = ValueOf(header.chunk, header.code, header.begin + static_cast<uint32_t>(i));
      }
      return absl::OkStatus();
    }

   private:
    FakeStore* const store_;
  };

  absl::StatusOr<std::unique_ptr<BulkSession>> Open(
      const v1::BulkHello& hello, std::function<void(const absl::Status&)> on_end) {
    absl::Status status;
    With([&](Facts& state) {
      if (state.refuse) status = state.refuse(hello);
      if (!status.ok()) return;
      state.hellos.push_back(hello);
      state.ends.push_back(std::move(on_end));
      ++state.sessions;
    });
    if (!status.ok()) return status;
    return std::make_unique<Session>(this);
  }

  void Answer(const bulk::Header& header, BulkSession::PullHandler handler) {
    std::shared_ptr<const std::string> bytes;
    With([&](Facts& state) { bytes = state.parameters.at({header.step, header.chunk}); });
    const size_t size = SizeOf(header.dtype);
    const size_t begin = header.begin * size, count = header.count * size;
    if (begin + count > bytes->size()) {
      handler(absl::InvalidArgumentError("outside the chunk"));
      return;
    }
    handler(PinnedParameters{bytes, absl::MakeConstSpan(bytes->data() + begin, count)});
  }

 public:
  static float ValueOf(uint32_t chunk, uint32_t kind, uint32_t element) {
    return static_cast<float>(chunk * 100 + kind * 10) + static_cast<float>(element) / 1024;
  }

 private:
  const StreamLimits::Most most_;
  std::string address_ = "127.0.0.1:0";
  std::mutex mutex_;
  std::condition_variable changed_;
  Facts state_;
  std::unique_ptr<BulkService> service_;
  std::unique_ptr<GrpcServer> server_;
};

}  // namespace zeroshard::store
