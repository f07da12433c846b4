#include "worker/zero/staged_store.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/device/host_event.h"
#include "worker/device/host_pool.h"

namespace zeroshard {
namespace {

class StagedStore : public StateStore {
 public:
  StagedStore(std::unique_ptr<StateStore> inner, Device* device, DType type, size_t host_bytes)
      : type_(type),
        pool_(device, std::numeric_limits<size_t>::max(), host_bytes),
        in_(device->NewStream("push-copies")),
        out_(device->NewStream("pull-copies")),
        inner_(std::move(inner)) {}

  ~StagedStore() override {
    inner_ = nullptr;
    pool_.Drain();
  }

  v1::StateVersion base() const override { return inner_->base(); }

  Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
             const Event& after) override {
    // Nothing to copy, or refused before anything is read.
    if (begin < 0 || end <= begin) return inner_->Push(step, unit, begin, end, nullptr, after);
    const size_t bytes = static_cast<size_t>(end - begin) * SizeOf(type_);
    return Run(bytes, [&](char* host) {
      const Event copied = in_->Copy(host, data, bytes, after);
      return AllOf({inner_->Push(step, unit, begin, end, host, copied), copied});
    });
  }

  Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
             const Event& after) override {
    if (begin < 0 || end <= begin) return inner_->Pull(step, unit, begin, end, nullptr, after);
    const size_t bytes = static_cast<size_t>(end - begin) * SizeOf(type_);
    return Run(bytes, [&](char* host) {
      const Event pulled = inner_->Pull(step, unit, begin, end, host);
      return out_->Copy(out, host, bytes, AllOf({after, pulled}));
    });
  }

  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next_sample,
                                          uint64_t samples) override {
    return inner_->Commit(record, next_sample, samples);
  }
  void Abort(const std::string& reason) override { inner_->Abort(reason); }
  const OffloadCounters& counters() const override { return inner_->counters(); }

 private:
  template <typename StartCall>
  Event Run(size_t bytes, StartCall start) {
    bool started = false;
    const Event event = pool_.Run(bytes, [&](char* host, const absl::Status& earlier) {
      started = true;
      if (!earlier.ok()) {
        inner_->Abort(absl::StrCat("a transfer before failed: ", earlier.message()));
      }
      return start(host);
    });
    if (!started) inner_->Abort(std::string(event.Wait().message()));
    return event;
  }

  const DType type_;
  HostPool pool_;
  std::unique_ptr<Stream> in_, out_;
  std::unique_ptr<StateStore> inner_;
};

}  // namespace

size_t StagedBytes(const ModelTable& model, int world, int rank, DType type, int64_t most_pushed,
                   int64_t most_pulled) {
  int64_t owned = 0;
  for (const UnitTable& unit : model.units) {
    const ShardLayout layout = ShardLayout::Make(unit.length, world);
    owned += layout.End(rank) - layout.Begin(rank);
  }
  const int64_t elements = std::min(owned, most_pushed) + std::min(owned, most_pulled);
  return static_cast<size_t>(elements) * SizeOf(type);
}

std::unique_ptr<StateStore> MakeStagedStore(std::unique_ptr<StateStore> inner, Device* device,
                                            DType type, size_t host_bytes) {
  return std::make_unique<StagedStore>(std::move(inner), device, type, host_bytes);
}

}  // namespace zeroshard
