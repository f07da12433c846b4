// A bulk frame is refused, or what it announces is what is there and it is written again as it was.
// A slot that it names is claimed only where one was sent and nobody reads it yet.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "common/bulk/frame.h"
#include "common/bulk/shared_region.h"
#include "common/checksum.h"
#include "tests/fuzz/fuzz_target.h"

namespace zeroshard {
namespace {

constexpr int kSlots = 3;

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "accepted a frame although %s\n", what);
  std::abort();
}

// `input` has a block of its own, so that a read beyond it is seen.
void Check(const std::vector<char>& input) {
  const auto header = bulk::Decode(absl::string_view(input.data(), input.size()), input.size());
  if (!header.ok()) return;
  Require(input.size() == bulk::kHeaderBytes + (header->slot == 0 ? header->bytes : 0),
          "its length is another");
  Require(header->slot <= bulk::kMaxSlot, "no region has its slot");
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

// Without a name, in whatever folder can be written to.
std::shared_ptr<bulk::SharedRegion> MakeRegion() {
  auto region = bulk::SharedRegion::Make(kSlots, "/tmp");
  if (!region.ok()) {
    std::fprintf(stderr, "%s\n", region.status().ToString().c_str());
    std::abort();
  }
  (*region)->Unlink();
  return *std::move(region);
}

// Two bits choose what is done, the others with which slot, some of which there are not.
void CheckSlots(const uint8_t* data, size_t size) {
  static const std::shared_ptr<bulk::SharedRegion> region = MakeRegion();
  bool busy[kSlots] = {};
  std::vector<bulk::SharedRegion::Claim> claims(kSlots);
  for (size_t i = 0; i < size; ++i) {
    const int slot = (data[i] >> 2) - 8;
    const bool there = slot >= 0 && slot < kSlots;
    if (data[i] % 4 == 0) {
      const auto taken = region->Take();
      int free = 0;
      while (free < kSlots && busy[free]) ++free;
      Require(taken.has_value() == (free < kSlots), "there was no free slot for it");
      if (taken.has_value()) busy[*taken] = true;
    } else if (data[i] % 4 == 1) {
      auto claim = region->ClaimSlot(slot);
      const bool may = there && busy[slot] && !claims[slot].held();
      Require(claim.ok() == may, "its slot was not its own");
      if (claim.ok()) claims[slot] = *std::move(claim);
    } else if (there && claims[slot].held()) {
      claims[slot].Release();
      busy[slot] = false;
    }
  }
  claims.clear();
  for (int slot = 0; slot < kSlots; ++slot) region->Free(slot);
}

}  // namespace

std::vector<std::string> FuzzSeeds() {
  std::vector<std::string> seeds;
  for (int type = 1; type <= 9; ++type) {
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
    if (!elements) continue;
    header.slot = static_cast<uint16_t>(type);
    seed.resize(bulk::kHeaderBytes);
    bulk::Encode(header, seed.data());
    seeds.push_back(seed);
  }
  // Takes all slots, claims them twice, frees them, and claims what there is not.
  seeds.push_back(std::string({'\0', '\0', '\0', '\0', '\x21', '\x25', '\x29', '\x21', '\x22',
                               '\x26', '\0', '\x21', '\x01', '\xfd', '\x2d'}));
  return seeds;
}

}  // namespace zeroshard

// The input as it is, and with a right checksum, which lets changed ones past the first check.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<char> input(data, data + size);
  zeroshard::Check(input);
  zeroshard::CheckSlots(data, size);
  if (size < zeroshard::bulk::kHeaderBytes) return 0;
  const uint32_t crc = zeroshard::Crc32c(input.data(), zeroshard::bulk::kHeaderBytes - 4);
  for (size_t i = 0; i < 4; ++i) {
    input[zeroshard::bulk::kHeaderBytes - 4 + i] = static_cast<char>(crc >> (8 * i));
  }
  zeroshard::Check(input);
  return 0;
}
