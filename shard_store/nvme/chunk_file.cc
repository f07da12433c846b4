#include "shard_store/nvme/chunk_file.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/checksum.h"
#include "common/files.h"
#include "common/random_id.h"
#include "common/status_macros.h"
#include "shard_store/nvme/crc_combine.h"
#include "shard_store/nvme/stale_files.h"
#include "shard_store/nvme/wait_group.h"

namespace zeroshard::nvme {
namespace {

absl::Span<const char> LabelOf(const IoBuffer& buffer, uint32_t payload) {
  return {buffer.data() + ChunkLayout::PaddedBytes(payload), kLabelBytes};
}

bool IsState(Section section) { return section <= kExpAvgSq; }

// Frozen chunks never change: any version of theirs is the same.
bool IsFrozen(const ChunkLayout::Entry& entry) { return entry.element_bytes[kStaging] == 0; }

}  // namespace

absl::StatusOr<std::shared_ptr<ChunkFile>> ChunkFile::Create(const ChunkFileOptions& options) {
  if (options.io == nullptr) return absl::InvalidArgumentError("a file of chunks needs an AsyncIo");
  if (options.incarnation.size() > 64) {
    return absl::InvalidArgumentError(absl::StrCat("incarnation of ", options.incarnation.size(),
                                                   " bytes; the header has room for 64"));
  }
  ZS_ASSIGN_OR_RETURN(ChunkLayout layout, ChunkLayout::Make(options.chunks, options.spare_slots));
  ZS_ASSIGN_OR_RETURN(std::shared_ptr<DirectFile> file,
                      CreateChunkFile(options.dir, options.run_id, options.hook, options.timeout));
  uint64_t file_id = 0;
  for (const char c : RandomId().substr(0, 16)) {
    file_id = file_id << 4 | static_cast<uint64_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  const std::shared_ptr<ChunkFile> chunks(
      new ChunkFile(options, std::move(layout), std::move(file), file_id));
  ZS_RETURN_IF_ERROR(chunks->file_->Allocate(chunks->layout_.file_bytes()));
  ZS_RETURN_IF_ERROR(chunks->WriteHeader());
  return chunks;
}

ChunkFile::ChunkFile(ChunkFileOptions options, ChunkLayout layout, std::shared_ptr<DirectFile> file,
                     uint64_t file_id)
    : options_(std::move(options)),
      layout_(std::move(layout)),
      file_(std::move(file)),
      file_id_(file_id) {
  for (const auto& [number, entry] : layout_.chunks()) {
    Chunk& chunk = chunks_[number];
    chunk.entry = &entry;
    chunk.home.place = entry.home;
    for (int i = 0; i < kSections; ++i) {
      if (entry.element_bytes[i] == 0) continue;
      chunk.home.records[i].resize(static_cast<size_t>(entry.blocks()));
    }
  }
  for (int i = layout_.spare_slots(); i-- > 0;) free_slots_.push_back(i);
}

ChunkFile::~ChunkFile() { unlink(file_->path().c_str()); }

absl::Status ChunkFile::WriteHeader() {
  ZS_ASSIGN_OR_RETURN(const auto arena, BufferArena::Create(1, kHeaderBytes));
  ZS_ASSIGN_OR_RETURN(const auto pool, BufferPool::Create(arena, 1));
  IoBuffer buffer = pool->TryTake();
  FileHeader header;
  header.chunks = static_cast<uint32_t>(layout_.chunks().size());
  header.spare_slots = static_cast<uint32_t>(layout_.spare_slots());
  header.epoch = options_.epoch;
  header.file_id = file_id_;
  header.file_bytes = layout_.file_bytes();
  header.layout_crc = layout_.checksum();
  header.run_id = options_.run_id;
  header.incarnation = options_.incarnation;
  Encode(header, buffer.data());
  WaitGroup group;
  options_.io->Write(file_, 0, kHeaderBytes, std::move(buffer), group.Add());
  return group.Wait();
}

std::string ChunkFile::Name(const BlockId& id) const {
  return absl::StrCat(file_->path(), ": chunk ", id.chunk, " ", NameOf(id.section), " block ",
                      id.block);
}

absl::StatusOr<const ChunkLayout::Entry*> ChunkFile::CheckId(const BlockId& id) const {
  const ChunkLayout::Entry* entry = layout_.Find(id.chunk);
  if (entry != nullptr && id.section >= 0 && id.section < kSections && id.block >= 0 &&
      id.block < entry->blocks() && entry->element_bytes[id.section] != 0) {
    return entry;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      Name(id), " is not kept here: ",
      entry == nullptr
          ? absl::StrCat("there are ", layout_.chunks().size(), " chunks, not this one")
          : absl::StrCat("the chunk has ", entry->shape.elements, " elements in ", entry->blocks(),
                         " blocks, ", entry->element_bytes[std::clamp<int>(id.section, 0, 4)],
                         " bytes an element of this section")));
}

absl::StatusOr<ChunkFile::Found> ChunkFile::FindToRead(const BlockId& id, uint64_t version) {
  Chunk& chunk = chunks_.find(id.chunk)->second;
  Record* newest = nullptr;
  const bool snapshot = (version & kPreservedBit) != 0;
  for (Copy* copy : {&chunk.home, &chunk.spare}) {
    std::vector<Record>& records = copy->records[id.section];
    if (records.empty()) continue;
    Record& record = records[static_cast<size_t>(id.block)];
    const bool wanted =
        IsFrozen(*chunk.entry) || (snapshot ? copy->preserved && version == Preserved(preserved_)
                                            : record.version == version);
    if (wanted && record.valid) {
      return Found{
          chunk.entry, &record,
          copy->place.section[id.section] + chunk.entry->BlockOffset(id.section, id.block)};
    }
    if (record.valid && (newest == nullptr || record.version > newest->version)) newest = &record;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      Name(id), ": ",
      snapshot ? absl::StrCat("what snapshot ", version & ~kPreservedBit, " preserves")
               : absl::StrCat("version ", version),
      " asked for, ",
      newest == nullptr ? std::string("nothing whole") : absl::StrCat("version ", newest->version),
      " is here"));
}

