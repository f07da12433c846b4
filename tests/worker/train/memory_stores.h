// The shard stores of one offloaded job within the process: every rank of a test's threads has a
// StateStore over the same state. It is strict where the real ones are: a gradient that comes
// twice, for another step or not at all, or a version that is gone, is an error.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/checkpoint/state_digest.h"
#include "common/kernels/adamw.h"
#include "common/kernels/convert.h"
#include "common/kernels/init.h"
#include "common/plan/offload.h"
#include "common/plan/zero_policy.h"
#include "common/spec/decision.h"
#include "common/spec/loss_scale.h"
#include "common/status_macros.h"
#include "gtest/gtest.h"
#include "worker/device/host_stream.h"
#include "worker/ops/ops.h"
#include "worker/zero/state_store.h"

namespace zeroshard {

class MemoryStores {
 public:
  enum class Call { kPush, kPull };
  struct Options {
    uint64_t seed = 1;  // of the order in which units are updated
    v1::StateVersion base = {};
    // Asked on the store's threads before each push and pull; an error is the call's.
    std::function<absl::Status(Call, int rank, uint64_t step, int unit)> on_call = nullptr;
    std::function<void(const v1::StepRecord&, uint64_t next_sample, uint64_t samples)> on_commit =
        nullptr;
    // Between a commit and the update of each unit.
    std::function<void(uint64_t step, int unit)> before_update = nullptr;
  };

  MemoryStores(const v1::JobSpec& spec, Options options)
      : spec_(spec),
        options_(std::move(options)),
        dtype_(ComputeType(spec)),
        model_(*MakeModelTable(spec.model())),
        order_(static_cast<uint32_t>(options_.seed)),
        updates_(MakeHostStream("updates")) {
    const FreshWeights fresh(spec.seed());
    for (const UnitTable& table : model_.units) {
      Unit& unit = units_.emplace_back();
      unit.trained = table.AnyTrainable();
      unit.version = options_.base.step();
      const auto length = static_cast<size_t>(table.length);
      for (std::vector<float>* values :
           {&unit.master, &unit.exp_avg, &unit.exp_avg_sq, &unit.gradient})
        values->resize(length);
      unit.staged.resize(length);
      unit.parameters.resize(length * SizeOf(dtype_));
      for (const ParameterInfo& p : table.parameters)
        EXPECT_TRUE(fresh.Read(p, 0, p.size, unit.master.data() + p.offset).ok());
      Round(units_.size() - 1);
    }
  }
  ~MemoryStores() { updates_.reset(); }

  std::unique_ptr<StateStore> MakeRank(int rank) { return std::make_unique<Rank>(this, rank); }

  // Before the job begins.
  void Set(const std::string& tensor, size_t element, float value) {
    for (size_t u = 0; u < units_.size(); ++u) {
      if (const ParameterInfo* info = model_.units[u].Find(tensor)) {
        units_[u].master[static_cast<size_t>(info->offset) + element] = value;
        Round(u);
        return;
      }
    }
    ADD_FAILURE() << "no tensor " << tensor;
  }

