// A bulk frame is refused, or what it announces is what is there and it is written again as it was.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/bulk/frame.h"
#include "common/checksum.h"
#include "tests/fuzz/fuzz_target.h"

namespace zeroshard {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "accepted a frame although %s\n", what);
  std::abort();
}

// `input` has a block of its own, so that a read beyond it is seen.
void Check(const std::vector<char>& input) {
  const auto header = bulk::Decode(absl::string_view(input.data(), input.size()), input.size());
  if (!header.ok()) return;
  Require(input.size() == bulk::kHeaderBytes + header->bytes, "its length is another");
  Require(header->bytes <= bulk::kMaxPayload, "its payload is too long");
  Require(header->count <= bulk::kMaxElements, "it has too many elements");
  Require(header->begin <= bulk::kMaxElements, "it begins too late");
  if (header->type == bulk::FrameType::kPush || header->type == bulk::FrameType::kData) {
    Require(uint64_t{header->count} * SizeOf(header->dtype) == header->bytes,
            "its elements are not its bytes");
  }
  char again[bulk::kHeaderBytes];
  bulk::Encode(*header, again);
  Require(std::memcmp(again, input.data(), sizeof(again)) == 0, "it changes when written again");
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  for (int type = 1; type <= 8; ++type) {
    bulk::Header header;
    header.type = static_cast<bulk::FrameType>(type);
    header.dtype = type % 2 == 0 ? DType::kF32 : DType::kBF16;
    header.generation = 3;
    header.epoch = 1;
    header.step = 1000;
    header.chunk = 12;
    header.begin = 64;
    header.tag = 9;
    const bool elements =
        header.type == bulk::FrameType::kPush || header.type == bulk::FrameType::kData;
    const bool text =
        header.type == bulk::FrameType::kHello || header.type == bulk::FrameType::kError;
    header.count = 2;
    header.bytes = elements ? 2 * static_cast<uint32_t>(SizeOf(header.dtype)) : text ? 5 : 0;
    std::string seed(bulk::kHeaderBytes + header.bytes, 'x');
    bulk::Encode(header, seed.data());
    seeds.push_back(seed);
  }
  return seeds;
}

}  // namespace zeroshard

// The input as it is, and with a right checksum, which lets changed ones past the first check.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<char> input(data, data + size);
  zeroshard::Check(input);
  if (size < zeroshard::bulk::kHeaderBytes) return 0;
  const uint32_t crc = zeroshard::Crc32c(input.data(), zeroshard::bulk::kHeaderBytes - 4);
  for (size_t i = 0; i < 4; ++i) {
    input[zeroshard::bulk::kHeaderBytes - 4 + i] = static_cast<char>(crc >> (8 * i));
  }
  zeroshard::Check(input);
  return 0;
}