absl::StatusOr<ChunkFile::Found> ChunkFile::FindToWrite(const BlockId& id) {
  Chunk& chunk = chunks_.find(id.chunk)->second;
  const bool to_spare =
      IsState(id.section) && chunk.updating_spare.value_or(chunk.current_is_spare);
  Copy& copy = to_spare ? chunk.spare : chunk.home;
  Record& record = copy.records[id.section][static_cast<size_t>(id.block)];
  if (record.writing) {
    return absl::FailedPreconditionError(absl::StrCat(Name(id), " is being written already"));
  }
  if (copy.preserved && IsState(id.section)) {
    return absl::FailedPreconditionError(
        absl::StrCat(Name(id), " is preserved for a snapshot; BeginUpdate finds it another place"));
  }
  return Found{chunk.entry, &record,
               copy.place.section[id.section] + chunk.entry->BlockOffset(id.section, id.block)};
}

absl::Status ChunkFile::Write(const BlockId& id, uint64_t version, IoBuffer buffer, Done done) {
  ZS_ASSIGN_OR_RETURN(const ChunkLayout::Entry* entry, CheckId(id));
  const uint32_t payload = entry->PayloadBytes(id.section, id.block);
  const uint32_t padded = ChunkLayout::PaddedBytes(payload);
  if (buffer.size() < padded + kLabelBytes) {
    return absl::InvalidArgumentError(absl::StrCat(Name(id), ": a buffer of ", buffer.size(),
                                                   " bytes; ", padded + kLabelBytes, " wanted"));
  }
  BlockLabel label;
  label.id = id;
  label.payload_bytes = payload;
  label.version = version;
  label.file_id = file_id_;
  label.crc = Crc32c(buffer.data(), payload);
  std::memset(buffer.data() + payload, 0, padded - payload);
  Encode(label, buffer.data() + padded);
  uint64_t offset = 0;
  Record* record = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ZS_ASSIGN_OR_RETURN(const Found found, FindToWrite(id));
    record = found.record;  // copies are never resized while one of their blocks is being written
    offset = found.offset;
    *record = {version, version, label.crc, false, true, false};
  }
  options_.io->Write(file_, offset, padded + kLabelBytes, std::move(buffer),
                     [self = shared_from_this(), record, call = std::move(done)](
                         absl::Status status, IoBuffer written) mutable {
                       {
                         std::lock_guard<std::mutex> lock(self->mutex_);
                         record->writing = false;
                         record->valid = status.ok() && !record->dropped;
                       }
                       self.reset();  // who is called may count on the file to go with its owner
                       if (call) call(std::move(status), std::move(written));
                     });
  return absl::OkStatus();
}

