#include "tests/worker/train/fp16_reference.h"

namespace zeroshard {
namespace {

TEST(Fp16ReferenceTest, ScalesAndSkipsArePyTorchsAndLossesNear) {
  ExpectFp16IsPyTorchs(1, 0, {});
  ExpectFp16IsPyTorchs(2, 1, {});
  ExpectFp16IsPyTorchs(2, 3, {});
}

}  // namespace
}  // namespace zeroshard
