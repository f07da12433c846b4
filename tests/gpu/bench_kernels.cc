#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "tests/gpu/bench.h"

namespace zeroshard::gpu_bench {
namespace {

constexpr int kRuns = 5;

// Random bf16 values in [-1, 1): what the GPU computes with decides its clock.
absl::StatusOr<Buffer> RandomHalves(Device* device, int64_t count) {
  ZS_ASSIGN_OR_RETURN(Buffer buffer,
                      device->Allocate(static_cast<size_t>(count) * 2, MemoryKind::kBuffers));
  std::vector<uint16_t> piece(static_cast<size_t>(std::min<int64_t>(count, int64_t{1} << 22)));
  std::mt19937 random(1);
  for (uint16_t& value : piece) {
    // Sign, an exponent that makes it 2^-4 to 1, and seven bits.
    const uint32_t bits = static_cast<uint32_t>(random());
    value =
        static_cast<uint16_t>((bits & 0x8000) | ((123 + (bits >> 16) % 4) << 7) | (bits & 0x7f));
  }
  for (int64_t at = 0; at < count; at += static_cast<int64_t>(piece.size())) {
    const auto n = std::min<int64_t>(count - at, static_cast<int64_t>(piece.size()));
    ZS_RETURN_IF_ERROR(
        CopyAndWait(device, buffer.as<uint16_t>() + at, piece.data(), static_cast<size_t>(n) * 2));
  }
  return buffer;
}

absl::Status Products(Device* device, Ops* ops, double* rate) {
  constexpr int64_t kSide = 8192;
  ZS_ASSIGN_OR_RETURN(const Buffer a, RandomHalves(device, kSide * kSide));
  ZS_ASSIGN_OR_RETURN(const Buffer b, RandomHalves(device, kSide * kSide));
  ZS_ASSIGN_OR_RETURN(const Buffer c, RandomHalves(device, kSide * kSide));
  MatmulArgs args{.a = a.data(), .b = b.data(), .c = c.data(), .m = kSide, .n = kSide, .k = kSide};
  args.transpose_b = true;
  args.ab_type = args.c_type = DType::kBF16;
  ZS_ASSIGN_OR_RETURN(const double seconds,
                      SecondsOf(device, 10, [&] { return ops->Matmul(args); }));
  *rate = 2.0 * kSide * kSide * kSide / seconds;
  return absl::OkStatus();
}

absl::Status Copies(Device* device, Ops* ops, Table* table) {
  constexpr int64_t kBytes = int64_t{4} << 30;
  ZS_ASSIGN_OR_RETURN(const Buffer from, device->Allocate(kBytes, MemoryKind::kBuffers));
  ZS_ASSIGN_OR_RETURN(const Buffer to, device->Allocate(kBytes, MemoryKind::kBuffers));
  ZS_ASSIGN_OR_RETURN(const double seconds, SecondsOf(device, 5, [&] {
                        ops->Copy(to.data(), from.data(), kBytes);
                        return absl::OkStatus();
                      }));
  table->Add("device", "copy", 2e-9 * static_cast<double>(kBytes) / seconds, "GB/s");
  constexpr int64_t kPinned = int64_t{1} << 30;
  ZS_ASSIGN_OR_RETURN(const Buffer host, device->AllocateHost(kPinned));
  for (const bool down : {true, false}) {
    ZS_ASSIGN_OR_RETURN(const double moved, SecondsOf(device, 3, [&] {
                          device->compute()->Copy(down ? host.data() : to.data(),
                                                  down ? from.data() : host.data(), kPinned);
                          return absl::OkStatus();
                        }));
    table->Add("device", down ? "to pinned host" : "from pinned host",
               1e-9 * static_cast<double>(kPinned) / moved, "GB/s");
  }
  return absl::OkStatus();
}

struct Heads {
  const char* name;
  int64_t batch, seq, heads, kv_heads, dim;
};

absl::Status Attention(Device* device, Ops* ops, const Heads& h, const std::string& row,
                       double peak, Table* table) {
  const int64_t rows = h.batch * h.seq, q_cols = h.heads * h.dim, kv_cols = h.kv_heads * h.dim;
  const int64_t ld = q_cols + 2 * kv_cols;
  ZS_ASSIGN_OR_RETURN(const Buffer qkv, RandomHalves(device, rows * ld));
  ZS_ASSIGN_OR_RETURN(const Buffer d_out, RandomHalves(device, rows * q_cols));
  ZS_ASSIGN_OR_RETURN(const Buffer out, RandomHalves(device, rows * q_cols));
  ZS_ASSIGN_OR_RETURN(const Buffer d_qkv, RandomHalves(device, rows * ld));
  ZS_ASSIGN_OR_RETURN(const Buffer lse, device->Allocate(static_cast<size_t>(rows * h.heads) * 4,
                                                         MemoryKind::kBuffers));
  const auto part = [](const Buffer& buffer, int64_t at) { return buffer.as<uint16_t>() + at; };
  const AttentionArgs args{.q = part(qkv, 0),
                           .k = part(qkv, q_cols),
                           .v = part(qkv, q_cols + kv_cols),
                           .ld_q = ld,
                           .ld_k = ld,
                           .ld_v = ld,
                           .batch = h.batch,
                           .seq = h.seq,
                           .heads = h.heads,
                           .kv_heads = h.kv_heads,
                           .head_dim = h.dim,
                           .dtype = DType::kBF16,
                           .document_start = nullptr,
                           .dropout = {}};
  ZS_ASSIGN_OR_RETURN(const double forward, SecondsOf(device, 10, [&] {
                        return ops->AttentionForward(args, out.data(), lse.as<float>());
                      }));
  ZS_ASSIGN_OR_RETURN(const double backward, SecondsOf(device, 10, [&] {
                        return ops->AttentionBackward(
                            args, out.data(), d_out.data(), lse.as<float>(), part(d_qkv, 0),
                            part(d_qkv, q_cols), part(d_qkv, q_cols + kv_cols));
                      }));
  const double operations = 2.0 * static_cast<double>(rows * h.seq) * static_cast<double>(q_cols);
  for (const bool back : {false, true}) {
    const double rate = back ? 2.5 * operations / backward : operations / forward;
    const std::string what = back ? "backward" : "forward";
    table->Add(row, what, 1e-12 * rate, "TFLOP/s");
    if (peak > 0) table->Add(row, what + " of the peak", 100 * rate / peak, "%");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<double> SecondsOf(Device* device, int calls,
                                 const std::function<absl::Status()>& work) {
  std::vector<double> seconds;
  for (int run = 0; run <= kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    for (int call = 0; call < calls; ++call) ZS_RETURN_IF_ERROR(work());
    ZS_RETURN_IF_ERROR(device->compute()->Record().Wait());
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    if (run > 0) seconds.push_back(passed.count() / calls);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

double MeasureProducts(Device* device, Ops* ops, Table* table) {
  double rate = 0;
  const absl::Status status = Products(device, ops, &rate);
  if (status.ok()) {
    table->Add("device", "bf16 product peak", 1e-12 * rate, "TFLOP/s");
  } else {
    table->Missing("device", "bf16 product peak", status.ToString());
  }
  return rate;
}

void MeasureCopies(Device* device, Ops* ops, Table* table) {
  const absl::Status status = Copies(device, ops, table);
  if (!status.ok()) table->Missing("device", "copies", status.ToString());
}

void MeasureAttention(Device* device, Ops* ops, double peak, Table* table) {
  constexpr Heads kAll[] = {{"gpt2", 16, 1024, 12, 12, 64},
                            {"llama 7b", 4, 2048, 32, 32, 128},
                            {"llama 8 kv heads", 2, 8192, 32, 8, 128}};
  for (const Heads& h : kAll) {
    const std::string row =
        absl::StrFormat("attention %s, %d x %d, head %d", h.name, h.batch, h.seq, h.dim);
    const absl::Status status = Attention(device, ops, h, row, peak, table);
    if (!status.ok()) table->Missing(row, "rate", status.ToString());
  }
}

}  // namespace zeroshard::gpu_bench
