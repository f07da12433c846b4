// Rates of kernels and of whole training steps on GPU 0, beside that GPU's own matrix-product peak,
// measured in the same run. `gpu_bench --help` says what can be chosen.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/gpu/bench.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/make_cuda_device.h"
#include "worker/ops/cuda/cuda_ops.h"

namespace zeroshard::gpu_bench {

std::string Table::Text() const {
  std::string text;
  const std::string* row = nullptr;
  for (const Figure& figure : figures_) {
    if (row == nullptr || *row != figure.row) absl::StrAppend(&text, figure.row, "\n");
    row = &figure.row;
    if (figure.value) {
      absl::StrAppendFormat(&text, "  %-26s %12.2f %s\n", figure.column, *figure.value,
                            figure.unit);
    } else {
      absl::StrAppendFormat(&text, "  %-26s %12s %s\n", figure.column, "-", figure.reason);
    }
  }
  return text;
}

namespace {

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      absl::StrAppendFormat(&quoted, "\\u%04x", c);
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

}  // namespace

std::string Table::Json() const {
  std::string json = "[";
  for (const Figure& figure : figures_) {
    absl::StrAppend(&json, json.size() > 1 ? ",\n " : "\n ", "{\"row\": ", Quoted(figure.row),
                    ", \"column\": ", Quoted(figure.column), ", \"value\": ",
                    figure.value ? absl::StrFormat("%.6g", *figure.value) : std::string("null"),
                    ", \"unit\": ", Quoted(figure.unit), ", \"reason\": ", Quoted(figure.reason),
                    "}");
  }
  return json + "\n]\n";
}

bool Table::whole() const {
  for (const Figure& figure : figures_)
    if (!figure.value) return false;
  return true;
}

namespace {

struct Options {
  bool probe = false, kernels_only = false;
  std::string json;
  StepOptions steps;
};

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "gpu_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}

int Run(const Options& options) {
  if (const absl::Status usable = CheckCudaDevice(0); !usable.ok()) return Fail(usable);
  Table table;
  double peak = 0;
  {
    auto device = MakeCudaDevice(0);
    if (!device.ok()) return Fail(device.status());
    const cuda::DeviceProperties& gpu = cuda::AsCudaDevice(device->get())->properties();
    std::printf("%s, compute capability %d.%d, %.0f GiB\n", gpu.name.c_str(), gpu.major, gpu.minor,
                static_cast<double>(gpu.total_bytes) / (1 << 30));
    if (options.probe) return 0;
    auto ops = MakeCudaOps(device->get());
    if (!ops.ok()) return Fail(ops.status());
    peak = MeasureProducts(device->get(), ops->get(), &table);
    MeasureCopies(device->get(), ops->get(), &table);
    MeasureAttention(device->get(), ops->get(), peak, &table);
  }
  if (!options.kernels_only) {
    MeasureSteps(options.steps, peak, &table);
    MeasureOffload(options.steps, &table);
  }
  std::printf("%s", table.Text().c_str());
  if (!options.json.empty()) {
    std::ofstream file(options.json);
    file << table.Json();
    if (!file.flush()) return Fail(absl::InternalError("cannot write " + options.json));
  }
  return table.whole() ? 0 : 1;
}

}  // namespace
}  // namespace zeroshard::gpu_bench

int main(int argc, char** argv) {
  zeroshard::gpu_bench::Options options;
  CLI::App app{
      "Measure kernels and training steps on GPU 0. Steps are of one rank at stage 0 in bf16; the "
      "figures count 6 operations a parameter and token and 6 x layers x sequence x hidden a token "
      "for causal attention. What could not be measured is \"-\" with the reason, and makes the "
      "exit status 1; so does a rank that holds other memory than the planner says."};
  app.add_flag("--probe", options.probe, "only say which GPU there is");
  app.add_flag("--kernels", options.kernels_only, "no training steps");
  app.add_flag("--small", options.steps.small, "steps of GPT-2 124M only");
  app.add_option("--steps", options.steps.steps, "steps of a run; the first two are not timed")
      ->check(CLI::Range(3, 1000));
  app.add_option("--llama-blocks", options.steps.llama_blocks,
                 "of Llama 7B's 32 blocks at most; initial values take the host a few seconds each")
      ->check(CLI::Range(1, 32));
  app.add_option("--json", options.json, "also write the figures to this file");
  CLI11_PARSE(app, argc, argv);
  return zeroshard::gpu_bench::Run(options);
}
