// Saving and loading a checkpoint against what the disk does with the same bytes, in turns, in the
// same folder.
//
//   io_bench --dir /data/scratch --mb 1024 --rounds 5
//
// save   WriteStateFile, with its checksum and sync       beside   write() of 4 MiB and fsync()
// load   VerifyFiles, and at once every value read        beside   read() of 4 MiB, cache dropped
//
// Before each reading the file's pages are dropped from the cache, and who comes first alternates.
// Values come from and go to one buffer of 64 MiB each, so that the peak of resident memory is
// theirs and what saving and loading take.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <future>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"
#include "common/files.h"
#include "common/status_macros.h"
#include "tests/bench/support/rates.h"

namespace zeroshard {
namespace {

using bench::Now;
using bench::Rates;

constexpr size_t kBlock = size_t{4} << 20;
constexpr int64_t kTensor = int64_t{16} << 20;  // elements: 64 MiB

struct Options {
  std::string dir = ".";
  int megabytes = 1024;
  int rounds = 5;
};

double PeakMegabytes() {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

absl::Status DropCache(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoError(errno, "open", path);
  const int error = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  close(fd);
  return error == 0 ? absl::OkStatus() : ErrnoError(error, "drop the cached pages of", path);
}

// The disk's own rate of writing.
absl::Status PlainWrite(const std::string& path, const char* data, size_t size, uint64_t bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoError(errno, "create", path);
  absl::Status status;
  for (uint64_t done = 0; done < bytes && status.ok(); done += kBlock) {
    if (write(fd, data + done % size, kBlock) != static_cast<ssize_t>(kBlock)) {
      status = ErrnoError(errno, "write", path);
    }
  }
  if (status.ok() && fsync(fd) != 0) status = ErrnoError(errno, "sync", path);
  close(fd);
  return status;
}

absl::Status PlainRead(const std::string& path, char* buffer) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoError(errno, "open", path);
  ssize_t got = 0;
  while ((got = read(fd, buffer, kBlock)) > 0) {
  }
  const int error = errno;
  close(fd);
  return got == 0 ? absl::OkStatus() : ErrnoError(error, "read", path);
}

// Reads the file and drops it from the cache, so that what is timed next finds the memory that this
// used: a guest whose host takes free memory back would else pay for getting it again.
absl::Status Cool(const std::string& path, char* buffer) {
  ZS_RETURN_IF_ERROR(PlainRead(path, buffer));
  return DropCache(path);
}

absl::Status Load(const std::string& path, const std::vector<ParameterInfo>& tensors, float* out) {
  ZS_ASSIGN_OR_RETURN(const auto reader, CheckpointReader::Open(path));
  std::future<absl::Status> verified =
      std::async(std::launch::async, [&reader] { return reader->VerifyFiles(0, 1); });
  const auto source = reader->Source(StateKind::kMaster);
  for (const ParameterInfo& tensor : tensors) {
    ZS_RETURN_IF_ERROR(source->Read(tensor, 0, tensor.size, out));
  }
  return verified.get();
}

absl::Status Run(const Options& options) {
  const std::string folder = absl::StrCat(options.dir, "/io_bench.", getpid());
  ZS_RETURN_IF_ERROR(MakeFolders(folder));
  const std::string plain = folder + "/plain";

  // Bytes that no disk or file system makes less of.
  std::vector<float> values(kTensor);
  uint32_t random = 1;
  for (float& value : values) {
    random = random * 1664525 + 1013904223;
    value = static_cast<float>(random) * 1e-9f;
  }
  std::vector<StatePiece> pieces;
  std::vector<ParameterInfo> tensors;
  for (int i = 0; i < options.megabytes / 64; ++i) {
    ParameterInfo tensor;
    tensor.name = absl::StrCat("tensor.", i);
    tensor.shape = {kTensor};
    tensor.size = kTensor;
    pieces.push_back({StateKind::kMaster, tensor.name, tensor.shape, 0, kTensor, values.data()});
    tensors.push_back(tensor);
  }
  const uint64_t bytes = pieces.size() * kTensor * sizeof(float);
  const double before = PeakMegabytes();

  CheckpointStoreOptions store_options;
  store_options.dir = folder + "/checkpoints";
  store_options.job = store_options.run_id = "bench";
  store_options.keep_last = 1;
  ZS_ASSIGN_OR_RETURN(const auto store, CheckpointStore::Open(&FileSystem::Real(), store_options));
  std::vector<float> loaded(kTensor);
  std::vector<char> buffer(kBlock);
  Rates write_rate, save_rate, read_rate, load_rate;
  const auto plain_write = [&]() -> absl::Status {
    ZS_RETURN_IF_ERROR(FileSystem::Real().RemoveAll(plain));
    const double begun = Now();
    ZS_RETURN_IF_ERROR(PlainWrite(plain, reinterpret_cast<const char*>(values.data()),
                                  values.size() * sizeof(float), bytes));
    write_rate.Add(static_cast<double>(bytes) / (Now() - begun));
    return absl::OkStatus();
  };
  std::string path;
  const auto save = [&](uint64_t step) -> absl::Status {
    ZS_ASSIGN_OR_RETURN(const std::string collect, store->Begin(step));
    const double begun = Now();
    ZS_ASSIGN_OR_RETURN(const CheckpointFile file,
                        WriteStateFile(&FileSystem::Real(), collect, 0, 1, pieces));
    save_rate.Add(static_cast<double>(bytes) / (Now() - begun));
    Manifest manifest;
    manifest.run_id = manifest.job = "bench";
    manifest.step = step;
    manifest.world_size = 1;
    manifest.files = {file};
    ZS_ASSIGN_OR_RETURN(path, store->Complete(manifest));
    return absl::OkStatus();
  };
  const auto plain_read = [&]() -> absl::Status {
    ZS_RETURN_IF_ERROR(Cool(plain, buffer.data()));
    const double begun = Now();
    ZS_RETURN_IF_ERROR(PlainRead(plain, buffer.data()));
    read_rate.Add(static_cast<double>(bytes) / (Now() - begun));
    return absl::OkStatus();
  };
  const auto load = [&]() -> absl::Status {
    ZS_RETURN_IF_ERROR(Cool(path + "/state-00000-of-00001.safetensors", buffer.data()));
    const double begun = Now();
    ZS_RETURN_IF_ERROR(Load(path, tensors, loaded.data()));
    load_rate.Add(static_cast<double>(bytes) / (Now() - begun));
    if (loaded != values) return absl::DataLossError("what was loaded is not what was saved");
    return absl::OkStatus();
  };
  for (int round = 1; round <= options.rounds; ++round) {
    // Who comes first alternates.
    if (round % 2 == 1) ZS_RETURN_IF_ERROR(plain_write());
    ZS_RETURN_IF_ERROR(save(static_cast<uint64_t>(round)));
    if (round % 2 == 0) ZS_RETURN_IF_ERROR(plain_write());
    if (round % 2 == 1) ZS_RETURN_IF_ERROR(plain_read());
    ZS_RETURN_IF_ERROR(load());
    if (round % 2 == 0) ZS_RETURN_IF_ERROR(plain_read());
  }
  const auto percent = [](const Rates& ours, const Rates& disk) {
    return 100 * ours.Median() / disk.Median();
  };
  std::printf("%llu MB in %s, medians of %d rounds (least to most)\n",
              static_cast<unsigned long long>(bytes / 1'000'000), options.dir.c_str(),
              options.rounds);
  std::printf("disk writes %s\nsave        %s  %.0f %% of the disk's\n", write_rate.Text().c_str(),
              save_rate.Text().c_str(), percent(save_rate, write_rate));
  std::printf("disk reads  %s\nload        %s  %.0f %% of the disk's\n", read_rate.Text().c_str(),
              load_rate.Text().c_str(), percent(load_rate, read_rate));
  std::printf(
      "peak resident memory %.0f MB, %.0f MB of it before saving and the buffer loaded into\n",
      PeakMegabytes(), before + static_cast<double>(kTensor) * sizeof(float) / (1 << 20));
  return FileSystem::Real().RemoveAll(folder);
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) {
  zeroshard::Options options;
  CLI::App app("Saving and loading against the disk's own rate");
  app.add_option("--dir", options.dir, "Where the files are made")->check(CLI::ExistingDirectory);
  app.add_option("--mb", options.megabytes, "MiB of state")->check(CLI::Range(64, 1 << 20));
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  if (absl::Status status = zeroshard::Run(options); !status.ok()) {
    std::fprintf(stderr, "io_bench: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}
