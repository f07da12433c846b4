// Memory that the two ends of a Bulk stream share where they are processes of one host and user:
// payloads are copied into its slots and used there; only their headers travel.
//
// The asking side makes a file in /dev/shm, allocates all of it, maps it and names it in its hello.
// The store checks it and maps it, and says so in its welcome. Then the name goes: the memory goes
// with the last of the two mappings. A region belongs to one stream, thus to one generation.
//
// Name: zeroshard- and 32 lower-case hexadecimal digits. Content, little endian:
//
//   offset  bytes  field
//        0      8  magic "ZSREGION"
//        8      4  version, 1
//       12      4  slots
//       16      8  bytes of the whole file
//       24     32  the digits of its name
//       64      4  the store waits for a free slot: 1, else 0
//      128     64  by slot: 4 bytes, 0 free, 1 busy; each on a cache line of its own
//     4096         the slots, kMaxPayload bytes each
//
// Whoever sends takes a free slot, fills it and names it in a frame's header. Whoever receives the
// frame claims the slot, reads it and frees it. gRPC keeps the order of the frames.
//
// What may be trusted: nothing that the other side writes here is used as a length or a place, and
// a slot is claimed once at a time. Payloads have checksums, but a process of the same user could
// change a slot after it was checked, as it could have sent other values; it could also truncate
// the file, which a mapping cannot bear (SIGBUS). Other users cannot open it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/bulk/frame.h"

namespace zeroshard::bulk {

// Thread-safe, but for Unlink, which is for one thread at a time.
class SharedRegion : public std::enable_shared_from_this<SharedRegion> {
 public:
  static constexpr char kFolder[] = "/dev/shm";
  static constexpr int kMostSlots = kMaxSlot;

  // The asking side's. FAILED_PRECONDITION where there is no such folder or it cannot be mapped,
  // RESOURCE_EXHAUSTED where it has no room, of which others (NCCL) need some too.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Make(int slots,
                                                            const std::string& folder = kFolder);
  // The store's. INVALID_ARGUMENT: no name of a region; NOT_FOUND: not there, as where the peer is
  // on another host; FAILED_PRECONDITION: it is not what a peer of this user makes, and why.
  static absl::StatusOr<std::shared_ptr<SharedRegion>> Map(const std::string& name,
                                                           const std::string& folder = kFolder);
  // Takes names away whose makers were killed between making and Unlink, at least a minute before
  // `now`. Returns how many.
  static int RemoveStale(const std::string& folder = kFolder, absl::Time now = absl::Now());

  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  const std::string& name() const { return name_; }
  int slots() const { return slots_; }
  // The name goes; idempotent. Of a mapped region: nothing to do.
  void Unlink();

  // --- sending ---
  // A slot that was free and is busy now: the caller's to fill and to send. Nothing: all are busy.
  std::optional<int> Take();
  // kMaxPayload bytes.
  char* Slot(int slot) { return slots_begin_ + size_t(slot) * kMaxPayload; }
  // Gives back what was taken and not sent.
  void Free(int slot);

  // --- receiving ---
  // A slot that was sent, until it is told otherwise or goes. Keeps the region mapped.
  class Claim {
   public:
    Claim() = default;
    Claim(Claim&& other) noexcept : region_(std::move(other.region_)), slot_(other.slot_) {}
    Claim& operator=(Claim&& other) noexcept;
    ~Claim() { Release(); }
    // The slot is free again; idempotent.
    void Release();
    bool held() const { return region_ != nullptr; }

   private:
    friend class SharedRegion;
    Claim(std::shared_ptr<SharedRegion> region, int slot)
        : region_(std::move(region)), slot_(slot) {}

    std::shared_ptr<SharedRegion> region_;
    int slot_ = 0;
  };
  // INVALID_ARGUMENT: the region has no such slot, it is not busy, or it is claimed already.
  absl::StatusOr<Claim> ClaimSlot(int slot);

  // --- the store waits for a free slot ---
  // The asking side, when it has freed one, sends a kRoom frame if this was set since it asked
  // last. Whoever sets it must try Take again before it waits.
  void SetWaiting();
  bool TakeWaiting();

 private:
  SharedRegion() = default;
  std::atomic<uint32_t>& State(int slot) const;
  std::atomic<uint32_t>& Waiting() const;
  absl::Status MapFile(int fd, size_t bytes);

  std::string name_;  // without the folder
  std::string path_;  // not empty: there is a name to be taken away
  int fd_ = -1;       // locked for as long as there is
  char* memory_ = nullptr;
  size_t bytes_ = 0;
  int slots_ = 0;
  char* slots_begin_ = nullptr;
  std::atomic<uint64_t> claimed_{0};  // by bit
};

// Copies and computes the CRC-32C of what was copied, in blocks that stay in the first cache.
uint32_t CopyWithCrc32c(const char* from, size_t bytes, char* to);

}  // namespace zeroshard::bulk
