#include "common/bulk/shared_region.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/checksum.h"
#include "common/descriptor.h"
#include "common/files.h"
#include "common/random_id.h"
#include "common/status_macros.h"

namespace zeroshard::bulk {
namespace {

constexpr char kPrefix[] = "zeroshard-";
constexpr size_t kDigits = 32;
constexpr char kMagic[8] = {'Z', 'S', 'R', 'E', 'G', 'I', 'O', 'N'};
constexpr uint32_t kVersion = 1;
constexpr size_t kWaitingAt = 64;
constexpr size_t kStatesAt = 128;
constexpr size_t kStateBytes = 64;
constexpr size_t kSlotsAt = 4096;
constexpr uint32_t kFree = 0;
constexpr uint32_t kBusy = 1;
// What stays free for others, NCCL among them; half where there is less than twice that.
constexpr uint64_t kOthers = uint64_t{256} << 20;
// A maker locks its file as soon as it has made it; younger ones are let be.
constexpr absl::Duration kSettled = absl::Seconds(60);

static_assert(kStatesAt + kStateBytes * SharedRegion::kMostSlots <= kSlotsAt);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// As it lies in the file; both ends are one machine's.
struct Head {
  char magic[8];
  uint32_t version;
  uint32_t slots;
  uint64_t bytes;
  char digits[kDigits];
};
static_assert(sizeof(Head) <= kWaitingAt && offsetof(Head, digits) == 24);

size_t BytesOf(int slots) { return kSlotsAt + static_cast<size_t>(slots) * kMaxPayload; }

bool IsName(absl::string_view name) {
  if (name.size() != sizeof(kPrefix) - 1 + kDigits) return false;
  if (name.substr(0, sizeof(kPrefix) - 1) != kPrefix) return false;
  name.remove_prefix(sizeof(kPrefix) - 1);
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

absl::Status Strange(const std::string& path, absl::string_view why) {
  return absl::FailedPreconditionError(absl::StrCat(path, " is no region of this user's: ", why));
}

// What the file is, before it is mapped.
absl::Status CheckFile(const std::string& path, int fd, size_t* bytes) {
  struct stat file {};
  if (fstat(fd, &file) != 0) return ErrnoError(errno, "look at", path);
  if (!S_ISREG(file.st_mode)) return Strange(path, "it is no regular file");
  if (file.st_uid != geteuid()) {
    return Strange(path, absl::StrCat("user ", file.st_uid, " owns it, this is ", geteuid()));
  }
  if ((file.st_mode & 0777) != 0600) {
    return Strange(path, absl::StrCat("its mode is ", absl::Hex(file.st_mode & 0777), ", not 180"));
  }
  if (file.st_nlink != 1) {
    return Strange(path, absl::StrCat("it has ", file.st_nlink, " names instead of one"));
  }
  const auto size = static_cast<uint64_t>(file.st_size);
  if (file.st_size < 0 || size < BytesOf(1) || size > BytesOf(SharedRegion::kMostSlots) ||
      (size - kSlotsAt) % kMaxPayload != 0) {
    return Strange(path, absl::StrCat("no region has ", file.st_size, " bytes"));
  }
  // Else a write could find no room later, which a mapping cannot bear.
  if (static_cast<uint64_t>(file.st_blocks) * 512 < size) {
    return Strange(path, "not all of it is allocated");
  }
  *bytes = size;
  return absl::OkStatus();
}

absl::Status CheckHead(const std::string& path, absl::string_view name, const char* memory,
                       size_t bytes) {
  Head head;
  std::memcpy(&head, memory, sizeof(head));
  if (std::memcmp(head.magic, kMagic, sizeof(kMagic)) != 0) {
    return Strange(path, "it does not begin with ZSREGION");
  }
  if (head.version != kVersion) {
    return Strange(path, absl::StrCat("its format has version ", head.version, ", known is ",
                                      kVersion, ": the peer is of another release"));
  }
  if (head.bytes != bytes || head.slots != (bytes - kSlotsAt) / kMaxPayload) {
    return Strange(path, absl::StrCat("it says ", head.slots, " slots and ", head.bytes,
                                      " bytes, it has ", bytes));
  }
  if (absl::string_view(head.digits, kDigits) != name.substr(sizeof(kPrefix) - 1)) {
    return Strange(path, "it was made under another name");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Make(int slots,
                                                                 const std::string& folder) {
  if (slots < 1 || slots > kMostSlots) {
    return absl::InvalidArgumentError(
        absl::StrCat("a region of ", slots, " slots; it has from 1 to ", kMostSlots));
  }
  const size_t bytes = BytesOf(slots);
  struct statvfs space {};
  if (statvfs(folder.c_str(), &space) != 0) {
    return absl::FailedPreconditionError(ErrnoError(errno, "look at", folder).message());
  }
  const uint64_t free = uint64_t{space.f_bavail} * space.f_frsize;
  const uint64_t others = std::min(kOthers, uint64_t{space.f_blocks} * space.f_frsize / 2);
  if (free < bytes + others) {
    return absl::ResourceExhaustedError(
        absl::StrCat(folder, " has ", free, " bytes free; a region takes ", bytes, " and leaves ",
                     others, " to others: make it larger"));
  }
  std::shared_ptr<SharedRegion> region(new SharedRegion);
  const std::string digits = RandomId();
  region->name_ = absl::StrCat(kPrefix, digits);
  const std::string path = absl::StrCat(folder, "/", region->name_);
  Descriptor fd(open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (fd.get() < 0) {
    return absl::FailedPreconditionError(ErrnoError(errno, "make", path).message());
  }
  region->path_ = path;
  region->fd_ = fd.release();
  // For RemoveStale. Nobody else knows the name yet.
  if (flock(region->fd_, LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(ErrnoError(errno, "lock", path).message());
  }
  if (const int error = posix_fallocate(region->fd_, 0, static_cast<off_t>(bytes)); error != 0) {
    const absl::Status status =
        ErrnoError(error, absl::StrCat("allocate ", bytes, " bytes of"), path);
    return absl::ResourceExhaustedError(status.message());
  }
  if (fchmod(region->fd_, 0600) != 0) {  // whatever the umask
    return absl::FailedPreconditionError(ErrnoError(errno, "set the mode of", path).message());
  }
  ZS_RETURN_IF_ERROR(region->MapFile(region->fd_, bytes));
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof(kMagic));
  head.version = kVersion;
  head.slots = static_cast<uint32_t>(slots);
  head.bytes = bytes;
  std::memcpy(head.digits, digits.data(), kDigits);
  std::memcpy(region->memory_, &head, sizeof(head));
  return region;
}

absl::StatusOr<std::shared_ptr<SharedRegion>> SharedRegion::Map(const std::string& name,
                                                                const std::string& folder) {
  if (!IsName(name)) {
    return absl::InvalidArgumentError(
        "the name of a region of shared memory is zeroshard- and 32 hexadecimal digits; the peer "
        "sent another");
  }
  const std::string path = absl::StrCat(folder, "/", name);
  const Descriptor fd(open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) {
    if (errno == ENOENT) return absl::NotFoundError(absl::StrCat("there is no ", path, " here"));
    return absl::FailedPreconditionError(ErrnoError(errno, "open", path).message());
  }
  size_t bytes = 0;
  ZS_RETURN_IF_ERROR(CheckFile(path, fd.get(), &bytes));
  std::shared_ptr<SharedRegion> region(new SharedRegion);
  region->name_ = name;
  ZS_RETURN_IF_ERROR(region->MapFile(fd.get(), bytes));
  ZS_RETURN_IF_ERROR(CheckHead(path, name, region->memory_, bytes));
  return region;
}

absl::Status SharedRegion::MapFile(int fd, size_t bytes) {
  // Not populated: slots that are never used are not resident.
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    return absl::FailedPreconditionError(ErrnoError(errno, "map", name_).message());
  }
  memory_ = static_cast<char*>(memory);
  bytes_ = bytes;
  slots_ = static_cast<int>((bytes - kSlotsAt) / kMaxPayload);
  slots_begin_ = memory_ + kSlotsAt;
  return absl::OkStatus();
}

SharedRegion::~SharedRegion() {
  Unlink();
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

void SharedRegion::Unlink() {
  if (!path_.empty()) unlink(path_.c_str());
  path_.clear();
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

int SharedRegion::RemoveStale(const std::string& folder, absl::Time now) {
  DIR* const entries = opendir(folder.c_str());
  if (entries == nullptr) return 0;
  int removed = 0;
  while (const dirent* entry = readdir(entries)) {
    if (!IsName(entry->d_name)) continue;
    const Descriptor fd(
        openat(dirfd(entries), entry->d_name, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
    struct stat file {};
    if (fd.get() < 0 || fstat(fd.get(), &file) != 0) continue;
    if (!S_ISREG(file.st_mode) || file.st_uid != geteuid()) continue;
    if (now - absl::FromTimeT(file.st_ctime) < kSettled) continue;
    if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) continue;  // its maker lives
    if (unlinkat(dirfd(entries), entry->d_name, 0) == 0) ++removed;
  }
  closedir(entries);
  return removed;
}

// --- slots -----------------------------------------------------------------------------------

std::atomic<uint32_t>& SharedRegion::State(int slot) const {
  return *reinterpret_cast<std::atomic<uint32_t>*>(memory_ + kStatesAt +
                                                   static_cast<size_t>(slot) * kStateBytes);
}

std::atomic<uint32_t>& SharedRegion::Waiting() const {
  return *reinterpret_cast<std::atomic<uint32_t>*>(memory_ + kWaitingAt);
}

// The lowest one: it was used most recently, and lies in the cache.
std::optional<int> SharedRegion::Take() {
  for (int slot = 0; slot < slots_; ++slot) {
    uint32_t free = kFree;
    // In one order with Waiting: who frees a slot sees that it is waited for, or is seen.
    if (State(slot).compare_exchange_strong(free, kBusy)) return slot;
  }
  return std::nullopt;
}

void SharedRegion::Free(int slot) { State(slot).store(kFree); }

absl::StatusOr<SharedRegion::Claim> SharedRegion::ClaimSlot(int slot) {
  if (slot < 0 || slot >= slots_) {
    return absl::InvalidArgumentError(
        absl::StrCat("a bulk frame in slot ", slot, " of a region that has ", slots_));
  }
  const uint64_t bit = uint64_t{1} << slot;
  if ((claimed_.fetch_or(bit) & bit) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a bulk frame in slot ", slot, ", whose last frame is still being read"));
  }
  if (State(slot).load() != kBusy) {
    claimed_.fetch_and(~bit);
    return absl::InvalidArgumentError(
        absl::StrCat("a bulk frame in slot ", slot, ", which is free"));
  }
  return Claim(shared_from_this(), slot);
}

SharedRegion::Claim& SharedRegion::Claim::operator=(Claim&& other) noexcept {
  if (this == &other) return *this;
  Release();
  region_ = std::move(other.region_);
  slot_ = other.slot_;
  return *this;
}

void SharedRegion::Claim::Release() {
  if (region_ == nullptr) return;
  region_->claimed_.fetch_and(~(uint64_t{1} << slot_));
  region_->Free(slot_);
  region_.reset();
}

void SharedRegion::SetWaiting() { Waiting().store(1); }

bool SharedRegion::TakeWaiting() { return Waiting().load() != 0 && Waiting().exchange(0) != 0; }

uint32_t CopyWithCrc32c(const char* from, size_t bytes, char* to) {
  constexpr size_t kBlock = size_t{8} << 10;
  uint32_t crc = 0;
  for (size_t at = 0; at < bytes; at += kBlock) {
    const size_t n = std::min(kBlock, bytes - at);
    std::memcpy(to + at, from + at, n);
    crc = ExtendCrc32c(crc, to + at, n);
  }
  return crc;
}

}  // namespace zeroshard::bulk
