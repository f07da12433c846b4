#include "common/plan/step_time.h"

#include <algorithm>

#include "common/plan/mesh.h"

namespace zeroshard {
namespace {

constexpr int kAllReduce = 2;
constexpr int kForward = 0, kBackward = 1, kStep = 2;
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

}  // namespace

StepTime EstimateStep(const Workload& w, const ClusterSize& cluster, const ModelConfig& slice,
                      const ZeroOptions& o, const Evaluation& e) {
  const Configuration& c = e.configuration;
  StepTime time;
  const double sequences = static_cast<double>(o.micro_batches * o.micro_batch);
  const double tokens = static_cast<double>(w.model.config.sequence);
  time.tokens = sequences * tokens;
  // Backward is twice the forward, and once more where that is computed again.
  const double passes = o.checkpointing ? 4 : 3;
  const double of_rank =
      static_cast<double>(e.accumulation * o.micro_batch) * tokens * ForwardOperations(slice);
  time.compute = Seconds(of_rank * passes, cluster.peak * cluster.peak_share);

  double around = 0, end = 0;
  for (size_t op = 0; op < e.traffic.size(); ++op) {
    if (op == kAllReduce) continue;
    around += static_cast<double>(e.traffic[op][kForward] + e.traffic[op][kBackward]);
    end += static_cast<double>(e.traffic[op][kStep]);
  }
  const double ring = RingSpeed(cluster, c) * cluster.link_share;
  const double stores = StoreSpeed(cluster, c) * cluster.link_share;
  const double tensor =
      static_cast<double>(e.traffic[kAllReduce][kForward] + e.traffic[kAllReduce][kBackward]);
  // With offload_param pulls belong to the passes, else to the end of the step.
  const double pull = Seconds(static_cast<double>(e.pull), stores);
  const double moving = Seconds(around, ring) + Seconds(static_cast<double>(e.push), stores) +
                        (c.offload_param ? pull : 0);
  time.exposed = Seconds(end, ring) + Seconds(tensor, cluster.device_link * cluster.link_share) +
                 (c.offload_param ? 0 : pull);
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
  time.bubble =
      time.compute * IdleShare(w.model.config, c.pipeline, o.checkpointing, e.accumulation);
  time.total = std::max(time.compute, time.hidden) + time.exposed + time.update + time.bubble;
  return time;
}

}  // namespace zeroshard