absl::Status ChunkFile::Read(const BlockId& id, uint64_t version, IoBuffer buffer, Done done) {
  ZS_ASSIGN_OR_RETURN(const ChunkLayout::Entry* entry, CheckId(id));
  const uint32_t bytes =
      ChunkLayout::PaddedBytes(entry->PayloadBytes(id.section, id.block)) + kLabelBytes;
  if (buffer.size() < bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(id), ": a buffer of ", buffer.size(), " bytes; ", bytes, " wanted"));
  }
  uint64_t offset = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ZS_ASSIGN_OR_RETURN(const Found found, FindToRead(id, version));
    offset = found.offset;
  }
  options_.io->Read(file_, offset, bytes, std::move(buffer), std::move(done));
  return absl::OkStatus();
}

absl::Status ChunkFile::Check(const BlockId& id, uint64_t version, const IoBuffer& buffer) {
  ZS_ASSIGN_OR_RETURN(const ChunkLayout::Entry* entry, CheckId(id));
  const uint32_t payload = entry->PayloadBytes(id.section, id.block);
  if (buffer.size() < ChunkLayout::PaddedBytes(payload) + kLabelBytes) {
    return absl::InvalidArgumentError(absl::StrCat(Name(id), ": no buffer of that block"));
  }
  const uint32_t seen = Crc32c(buffer.data(), payload);
  // What is here now: a write that began before this changed what was read.
  Record wanted;
  uint64_t offset = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ZS_ASSIGN_OR_RETURN(const Found found, FindToRead(id, version));
    wanted = *found.record;
    offset = found.offset;
  }
  const absl::StatusOr<BlockLabel> label = DecodeLabel(LabelOf(buffer, payload));
  const bool named = label.ok() && label->id.chunk == id.chunk && label->id.section == id.section &&
                     label->id.block == id.block && label->payload_bytes == payload &&
                     label->file_id == file_id_;
  if (seen == wanted.crc && named && label->version == wanted.written && label->crc == wanted.crc) {
    return absl::OkStatus();
  }
  options_.io->CountDamage();
  std::string what;
  if (!label.ok()) {
    what = std::string(label.status().message());
  } else if (!named) {
    what = absl::StrCat("its label is that of chunk ", label->id.chunk, " ",
                        NameOf(label->id.section), " block ", label->id.block,
                        label->file_id == file_id_ ? "" : " of another file",
                        ": something was written to the wrong place");
  } else if (label->version != wanted.written && label->crc == seen) {
    what = absl::StrCat("what is there is whole but of version ", label->version,
                        ": the write of version ", wanted.written, " never reached the disk");
  } else {
    what = absl::StrCat("its label says version ", label->version);
  }
  return absl::DataLossError(absl::StrFormat(
      "%s (offset %u, %u bytes) is damaged: CRC-32C %08x seen, %08x of version %u wanted; %s. The "
      "disk or its driver lost or changed it: see the kernel's log and 'smartctl -a' for the disk "
      "of "
      "--nvme-dir, and replace it",
      Name(id), offset, payload, seen, wanted.crc, wanted.written, what));
}

