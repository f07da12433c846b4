#include "worker/agent/worker_metrics.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

class FamilyBuilder {
 public:
  FamilyBuilder(const char* name, const char* help, MetricType type,
                std::vector<ClientMetric::Label> labels)
      : labels_(std::move(labels)) {
    family_.name = name;
    family_.help = help;
    family_.type = type;
  }
  void Add(double value, std::vector<ClientMetric::Label> extra = {}) {
    ClientMetric metric;
    metric.label = labels_;
    for (ClientMetric::Label& label : extra) metric.label.push_back(std::move(label));
    if (family_.type == MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
    family_.metric.push_back(std::move(metric));
  }
  MetricFamily Take() { return std::move(family_); }

 private:
  const std::vector<ClientMetric::Label> labels_;
  MetricFamily family_;
};

}  // namespace

void WorkerMetrics::Begin(const std::string& job, uint32_t rank, uint32_t stage,
                          const std::atomic<uint64_t>* barrier_nanoseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  active_ = true;
  steps_ = 0;
  labels_ = {{"job", job}, {"rank", absl::StrCat(rank)}, {"stage", absl::StrCat(stage)}};
  barrier_nanoseconds_ = barrier_nanoseconds;
}

void WorkerMetrics::SetMemory(const MemoryAccounting* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  memory_ = memory;
}

void WorkerMetrics::SetTraffic(std::vector<const TrafficCounters*> traffic) {
  std::lock_guard<std::mutex> lock(mutex_);
  traffic_ = std::move(traffic);
}

void WorkerMetrics::SetTrain(const TrainCounters* train, const BubbleShares& bubble) {
  std::lock_guard<std::mutex> lock(mutex_);
  train_ = train;
  bubble_ = bubble;
}

void WorkerMetrics::SetOffload(const OffloadCounters* offload) {
  std::lock_guard<std::mutex> lock(mutex_);
  offload_ = offload;
}

void WorkerMetrics::End() {
  std::lock_guard<std::mutex> lock(mutex_);
  active_ = false;
  memory_ = nullptr;
  traffic_.clear();
  train_ = nullptr;
  bubble_ = {};
  offload_ = nullptr;
  barrier_nanoseconds_ = nullptr;
}

