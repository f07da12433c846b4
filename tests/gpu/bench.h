// What gpu_bench measures: kernels alone, steps of whole models, and what offloading costs. Times
// are medians; a rate is 10^12 operations or 10^9 bytes a second. Errors end up in the table.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/device/device.h"
#include "worker/ops/ops.h"

namespace zeroshard::gpu_bench {

// One number, or why there is none.
struct Figure {
  std::string row, column;
  std::optional<double> value;
  std::string unit, reason;
};

class Table {
 public:
  void Add(const std::string& row, const std::string& column, double value,
           const std::string& unit) {
    figures_.push_back({row, column, value, unit, ""});
  }
  void Missing(const std::string& row, const std::string& column, const std::string& reason) {
    figures_.push_back({row, column, std::nullopt, "", reason});
  }
  std::string Text() const;
  std::string Json() const;
  // Whether every figure is there.
  bool whole() const;

 private:
  std::vector<Figure> figures_;
};

// Seconds of one call of `work`, the median of five runs of `calls` calls each after a first run
// that does not count.
absl::StatusOr<double> SecondsOf(Device* device, int calls,
                                 const std::function<absl::Status()>& work);

// bf16 operations a second of Ops::Matmul at 8192 x 8192 x 8192; 0 where it failed.
double MeasureProducts(Device* device, Ops* ops, Table* table);
// Ops::Copy of 4 GiB: bytes read and written a second.
void MeasureCopies(Device* device, Ops* ops, Table* table);
// Causal attention by itself, bf16. Operations: 4 x B x H x T^2 x D forward, of which the mask
// leaves half; backward two and a half times that.
void MeasureAttention(Device* device, Ops* ops, double peak, Table* table);

struct StepOptions {
  int steps = 6;
  int llama_blocks = 8;  // at most: their initial values are drawn on the host
  bool small = false;    // GPT-2 124M alone
};
// Whole steps at stage 0 of one rank, as many sequences a micro-batch as fit. Operations of a step:
// (6 x N + 6 x layers x T x H x D) a token, N the parameters in products (Kaplan et al. 2020,
// section 2.1; attention as above, three times the forward's 2 x T x H x D a token and layer).
void MeasureSteps(const StepOptions& options, double peak, Table* table);
// A step of GPT-2 124M whose optimizer state is in a store that only copies, against one without.
void MeasureOffload(const StepOptions& options, Table* table);

}  // namespace zeroshard::gpu_bench
