// The chunks of one job on one store, in a file of the NVMe folder (chunk_layout.h has the format).
// A file belongs to a run, an epoch and an incarnation of a store: it is made new for each of them
// and nothing ever reads another one's, so what is in it may be trusted as far as its checksums go.
//
// What was written and where is kept in memory: of every block its version, its CRC-32C and the
// version on its label. What is read must be of the version asked for and must pass both; else it
// is DATA_LOSS, and the message tells a flipped byte from a write that never reached the disk.
//
// Versions and snapshots. The version of a block is the step that its caller names. The state of a
// chunk (master, exp_avg, exp_avg_sq) is updated where it lies, block by block. Where a snapshot
// still needs it (Preserve), the new version goes to one of the spare slots instead, so nothing is
// copied; without a free slot the update waits until the snapshot has read that chunk (Release).
// The next update brings the chunk home again and frees the slot.
//
//   Preserve() ── snapshot reads Preserved(number) ── Release(chunk, number) ...   beside
//   BeginUpdate(chunk) ── Read old, Write new ── FinishUpdate(chunk) ...
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "shard_store/nvme/aio.h"
#include "shard_store/nvme/chunk_layout.h"

namespace zeroshard::nvme {

struct ChunkFileOptions {
  std::string dir;  // --nvme-dir; it must be there
  std::string run_id, incarnation;
  uint64_t epoch = 0;
  std::map<uint32_t, ChunkShape> chunks;
  int spare_slots = 4;
  AsyncIo* io = nullptr;  // these outlive the file and what it has started
  DiskHook* hook = nullptr;
  absl::Duration timeout = absl::Seconds(60);  // of making it, and of waiting for a buffer
};

// Thread-safe. The one rule that callers keep: of one block, one write at a time.
class ChunkFile : public std::enable_shared_from_this<ChunkFile> {
 public:
  using Done = AsyncIo::Done;
  // In place of a version: what the snapshot of this number preserves.
  static constexpr uint64_t Preserved(uint64_t number) { return number | kPreservedBit; }

  // Takes all of the file's space at once. RESOURCE_EXHAUSTED: the disk has less free, with the
  // path, the bytes wanted and those free; errors of the file system, with the path.
  static absl::StatusOr<std::shared_ptr<ChunkFile>> Create(const ChunkFileOptions& options);
  // Removes the file. Writes that were started keep this alive until they have ended, just before
  // they call back.
  ~ChunkFile();

  const ChunkLayout& layout() const { return layout_; }
  const std::string& path() const { return file_->path(); }
  bool direct() const { return file_->direct(); }

  // --- blocks; a buffer holds kBufferBytes ---
  // Writes the block whose payload is at the buffer's start (the rest of it is overwritten). State
  // goes where BeginUpdate said, else home. Returns at once; where the status is an error, `done`
  // is not called. INVALID_ARGUMENT: no such block, or too small a buffer; FAILED_PRECONDITION: the
  // block is being written, or preserved.
  absl::Status Write(const BlockId& id, uint64_t version, IoBuffer buffer, Done done);
  // Reads it; before anything is made of the payload, Check must have passed. FAILED_PRECONDITION:
  // no block of that version is here (of frozen chunks, which have no staging, any version will
  // do).
  absl::Status Read(const BlockId& id, uint64_t version, IoBuffer buffer, Done done);
  // Apart from Read because it takes time (the whole payload is summed): call it on a thread that
  // computes. DATA_LOSS: path, chunk, section, offset, seen and wanted; FAILED_PRECONDITION: the
  // block was overwritten meanwhile.
  absl::Status Check(const BlockId& id, uint64_t version, const IoBuffer& buffer);

  // --- bytes, on the calling thread, which waits; not on one of AsyncIo ---
  absl::Status WriteSection(uint32_t chunk, Section section, uint64_t version,
                            absl::Span<const char> bytes, BufferPool* pool);
  // Bytes [begin, begin + to.size()) of a section, checked.
  absl::Status ReadRange(uint32_t chunk, Section section, uint64_t version, uint64_t begin,
                         absl::Span<char> to, BufferPool* pool);

  // --- versions ---
  // Decides where the next version of a chunk's state goes. False: it must wait for the snapshot;
  // `retry` is called once when it is worth trying again, from any thread (null: not at all).
  absl::StatusOr<bool> BeginUpdate(uint32_t chunk, std::function<void()> retry);
  void FinishUpdate(uint32_t chunk);
  // A step that was skipped: what is of version `from` is of version `to`, unchanged.
  void AdvanceVersion(uint64_t from, uint64_t to);
  // What was staged is void; reading it is an error until it is written again.
  void DropStaging();

  // Begins a snapshot and numbers it. FAILED_PRECONDITION while there is one already. Not beside an
  // update. What these two, and reads, say of one that has ended does nothing to the next: reads of
  // it are FAILED_PRECONDITION, also where they began before its end. They may call what waits.
  absl::StatusOr<uint64_t> Preserve();
  void Release(uint32_t chunk, uint64_t number);  // the snapshot has read it
  void ReleaseAll(uint64_t number);               // and has ended
  int free_spare_slots() const;

  // CRC-32C of all bytes of a section, without reading them: those of its blocks, combined.
  absl::StatusOr<uint32_t> SectionCrc(uint32_t chunk, Section section, uint64_t version) const;

 private:
  static constexpr uint64_t kPreservedBit = uint64_t{1} << 63;

  struct Record {
    uint64_t version = 0;  // what it counts as
    uint64_t written = 0;  // what its label says
    uint32_t crc = 0;
    bool valid = false, writing = false;
    bool dropped = false;  // while it was being written
  };
  using Records = std::array<std::vector<Record>, kSections>;
  struct Copy {
    ChunkLayout::Place place;
    Records records;  // of a spare slot: state alone
    bool preserved = false;
  };
  struct Chunk {
    const ChunkLayout::Entry* entry = nullptr;
    Copy home, spare;
    int spare_slot = -1;
    bool current_is_spare = false;
    std::optional<bool> updating_spare;  // set during an update
    Copy& current() { return current_is_spare ? spare : home; }
  };
  struct Found {
    const ChunkLayout::Entry* entry = nullptr;
    Record* record = nullptr;
    uint64_t offset = 0;
  };

  ChunkFile(ChunkFileOptions options, ChunkLayout layout, std::shared_ptr<DirectFile> file,
            uint64_t file_id);
  absl::Status WriteHeader();
  absl::StatusOr<const ChunkLayout::Entry*> CheckId(const BlockId& id) const;
  // With the lock held.
  absl::StatusOr<Found> FindToRead(const BlockId& id, uint64_t version);
  absl::StatusOr<Found> FindToWrite(const BlockId& id);
  void FreeSpare(Chunk* chunk);
  void Release(Chunk* chunk);
  std::string Name(const BlockId& id) const;

  const ChunkFileOptions options_;
  const ChunkLayout layout_;
  const std::shared_ptr<DirectFile> file_;
  const uint64_t file_id_;
  mutable std::mutex mutex_;
  std::map<uint32_t, Chunk> chunks_;
  std::vector<int> free_slots_;
  bool preserving_ = false;
  uint64_t preserved_ = 0;  // number of the latest snapshot
  std::vector<std::function<void()>> waiting_;
};

}  // namespace zeroshard::nvme
