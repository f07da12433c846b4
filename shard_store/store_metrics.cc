#include "shard_store/store_metrics.h"

#include <utility>

namespace zeroshard::store {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

// From a small job's in memory to that of 100 G parameters on one host's disks.
const prometheus::Histogram::BucketBoundaries kUpdateSeconds = {
    0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000};

const prometheus::Histogram::BucketBoundaries kSnapshotSeconds = {0.1, 0.3, 1,   3,   10,
                                                                  30,  100, 300, 1000};

MetricFamily Family(const char* name, const char* help, MetricType type) {
  MetricFamily family;
  family.name = name;
  family.help = help;
  family.type = type;
  return family;
}

void Add(MetricFamily* family, double value, std::vector<ClientMetric::Label> labels = {}) {
  ClientMetric metric;
  metric.label = std::move(labels);
  if (family->type == MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  family->metric.push_back(std::move(metric));
}

}  // namespace

StoreMetrics::StoreMetrics(std::function<StoreReadings()> read)
    : read_(std::move(read)), updates_(kUpdateSeconds), snapshots_(kSnapshotSeconds) {}

std::vector<MetricFamily> StoreMetrics::Collect() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const StoreReadings now = read_();
  std::vector<MetricFamily> families;
  const auto number = [](uint64_t value) { return static_cast<double>(value); };

  MetricFamily memory = Family(
      "zeroshard_store_memory_bytes",
      "Bytes that jobs hold in this store's memory, by kind of training state; buffers: what "
      "state on disks is read and written through.",
      MetricType::Gauge);
  const std::pair<const char*, uint64_t> kinds[] = {
      {"master", now.usage.master_bytes()},         {"exp_avg", now.usage.exp_avg_bytes()},
      {"exp_avg_sq", now.usage.exp_avg_sq_bytes()}, {"parameters", now.usage.parameter_bytes()},
      {"staging", now.usage.staging_bytes()},       {"buffers", now.buffer_bytes},
  };
  for (const auto& [kind, bytes] : kinds) Add(&memory, number(bytes), {{"kind", kind}});
  families.push_back(std::move(memory));

  MetricFamily limit =
      Family("zeroshard_store_memory_limit_bytes",
             "Bytes of training state that this store may hold in memory.", MetricType::Gauge);
  Add(&limit, number(now.memory_limit));
  families.push_back(std::move(limit));

  MetricFamily used = Family("zeroshard_store_memory_used_bytes",
                             "Bytes taken of the limit: training state, buffers of state on disks, "
                             "copies for snapshots, parameters of earlier steps still being sent.",
                             MetricType::Gauge);
  Add(&used, number(now.memory_used));
  families.push_back(std::move(used));

  MetricFamily nvme =
      Family("zeroshard_store_nvme_bytes", "Bytes of files of training state in the NVMe folder.",
             MetricType::Gauge);
  Add(&nvme, number(now.usage.nvme_bytes()));
  families.push_back(std::move(nvme));

  MetricFamily nvme_limit = Family(
      "zeroshard_store_nvme_limit_bytes",
      "Bytes that this store may write to its NVMe folder; 0 without one.", MetricType::Gauge);
  Add(&nvme_limit, number(now.nvme_limit));
  families.push_back(std::move(nvme_limit));

  MetricFamily chunks =
      Family("zeroshard_store_chunks", "Chunks that this store holds.", MetricType::Gauge);
  Add(&chunks, number(now.usage.chunks()));
  families.push_back(std::move(chunks));

  MetricFamily jobs =
      Family("zeroshard_store_jobs", "Jobs whose state this store holds.", MetricType::Gauge);
  Add(&jobs, number(now.jobs));
  families.push_back(std::move(jobs));

  MetricFamily traffic =
      Family("zeroshard_store_traffic_bytes_total",
             "Bytes of gradients taken in (push), of parameters given out (pull), and of state "
             "given to other stores (copy).",
             MetricType::Counter);
  Add(&traffic, number(now.pushed), {{"direction", "push"}});
  Add(&traffic, number(now.pulled), {{"direction", "pull"}});
  Add(&traffic, number(now.copied), {{"direction", "copy"}});
  families.push_back(std::move(traffic));

  MetricFamily io = Family("zeroshard_store_nvme_io_bytes_total",
                           "Bytes read from and written to files of training state in the NVMe "
                           "folder.",
                           MetricType::Counter);
  Add(&io, number(now.disk_read), {{"direction", "read"}});
  Add(&io, number(now.disk_written), {{"direction", "write"}});
  families.push_back(std::move(io));

  MetricFamily io_errors =
      Family("zeroshard_store_nvme_errors_total",
             "Reads and writes of the NVMe folder that failed or did not end, and blocks that were "
             "read and are not what was written.",
             MetricType::Counter);
  Add(&io_errors, number(now.disk_errors));
  families.push_back(std::move(io_errors));

  for (const double seconds : now.snapshot_seconds) snapshots_.Observe(seconds);
  MetricFamily snapshots = Family(
      "zeroshard_store_snapshot_seconds",
      "Seconds from the order to keep a version until this store's part of its checkpoint was "
      "written; of those that were.",
      MetricType::Histogram);
  snapshots.metric.push_back(snapshots_.Collect());
  families.push_back(std::move(snapshots));

  for (const double seconds : now.update_seconds) updates_.Observe(seconds);
  MetricFamily updates = Family(
      "zeroshard_store_update_seconds",
      "Seconds from a step's decision to the last of a job's chunks here having its version.",
      MetricType::Histogram);
  updates.metric.push_back(updates_.Collect());
  families.push_back(std::move(updates));
  return families;
}

}  // namespace zeroshard::store
