#include "shard_store/host_sessions.h"

#include <utility>

#include "common/status_macros.h"

namespace zeroshard::store {
namespace {

class HostSession : public BulkSession {
 public:
  HostSession(StoreHost* host, std::shared_ptr<StoreHost::Stream> stream)
      : host_(host), stream_(std::move(stream)) {}
  ~HostSession() override { host_->Close(stream_); }

  absl::Status Push(const bulk::Header& header,
                    absl::Span<const absl::Span<const char>> parts) override {
    return host_->Push(stream_.get(), header, parts);
  }
  void WaitForPush(const bulk::Header& header,
                   std::function<void(const absl::Status&)> ready) override {
    host_->WaitForPush(stream_, header, std::move(ready));
  }
  void Pull(const bulk::Header& header, PullHandler handler) override {
    host_->Pull(stream_, header, std::move(handler));
  }
  absl::Status State(const bulk::Header& header, absl::Span<float> values) override {
    return host_->State(stream_.get(), header, values);
  }

 private:
  StoreHost* const host_;
  const std::shared_ptr<StoreHost::Stream> stream_;
};

}  // namespace

OpenSession SessionsOf(StoreHost* host) {
  return [host](const v1::BulkHello& hello, std::function<void(const absl::Status&)> on_end)
             -> absl::StatusOr<std::unique_ptr<BulkSession>> {
    ZS_ASSIGN_OR_RETURN(auto stream, host->Open(hello, std::move(on_end)));
    return std::make_unique<HostSession>(host, std::move(stream));
  };
}

}  // namespace zeroshard::store
