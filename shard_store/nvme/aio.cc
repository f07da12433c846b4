#include "shard_store/nvme/aio.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "shard_store/nvme/operation.h"

namespace zeroshard::nvme {
namespace {

// A device that says it did nothing this often in a row will not do more.
constexpr int kMostIdle = 1000;

absl::StatusOr<std::unique_ptr<AsyncIo>> MakeEngine(const AsyncIoOptions& options,
                                                    std::shared_ptr<BufferArena> arena) {
  if (options.engine == AsyncIoOptions::Engine::kThreads) return MakeThreadIo(options);
  auto ring = MakeRingIo(options, std::move(arena));
  if (ring.ok() || options.engine == AsyncIoOptions::Engine::kRing ||
      !absl::IsUnavailable(ring.status())) {
    return ring;
  }
  LogWarning(ring.status().message(), ": the disk is read and written by ",
             std::min(options.threads, options.depth),
             " threads instead, which takes more of the processor");
  return MakeThreadIo(options);
}

}  // namespace

DiskHook::Verdict Operation::Ask(DiskHook* hook) const {
  DiskHook::Verdict verdict;
  if (hook != nullptr)
    verdict = hook->OnOperation({write, file->path(), offset + done, bytes - done});
  verdict.bytes = std::min(verdict.bytes, bytes - done);
  return verdict;
}

std::string Operation::Text() const {
  return absl::StrCat(write ? "write " : "read ", bytes, " bytes at ", offset, " of ",
                      file->path());
}

absl::Status Operation::Stalled(absl::Duration limit) const {
  return absl::DeadlineExceededError(
      absl::StrCat("the device has not answered within ", absl::FormatDuration(limit),
                   " to: ", Text(), "; see the kernel's log (dmesg) for the disk of --nvme-dir"));
}

void Operation::Finish(const absl::Status& status) {
  if (counters != nullptr) {
    (write ? counters->written_bytes : counters->read_bytes) += done;
    if (!status.ok()) ++counters->errors;
  }
  const AsyncIo::Done call = std::move(callback);
  callback = nullptr;
  if (call) call(status, std::move(buffer));
}

Answer Take(Operation* operation, int64_t result, absl::Status* status) {
  const auto fail = [&](absl::Status why) {
    *status = std::move(why);
    return Answer::kFinished;
  };
  if (result == -EINTR) return Answer::kAgain;
  if (result == -EAGAIN || result == -EBUSY) return Answer::kLater;
  if (result < 0) {
    return fail(
        absl::ErrnoToStatus(static_cast<int>(-result), absl::StrCat("cannot ", operation->Text())));
  }
  const uint32_t left = operation->bytes - operation->done;
  if (result > left) {
    return fail(absl::InternalError(
        absl::StrCat("the kernel answered ", result, " bytes to: ", operation->Text())));
  }
  if (result == left) {
    operation->done = operation->bytes;
    *status = absl::OkStatus();
    return Answer::kFinished;
  }
  if (result == 0 && !operation->write) {
    return fail(absl::DataLossError(absl::StrCat(
        "cannot ", operation->Text(), ": the file ends at ", operation->offset + operation->done,
        "; was it truncated by something else?")));
  }
  // O_DIRECT goes on at multiples alone, so part of what is done may be done again.
  const uint32_t whole = static_cast<uint32_t>(result) / kAlignment * kAlignment;
  operation->done += whole;
  operation->idle = whole == 0 ? operation->idle + 1 : 0;
  if (operation->idle > kMostIdle) {
    return fail(absl::UnknownError(  // as of EIO
        absl::StrCat("cannot ", operation->Text(), ": after ", operation->done,
                     " bytes the kernel stopped going on (", kMostIdle, " tries)")));
  }
  return Answer::kAgain;
}

absl::StatusOr<std::unique_ptr<AsyncIo>> AsyncIo::Create(const AsyncIoOptions& options,
                                                         std::shared_ptr<BufferArena> arena) {
  if (options.depth < 1 || options.depth > 1024 || options.threads < 1 ||
      options.stall_limit <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "disk queue: depth ", options.depth, " (1 to 1024), threads ", options.threads,
        " (at least 1), limit ", absl::FormatDuration(options.stall_limit), " (above 0)"));
  }
  auto io = MakeEngine(options, std::move(arena));
  if (io.ok()) (*io)->counters_ = options.counters;
  return io;
}

absl::Status StartIoThread(const AsyncIoOptions& options, std::function<void()> run,
                           std::thread* thread) {
  try {
    *thread =
        options.start_thread ? options.start_thread(std::move(run)) : std::thread(std::move(run));
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this host gives the disk queue no thread more (", error.what(),
                     "); look at its limits of processes and at what else runs there"));
  }
}

void AsyncIo::Read(std::shared_ptr<const DirectFile> file, uint64_t offset, uint32_t bytes,
                   IoBuffer buffer, Done done) {
  Start(false, std::move(file), offset, bytes, std::move(buffer), std::move(done));
}

void AsyncIo::Write(std::shared_ptr<const DirectFile> file, uint64_t offset, uint32_t bytes,
                    IoBuffer buffer, Done done) {
  Start(true, std::move(file), offset, bytes, std::move(buffer), std::move(done));
}

void AsyncIo::Start(bool write, std::shared_ptr<const DirectFile> file, uint64_t offset,
                    uint32_t bytes, IoBuffer buffer, Done done) {
  auto operation = std::make_unique<Operation>();
  operation->write = write;
  operation->file = std::move(file);
  operation->offset = offset;
  operation->bytes = bytes;
  operation->buffer = std::move(buffer);
  operation->callback = std::move(done);
  operation->counters = counters_;
  if (bytes == 0 || bytes % kAlignment != 0 || offset % kAlignment != 0 ||
      offset > static_cast<uint64_t>(INT64_MAX) - bytes || bytes > operation->buffer.size()) {
    operation->refused = absl::InvalidArgumentError(absl::StrCat(
        "cannot ", operation->Text(), " with a buffer of ", operation->buffer.size(),
        " bytes: offset and bytes are multiples of ", kAlignment, ", and the buffer holds them"));
  }
  Submit(std::move(operation));
}

}  // namespace zeroshard::nvme