  // Of the fp32 weights, as the engine of a job without offload has it. When the job has ended.
  std::string Digest() {
    std::lock_guard lock(mutex_);
    WeightDigest digest;
    for (size_t u = 0; u < units_.size(); ++u) digest.Add(u, 0, units_[u].master);
    return digest.Hex();
  }
  // The parameters of one tensor in the compute type, as fp32.
  std::vector<float> Parameters(const std::string& tensor) {
    std::lock_guard lock(mutex_);
    std::vector<float> values;
    for (size_t u = 0; u < units_.size(); ++u) {
      const ParameterInfo* info = model_.units[u].Find(tensor);
      if (info == nullptr) continue;
      values.resize(static_cast<size_t>(info->size));
      ops_->Convert(
          units_[u].parameters.data() + static_cast<size_t>(info->offset) * SizeOf(dtype_), dtype_,
          info->size, values.data(), DType::kF32);
    }
    return values;
  }
  // One kind of a tensor's state, in fp32.
  std::vector<float> State(StateKind kind, const std::string& tensor) {
    std::lock_guard lock(mutex_);
    for (size_t u = 0; u < units_.size(); ++u) {
      const ParameterInfo* info = model_.units[u].Find(tensor);
      if (info == nullptr) continue;
      const Unit& unit = units_[u];
      const std::vector<float>& all = kind == StateKind::kMaster   ? unit.master
                                      : kind == StateKind::kExpAvg ? unit.exp_avg
                                                                   : unit.exp_avg_sq;
      return {all.begin() + info->offset, all.begin() + info->offset + info->size};
    }
    ADD_FAILURE() << "no tensor " << tensor;
    return {};
  }
  const ModelTable& model() const { return model_; }
  // When every unit has it. An error of the stores counts as a failure of the test.
  void WaitForVersion(uint64_t step) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(60),
                                  [&] {
                                    return std::all_of(units_.begin(), units_.end(),
                                                       [&](const Unit& u) {
                                                         return !u.trained || u.version == step;
                                                       });
                                  }))
        << "the stores never had version " << step;
  }
  std::vector<v1::StepDecision> decisions() {
    std::lock_guard lock(mutex_);
    return decisions_;
  }
  // Of the step after the last that was committed.
  v1::LossScale loss_scale() {
    std::lock_guard lock(mutex_);
    return loss_scale_;
  }
  // As if every store had gone.
  void Abort(const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (failed_.ok()) failed_ = absl::AbortedError(reason);
    changed_.notify_all();
  }
  // The next generation of ranks begins where the stores are.
  void Continue() {
    std::lock_guard lock(mutex_);
    failed_ = absl::OkStatus();
    options_.base.set_step(options_.base.step() + committed_);
    committed_ = 0;
    for (Unit& unit : units_) unit.staged.assign(unit.staged.size(), false);
  }
  // Bytes by rank, also of ranks that have gone.
  uint64_t pushed(int rank) {
    std::lock_guard lock(mutex_);
    return pushed_[rank];
  }
  // False: after a while it has not pushed as many.
  bool WaitForPushed(int rank, uint64_t bytes) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] {
      return !failed_.ok() || pushed_[rank] >= bytes;
    }) && failed_.ok();
  }
  uint64_t pulled(int rank) {
    std::lock_guard lock(mutex_);
    return pulled_[rank];
  }

 private:
  struct Unit {
    bool trained = true;
    uint64_t version = 0;
    std::vector<float> master, exp_avg, exp_avg_sq, gradient;
    std::vector<bool> staged;  // by element
    std::vector<char> parameters;
  };

  class Rank : public StateStore {
   public:
    Rank(MemoryStores* owner, int rank) : owner_(*owner), rank_(rank) {
      // Pulls end in any order.
      for (int i = 0; i < 3; ++i) pulls_.push_back(MakeHostStream("pulls"));
      pushes_ = MakeHostStream("pushes");
    }
    v1::StateVersion base() const override { return owner_.options_.base; }
    Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
               const Event& after) override {
      return pushes_->Enqueue([=, this]() -> absl::Status {
        ZS_RETURN_IF_ERROR(after.Wait());
        ZS_RETURN_IF_ERROR(owner_.Stage(rank_, step, unit, begin, end, data));
        counters_.pushed += static_cast<uint64_t>(end - begin) * SizeOf(owner_.dtype_);
        return absl::OkStatus();
      });
    }
    Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
               const Event& after) override {
      HostStream& stream = *pulls_[static_cast<size_t>(unit) % pulls_.size()];
      return stream.Enqueue([=, this]() -> absl::Status {
        ZS_RETURN_IF_ERROR(after.Wait());
        ZS_RETURN_IF_ERROR(owner_.Read(rank_, step, unit, begin, end, out));
        counters_.pulled += static_cast<uint64_t>(end - begin) * SizeOf(owner_.dtype_);
        return absl::OkStatus();
      });
    }
    absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next_sample,
                                            uint64_t samples) override {
      EXPECT_EQ(rank_, 0) << "rank 0 alone commits";
      return owner_.Commit(record, next_sample, samples);
    }
    void Abort(const std::string& reason) override { owner_.Abort(reason); }
    const OffloadCounters& counters() const override { return counters_; }

   private:
    MemoryStores& owner_;
    const int rank_;
    OffloadCounters counters_;
    std::vector<std::unique_ptr<HostStream>> pulls_;
    std::unique_ptr<HostStream> pushes_;
  };

  void Round(size_t index) {
    Unit* const unit = &units_[index];
    const Rounding rounding =
        unit->trained ? MakeRounding(spec_).At(static_cast<int>(index), 0) : Rounding();
    cpu::RoundParameters(unit->master.data(), static_cast<int64_t>(unit->master.size()), rounding,
                         unit->parameters.data(), dtype_, 1);
    // Of a frozen unit nothing else is kept.
    if (!unit->trained) {
      ops_->Convert(unit->parameters.data(), dtype_, static_cast<int64_t>(unit->master.size()),
                    unit->master.data(), DType::kF32);
    }
  }

  absl::Status CheckRange(int unit, int64_t begin, int64_t end) const {
    if (unit >= 0 && static_cast<size_t>(unit) < units_.size() && begin >= 0 && begin < end &&
        end <= model_.units[static_cast<size_t>(unit)].length) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrFormat("elements [%d, %d) of unit %d are not there", begin, end, unit));
  }

  absl::Status Stage(int rank, uint64_t step, int unit_index, int64_t begin, int64_t end,
                     const void* data) {
    ZS_RETURN_IF_ERROR(CheckRange(unit_index, begin, end));
    if (options_.on_call) ZS_RETURN_IF_ERROR(options_.on_call(Call::kPush, rank, step, unit_index));
    std::lock_guard lock(mutex_);
    ZS_RETURN_IF_ERROR(failed_);
    Unit& unit = units_[static_cast<size_t>(unit_index)];
    if (!unit.trained || step != committed_ + options_.base.step() + 1) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "a gradient of unit %d for step %d, after %d steps", unit_index, step, committed_));
    }
    for (int64_t element = begin; element < end; ++element) {
      if (unit.staged[static_cast<size_t>(element)])
        return absl::InternalError(
            absl::StrFormat("element %d of unit %d is staged already", element, unit_index));
      unit.staged[static_cast<size_t>(element)] = true;
    }
    ops_->Convert(data, dtype_, end - begin, unit.gradient.data() + begin, DType::kF32);
    pushed_[rank] += static_cast<uint64_t>(end - begin) * SizeOf(dtype_);
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::Status Read(int rank, uint64_t step, int unit_index, int64_t begin, int64_t end,
                    void* out) {
    ZS_RETURN_IF_ERROR(CheckRange(unit_index, begin, end));
    if (options_.on_call) ZS_RETURN_IF_ERROR(options_.on_call(Call::kPull, rank, step, unit_index));
    std::unique_lock lock(mutex_);
    const Unit& unit = units_[static_cast<size_t>(unit_index)];
    changed_.wait(lock, [&] { return !failed_.ok() || !unit.trained || unit.version >= step; });
    ZS_RETURN_IF_ERROR(failed_);
    if (unit.trained && unit.version != step) {
      return absl::InternalError(absl::StrFormat("unit %d is at version %d, asked for %d",
                                                 unit_index, unit.version, step));
    }
    const size_t size = SizeOf(dtype_);
    std::copy_n(unit.parameters.data() + static_cast<size_t>(begin) * size,
                static_cast<size_t>(end - begin) * size, static_cast<char*>(out));
    pulled_[rank] += static_cast<uint64_t>(end - begin) * size;
    return absl::OkStatus();
  }

  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next_sample,
                                          uint64_t samples) {
    if (options_.on_commit) options_.on_commit(record, next_sample, samples);
    v1::StepDecision decision = MakeDecision(spec_, record.step(), record.grad_norm(),
                                             record.tokens(), loss_scale(), record.skipped());
    decision.set_epoch(options_.base.epoch());
    std::lock_guard lock(mutex_);
    ZS_RETURN_IF_ERROR(failed_);
    if (record.step() != options_.base.step() + committed_ + 1)
      return absl::FailedPreconditionError(absl::StrFormat("step %d is not next", record.step()));
    for (size_t u = 0; u < units_.size(); ++u) {
      const auto missing = std::count(units_[u].staged.begin(), units_[u].staged.end(), false);
      if (units_[u].trained && missing > 0) {
        return absl::DeadlineExceededError(absl::StrFormat(
            "step %d: %d elements of unit %d were never staged", record.step(), missing, u));
      }
    }
    ++committed_;
    decisions_.push_back(decision);
    loss_scale_ = decision.loss_scale();
    std::vector<int> order(units_.size());
    for (size_t u = 0; u < order.size(); ++u) order[u] = static_cast<int>(u);
    std::shuffle(order.begin(), order.end(), order_);
    for (int unit : order) {
      updates_->Enqueue([this, unit, decision] {
        if (options_.before_update) options_.before_update(decision.step(), unit);
        Update(unit, decision);
        return absl::OkStatus();
      });
    }
    return decision;
  }

  void Update(int unit_index, const v1::StepDecision& decision) {
    std::lock_guard lock(mutex_);
    Unit& unit = units_[static_cast<size_t>(unit_index)];
    if (!unit.trained) return;
    for (const ParameterInfo& p : model_.units[static_cast<size_t>(unit_index)].parameters) {
      if (!p.trainable || decision.skip()) continue;
      if (UsesSgd(spec_)) {
        Sgd(p, decision, &unit);
        continue;
      }
      AdamWArgs args = MakeAdamWArgs(spec_, decision);
      if (!p.decay) args.weight_decay = 0;
      args.rounding = args.rounding.At(unit_index, p.offset);
      const auto at = static_cast<size_t>(p.offset);
      cpu::AdamW(args, p.size, unit.gradient.data() + at, DType::kF32, unit.master.data() + at,
                 unit.exp_avg.data() + at, unit.exp_avg_sq.data() + at,
                 unit.parameters.data() + at * SizeOf(dtype_), dtype_, 1);
    }
    if (UsesSgd(spec_) && !decision.skip()) Round(static_cast<size_t>(unit_index));
    unit.staged.assign(unit.staged.size(), false);
    unit.version = decision.step();
    changed_.notify_all();
  }

  // As common/kernels/sgd.h says, element by element.
  void Sgd(const ParameterInfo& p, const v1::StepDecision& decision, Unit* unit) {
    const v1::OptimizerParams& params = spec_.optimizer().params();
    const auto momentum = static_cast<float>(params.momentum());
    const float decay = p.decay ? static_cast<float>(params.weight_decay()) : 0.0f;
    for (int64_t i = p.offset; i < p.offset + p.size; ++i) {
      const auto at = static_cast<size_t>(i);
      float& weight = unit->master[at];
      float& buffer = unit->exp_avg[at];
      float gradient = unit->gradient[at] * decision.multiplier();
      gradient = std::fma(weight, decay, gradient);
      buffer = buffer * momentum + gradient;
      weight = std::fma(-decision.learning_rate(), buffer, weight);
    }
  }

  const v1::JobSpec spec_;
  Options options_;
  const DType dtype_;
  const ModelTable model_;
  const std::unique_ptr<Ops> ops_ = MakeCpuOps(1);  // under mutex_
  std::mutex mutex_;
  std::condition_variable changed_;
  absl::Status failed_;
  std::vector<Unit> units_;
  uint64_t committed_ = 0;  // steps
  v1::LossScale loss_scale_ = InitialLossScale(spec_);
  std::vector<v1::StepDecision> decisions_;
  std::mt19937 order_;
  std::map<int, uint64_t> pushed_, pulled_;
  std::unique_ptr<HostStream> updates_;
};

}  // namespace zeroshard
