#include "common/plan/step_time.h"

#include <algorithm>

#include "common/plan/pipeline_time.h"

namespace zeroshard {
namespace {

using namespace traffic;

// Read and written by an update of a parameter: master, exp_avg and exp_avg_sq in fp32, and in 16
// bits the gradient read, the parameter written.
constexpr double kUpdateBytes = 3 * 8 + 2 + 2;

double Seconds(double amount, double speed) { return amount > 0 && speed > 0 ? amount / speed : 0; }

// Of the ring of a data-parallel group, of a rank and direction.
double RingSpeed(const ClusterSize& cluster, const Configuration& c) {
  if (c.Devices() <= cluster.devices_per_host) return cluster.device_link;
  const int rings = std::min(c.tensor, cluster.devices_per_host);
  const double shared = cluster.network / rings;
  return c.tensor >= cluster.devices_per_host ? shared : std::min(cluster.device_link, shared);
}

// Of a rank to stores that are spread over all hosts.
double StoreSpeed(const ClusterSize& cluster, const Configuration& c) {
  if (c.Devices() <= cluster.devices_per_host) return cluster.host_link;
  return std::min(cluster.host_link, cluster.network / cluster.devices_per_host);
}

// Of a rank to the next stage of its pipeline: all ranks of a host send at once.
double StageSpeed(const ClusterSize& cluster, const Configuration& c) {
  if (c.Devices() <= cluster.devices_per_host) return cluster.device_link;
  return std::min(cluster.device_link, cluster.network / cluster.devices_per_host);
}

// Of a rank to its tensor group.
double TensorSpeed(const ClusterSize& cluster, const Configuration& c) {
  if (c.tensor <= cluster.devices_per_host) return cluster.device_link;
  return std::min(cluster.device_link, cluster.network / cluster.devices_per_host);
}

// Bytes of a position by what they wait for.
struct Bytes {
  double around = 0;  // ZeRO's, in the passes
  double end = 0;     // at the end of the step, likewise
  double stages = 0;  // between stages
  double tensor = 0;
};

Bytes BytesOf(const Evaluation& e) {
  Bytes bytes;
  for (size_t op = 0; op < e.traffic.size(); ++op) {
    for (size_t phase = 0; phase < e.traffic[op].size(); ++phase) {
      const auto tensor = static_cast<double>(e.tensor[op][phase]);
      const double rest = static_cast<double>(e.traffic[op][phase]) - tensor;
      bytes.tensor += tensor;
      (phase == kStep ? bytes.end : op == kSend ? bytes.stages : bytes.around) += rest;
    }
  }
  return bytes;
}

}  // namespace

void EstimateStep(const Workload& w, const ClusterSize& cluster, const CutModel& cut,
                  const ZeroOptions& o, Evaluation* e) {
  const Configuration& c = e->configuration;
  StepTime& time = e->time;
  const double tokens = static_cast<double>(w.model.config.sequence);
  time.tokens = static_cast<double>(o.micro_batches * o.micro_batch) * tokens;

  const PipelineShape shape{
      .stages = c.pipeline, .virtual_stages = c.virtual_stages, .micro_batches = e->accumulation};
  const PipelineTime pipeline = TimeOf(shape, cut.operations());
  e->predicted_bubble = PredictedBubble(shape);
  e->counted_bubble = pipeline.Bubble();
  const double busiest = *std::max_element(pipeline.busy.begin(), pipeline.busy.end());
  time.compute = Seconds(busiest * static_cast<double>(o.micro_batch) * tokens,
                         cluster.peak * cluster.peak_share);

  const Bytes bytes = BytesOf(*e);
  const double ring = RingSpeed(cluster, c) * cluster.link_share;
  const double stores = StoreSpeed(cluster, c) * cluster.link_share;
  // With offload_param pulls belong to the passes, else to the end of the step.
  const double pull = Seconds(static_cast<double>(e->pull), stores);
  const double moving = Seconds(bytes.around, ring) +
                        Seconds(bytes.stages, StageSpeed(cluster, c) * cluster.link_share) +
                        Seconds(static_cast<double>(e->push), stores) +
                        (c.offload_param ? pull : 0);
  time.tensor = Seconds(bytes.tensor, TensorSpeed(cluster, c) * cluster.link_share);
  time.exposed = Seconds(bytes.end, ring) + (c.offload_param ? 0 : pull);
  if (o.overlap) {
    time.hidden = moving;
  } else {
    time.exposed += moving;
  }
  if (c.offload != OffloadTo::kNone) {
    const double touched = static_cast<double>(w.model.ParameterCount()) * kUpdateBytes *
                           o.replicas / cluster.Hosts(c.Devices());
    time.update =
        Seconds(touched, c.offload == OffloadTo::kNvme ? cluster.nvme_speed : cluster.memory_speed);
  }
  // A stage's part of the step is its products and what its tensor group moves for them.
  time.bubble = (time.compute + time.tensor) * (pipeline.total - busiest) / busiest;
  time.total =
      std::max(time.compute, time.hidden) + time.exposed + time.tensor + time.update + time.bubble;
}

}  // namespace zeroshard