std::vector<MetricFamily> WorkerMetrics::Collect() const {
  std::vector<MetricFamily> families;
  if (const uint64_t bytes = device_memory_; bytes != 0) {
    FamilyBuilder device("zeroshard_worker_device_memory_bytes",
                         "Memory of this worker's device: a GPU's own, else what the host or its "
                         "control group lets this process have.",
                         MetricType::Gauge, {});
    device.Add(static_cast<double>(bytes));
    families.push_back(device.Take());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (active_) CollectJob(&families);
  return families;
}

void WorkerMetrics::CollectJob(std::vector<MetricFamily>* families) const {
  FamilyBuilder memory("zeroshard_worker_memory_bytes",
                       "Device memory allocated by this rank, by kind.", MetricType::Gauge,
                       labels_);
  for (int k = 0; k < kMemoryKinds; ++k) {
    const auto kind = static_cast<MemoryKind>(k);
    memory.Add(memory_ == nullptr ? 0 : static_cast<double>(memory_->Bytes(kind)),
               {{"kind", NameOf(kind)}});
  }
  families->push_back(memory.Take());

  FamilyBuilder traffic("zeroshard_worker_collective_bytes_total",
                        "Bytes this rank sent to other ranks, along all dimensions of the mesh, "
                        "by collective and phase.",
                        MetricType::Counter, labels_);
  for (int o = 0; o < kCollectiveOps; ++o) {
    for (int p = 0; p < kPhases; ++p) {
      const auto op = static_cast<CollectiveOp>(o);
      const auto phase = static_cast<Phase>(p);
      uint64_t bytes = 0;
      for (const TrafficCounters* line : traffic_) bytes += line->Get(op, phase);
      traffic.Add(static_cast<double>(bytes), {{"op", NameOf(op)}, {"phase", NameOf(phase)}});
    }
  }
  families->push_back(traffic.Take());

  FamilyBuilder offload("zeroshard_worker_offload_bytes_total",
                        "Bytes this rank exchanged with shard stores, by direction.",
                        MetricType::Counter, labels_);
  const auto moved = [&](const char* direction, const std::atomic<uint64_t>* bytes) {
    offload.Add(bytes == nullptr ? 0 : static_cast<double>(bytes->load()),
                {{"direction", direction}});
  };
  moved("push", offload_ == nullptr ? nullptr : &offload_->pushed);
  moved("pull", offload_ == nullptr ? nullptr : &offload_->pulled);
  families->push_back(offload.Take());

  FamilyBuilder shared("zeroshard_worker_offload_shared_bytes_total",
                       "Of the bytes exchanged with shard stores, those that went through memory "
                       "shared with a store of this host, by direction.",
                       MetricType::Counter, labels_);
  const auto through_memory = [&](const char* direction, const std::atomic<uint64_t>* bytes) {
    shared.Add(bytes == nullptr ? 0 : static_cast<double>(bytes->load()),
               {{"direction", direction}});
  };
  through_memory("push", offload_ == nullptr ? nullptr : &offload_->pushed_shared);
  through_memory("pull", offload_ == nullptr ? nullptr : &offload_->pulled_shared);
  families->push_back(shared.Take());

  FamilyBuilder phases("zeroshard_worker_phase_seconds_total",
                       "Seconds this rank's training thread spent, by phase of the step.",
                       MetricType::Counter, labels_);
  for (int p = 0; p < kStepPhases; ++p) {
    const auto phase = static_cast<StepPhase>(p);
    uint64_t nanoseconds = train_ == nullptr ? 0 : train_->phase_nanoseconds[p].load();
    if (phase == StepPhase::kBarrier) nanoseconds += barrier_nanoseconds_->load();
    phases.Add(static_cast<double>(nanoseconds) * 1e-9, {{"phase", NameOf(phase)}});
  }
  families->push_back(phases.Take());

  FamilyBuilder tokens("zeroshard_worker_tokens_total", "Tokens this rank has trained on.",
                       MetricType::Counter, labels_);
  tokens.Add(train_ == nullptr ? 0 : static_cast<double>(train_->tokens.load()));
  families->push_back(tokens.Take());

  FamilyBuilder steps("zeroshard_worker_steps_total",
                      "Steps this rank has finished, those that were done again too.",
                      MetricType::Counter, labels_);
  steps.Add(static_cast<double>(steps_.load()));
  families->push_back(steps.Take());
  CollectPipeline(families);
}

void WorkerMetrics::CollectPipeline(std::vector<MetricFamily>* families) const {
  uint64_t all = 0;
  const uint64_t waited = train_ == nullptr ? 0 : train_->pipeline_wait_nanoseconds.load();
  for (int p = 0; p < kStepPhases && train_ != nullptr; ++p) all += train_->phase_nanoseconds[p];
  FamilyBuilder wait("zeroshard_worker_pipeline_wait_seconds_total",
                     "Seconds this rank's training thread waited for other stages of its pipeline, "
                     "of those of the phase communication.",
                     MetricType::Counter, labels_);
  wait.Add(static_cast<double>(waited) * 1e-9);
  families->push_back(wait.Take());

  FamilyBuilder bubble(
      "zeroshard_worker_pipeline_bubble_ratio",
      "Share of a step that the ranks of a pipeline stand idle: predicted for "
      "equal stages, counted from the schedule by what units cost, and measured on "
      "this rank since its generation began to train. 0 without a pipeline.",
      MetricType::Gauge, labels_);
  bubble.Add(bubble_.predicted, {{"kind", "predicted"}});
  bubble.Add(bubble_.counted, {{"kind", "counted"}});
  bubble.Add(all == 0 ? 0 : static_cast<double>(waited) / static_cast<double>(all),
             {{"kind", "measured"}});
  families->push_back(bubble.Take());
}

}  // namespace zeroshard
