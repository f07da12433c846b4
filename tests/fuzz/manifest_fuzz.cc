// A manifest is refused, or everything that loading relies on holds.
#include <cstdio>
#include <cstdlib>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "common/checkpoint/manifest.h"
#include "common/checksum.h"
#include "tests/fuzz/fuzz_target.h"

namespace zeroshard {
namespace {

constexpr char kSeal[] = ",\n\"manifest_crc32c\": \"";

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "accepted a manifest although %s\n", what);
  std::abort();
}

void Check(const Manifest& manifest) {
  Require(manifest.world_size > 0, "no rank wrote it");
  std::set<std::string> names;
  for (const CheckpointFile& file : manifest.files) {
    Require(names.insert(file.name).second, "a file is there twice");
    Require(file.bytes <= uint64_t{1} << 50, "a file is larger than any");
    Require(file.name != "manifest.json", "it has itself among its files");
    for (const absl::string_view part : absl::StrSplit(file.name, '/')) {
      Require(!part.empty() && part != "." && part != "..", "a name may leave the folder");
    }
  }
  for (const std::string& digest : manifest.digests) {
    Require(digest.empty() || (digest.size() == 32 &&
                               digest.find_first_not_of("0123456789abcdef") == std::string::npos),
            "a digest is none");
  }
  const std::string text = FormatManifest(manifest);
  const auto again = ParseManifest(text, "again");
  Require(again.ok(), "it is refused when it is written and read again");
  Require(FormatManifest(*again) == text, "it changes when it is written and read again");
}

Manifest Seed() {
  Manifest manifest;
  manifest.run_id = "run";
  manifest.job = "job";
  manifest.step = 7;
  manifest.unix_ms = 1;
  manifest.world_size = 2;
  manifest.next_sample = 56;
  manifest.samples = 1000;
  return manifest;
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  Manifest full = Seed();
  full.digests[0] = full.digests[2] = "0123456789abcdef0123456789abcdef";
  full.files = {{"state-00000-of-00001.safetensors", 1234, 0xdeadbeef},
                {"assets/config.json", 0, 0},
                {"model/model.safetensors", 99, 1}};
  full.spec.set_name("job");
  full.spec.set_gradient_clipping(0.5);
  full.spec.set_deterministic(true);
  full.spec.mutable_model()->set_architecture("llama");
  full.spec.mutable_model()->set_rope_theta(1e4);
  full.spec.mutable_model()->add_trainable("blocks.*");
  full.spec.mutable_optimizer()->mutable_params()->add_betas(0.9);
  return {FormatManifest(Seed()), FormatManifest(full)};
}

}  // namespace zeroshard

// The input as it is, and with a right checksum, which lets changed ones past the first check.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  const std::string body = input.substr(0, input.rfind(zeroshard::kSeal));
  const std::string sealed = absl::StrFormat("%s%s%08x\"}\n", body, zeroshard::kSeal,
                                             zeroshard::Crc32c(body.data(), body.size()));
  for (const std::string& text : {input, sealed}) {
    const auto manifest = zeroshard::ParseManifest(text, "input");
    if (manifest.ok()) zeroshard::Check(*manifest);
  }
  return 0;
}
