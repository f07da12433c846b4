#include <chrono>
#include "tests/worker/train/guarded_backend.h"
#include "tests/worker/train/offload_harness.h"
namespace zeroshard {
namespace {
TEST(Quick, Timing) {
  const MemoryDataset data = TinyData();
  for (int world : {1, 2, 3}) for (int stage : {0, 3}) {
    const v1::JobSpec spec = Spec(TinyGpt2(), {world, stage}, Offload::kNone, {"steps=2"});
    const std::string expected = TrainFingerprint(spec, {.world = world}, data);
    for (uint64_t seed : {0, 1, 2, 3}) {
      const auto start = std::chrono::steady_clock::now();
      EXPECT_EQ(TrainFingerprint(spec, {.world = world, .backend = GuardedBackend(seed)}, data), expected) << world << stage << seed;
      printf("world %d stage %d seed %d: %.3f\n", world, stage, (int)seed, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  }
}
}
}
