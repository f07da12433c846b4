#include "worker/ops/cpu_isa.h"

#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>

#include "absl/strings/str_cat.h"
#include "common/kernels/simd_targets.h"
// After the list of targets.
#include "hwy/targets.h"

namespace zeroshard::cpu {
namespace {

// oneDNN's identifiers are bit masks in which a set includes those it extends.
bool Includes(dnnl::cpu_isa have, dnnl::cpu_isa wanted) {
  return (static_cast<unsigned>(have) & static_cast<unsigned>(wanted)) ==
         static_cast<unsigned>(wanted);
}

bool Effective(dnnl::cpu_isa wanted) { return Includes(dnnl::get_effective_cpu_isa(), wanted); }

const char* EffectiveName() {
  if (Effective(dnnl::cpu_isa::avx512_core_amx)) return "avx512_core_amx";
  if (Effective(dnnl::cpu_isa::avx512_core_bf16)) return "avx512_core_bf16";
  if (Effective(dnnl::cpu_isa::avx512_core_vnni)) return "avx512_core_vnni";
  if (Effective(dnnl::cpu_isa::avx512_core)) return "avx512_core";
  if (Effective(dnnl::cpu_isa::avx2)) return "avx2";
  return "below avx2";
}

constexpr int64_t kAvx512Targets = HWY_AVX3 | HWY_AVX3_DL;

}  // namespace

void ApplyIsaCap() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (!Effective(dnnl::cpu_isa::avx512_core)) hwy::DisableTargets(kAvx512Targets);
  });
}

absl::Status CpuIsSupported() {
  ApplyIsaCap();
  const bool vectors = (hwy::SupportedTargets() & (kAvx512Targets | HWY_AVX2)) != 0;
  if (vectors && Effective(dnnl::cpu_isa::avx2)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "this processor offers '", EffectiveName(), "'",
      vectors ? "" : " without the AVX2, FMA, BMI2 and F16C of the vector loops",
      "; the CPU backend needs AVX2 with FMA (Intel Haswell, AMD Zen or newer). Run on "
      "such a machine, or lift DNNL_MAX_CPU_ISA if it is set"));
}

bool HasNativeBf16() { return Effective(dnnl::cpu_isa::avx512_core_bf16); }

bool HasBrgemm() { return Effective(dnnl::cpu_isa::avx512_core); }

std::string Fingerprint() {
  ApplyIsaCap();
  const dnnl_version_t* version = dnnl_version();
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  return absl::StrCat(EffectiveName(), ", onednn ", version->major, ".", version->minor, ".",
                      version->patch, ", highway ", hwy::TargetName(targets & ~(targets - 1)));
}

}  // namespace zeroshard::cpu