absl::Status ChunkFile::WriteSection(uint32_t chunk, Section section, uint64_t version,
                                     absl::Span<const char> bytes, BufferPool* pool) {
  ZS_ASSIGN_OR_RETURN(const ChunkLayout::Entry* entry, CheckId({chunk, section, 0}));
  if (bytes.size() !=
      static_cast<uint64_t>(entry->shape.elements) * entry->element_bytes[section]) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name({chunk, section, 0}), ": ", bytes.size(), " bytes for a section of ",
                     entry->shape.elements, " elements of ", entry->element_bytes[section]));
  }
  WaitGroup group;
  absl::Status status;
  for (int block = 0; block < entry->blocks() && status.ok(); ++block) {
    absl::StatusOr<IoBuffer> buffer = pool->Take(options_.timeout);
    status = buffer.status();
    if (!status.ok()) break;
    const uint32_t payload = entry->PayloadBytes(section, block);
    std::memcpy(buffer->data(), bytes.data(), payload);
    bytes.remove_prefix(payload);
    AsyncIo::Done done = group.Add();
    status = Write({chunk, section, block}, version, *std::move(buffer), done);
    if (!status.ok()) done(status, IoBuffer());
  }
  const absl::Status written = group.Wait();
  return status.ok() ? written : status;
}

absl::Status ChunkFile::ReadRange(uint32_t chunk, Section section, uint64_t version, uint64_t begin,
                                  absl::Span<char> to, BufferPool* pool) {
  ZS_ASSIGN_OR_RETURN(const ChunkLayout::Entry* entry, CheckId({chunk, section, 0}));
  const uint64_t size =
      static_cast<uint64_t>(entry->shape.elements) * entry->element_bytes[section];
  if (begin > size || to.size() > size - begin) {
    return absl::InvalidArgumentError(absl::StrCat(Name({chunk, section, 0}), ": ", to.size(),
                                                   " bytes at ", begin, " of a section of ", size));
  }
  const uint64_t block_bytes =
      static_cast<uint64_t>(kBlockElements) * entry->element_bytes[section];
  // Buffers are taken without waiting while this holds one: two that wait for each other's would
  // wait for ever.
  struct Part {
    BlockId id;
    IoBuffer buffer;
  };
  while (!to.empty()) {
    std::vector<Part> parts;
    parts.reserve(static_cast<size_t>(entry->blocks()));  // never moved: operations write into them
    WaitGroup group;
    absl::Status status;
    for (uint64_t at = begin; at < begin + to.size() && status.ok();) {
      IoBuffer buffer;
      if (parts.empty()) {
        ZS_ASSIGN_OR_RETURN(buffer, pool->Take(options_.timeout));
      } else {
        buffer = pool->TryTake();
        if (!buffer) break;
      }
      const BlockId id = {chunk, section, static_cast<int>(at / block_bytes)};
      parts.push_back({id, IoBuffer()});
      AsyncIo::Done ended = group.Add();
      status = Read(id, version, std::move(buffer),
                    [part = &parts.back(), ended](absl::Status read, IoBuffer got) {
                      part->buffer = std::move(got);
                      ended(std::move(read), IoBuffer());
                    });
      if (!status.ok()) ended(status, IoBuffer());
      at = (at / block_bytes + 1) * block_bytes;
    }
    const absl::Status read = group.Wait();
    ZS_RETURN_IF_ERROR(status);
    ZS_RETURN_IF_ERROR(read);
    for (const Part& part : parts) {
      ZS_RETURN_IF_ERROR(Check(part.id, version, part.buffer));
      const uint64_t first = begin - static_cast<uint64_t>(part.id.block) * block_bytes;
      const uint64_t count =
          std::min<uint64_t>(to.size(), entry->PayloadBytes(section, part.id.block) - first);
      std::memcpy(to.data(), part.buffer.data() + first, count);
      to.remove_prefix(count);
      begin += count;
    }
  }
  return absl::OkStatus();
}

}  // namespace zeroshard::nvme
