#include "common/plan/pipeline_time.h"

#include <algorithm>

namespace zeroshard {
namespace {

constexpr int64_t kWhole = 4;  // times p: micro-batches that are gone through one by one

PipelineTime TimeOfEach(const PipelineShape& shape, const std::vector<StageTime>& times) {
  PipelineTime time;
  for (const std::vector<Compute>& computes : RunOrder(shape, times)) {
    double busy = 0;
    for (const Compute& c : computes) busy += c.end - c.begin;
    time.busy.push_back(busy);
    time.total = std::max(time.total, computes.back().end);
  }
  return time;
}

}  // namespace

double PredictedBubble(const PipelineShape& shape) {
  const double idle = shape.stages - 1;
  const double busy =
      static_cast<double>(shape.micro_batches) * static_cast<double>(shape.virtual_stages);
  return idle / (busy + idle);
}

double PipelineTime::Bubble() const {
  const double all = total * static_cast<double>(busy.size());
  double idle = all;
  for (const double of_rank : busy) idle -= of_rank;
  return all > 0 ? idle / all : 0;
}

PipelineTime TimeOf(const PipelineShape& shape, const std::vector<StageTime>& times) {
  const int64_t p = shape.stages;
  if (shape.micro_batches <= kWhole * p) return TimeOfEach(shape, times);
  PipelineShape part = shape;  // p divides what is left out
  part.micro_batches = kWhole * p - (p - shape.micro_batches % p) % p;
  PipelineTime time = TimeOfEach(part, times);
  const double rest = static_cast<double>((shape.micro_batches - part.micro_batches) / p);
  part.micro_batches -= p;
  const PipelineTime before = TimeOfEach(part, times);
  time.total += rest * (time.total - before.total);
  for (size_t r = 0; r < time.busy.size(); ++r)
    time.busy[r] += rest * (time.busy[r] - before.busy[r]);
  return time;
}

}  // namespace zeroshard
