// What the NVMe tier makes of a disk, beside what fio makes of it with the same blocks, depth and
// engine, in turns, in the same folder.
//
//   nvme_bench --dir /data/scratch --mb 2048 --depth 16 --rounds 5
//
// write, read   AsyncIo, one block after the other   beside   fio --rw=write, --rw=read
// update        the pipeline with nothing computed: of each row 3.5 MiB read and 3.5 MiB written
//               (state, bf16 gradients and parameters), every block summed and checked
// apply         a whole step of a job's state on disk as a store has it: the pipeline with the
//               buffers that a store gives a job, AdamW, checksums and digests
//                                                    both beside   fio --rw=rw, --rw=randrw
//
// Rates of update, apply and fio's mixtures are bytes read and written together.
// fio registers its buffers and does not change them between writes, as here.
// All files are written once before anything is timed, so that no one pays for fresh extents, and
// who comes first alternates. Without fio on the PATH only this program's numbers are printed.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/kernels/init.h"
#include "common/plan/model_table.h"
#include "common/plan/nvme_bytes.h"
#include "common/status_macros.h"
#include "shard_store/nvme/chunk_file.h"
#include "shard_store/nvme/update_pipeline.h"
#include "shard_store/nvme/wait_group.h"
#include "shard_store/state/job_state.h"
#include "tests/bench/support/rates.h"

namespace zeroshard::nvme {
namespace {

using bench::Now;
using bench::Rates;

struct Options {
  std::string dir = ".";
  int megabytes = 1024;
  int depth = 16;
  int rows = 8;
  int rounds = 5;
  bool threads = false;
};

enum FioKind { kFioRead, kFioWrite, kFioMixed, kFioRandom };
constexpr const char* kFioNames[] = {"read", "write", "rw", "randrw"};

// Bytes a second, read and written together; none where there is no fio, or it says nothing.
std::optional<double> Fio(const Options& options, const std::string& path, int blocks,
                          FioKind kind) {
  const std::string command = absl::StrCat(
      "fio --name=bench --filename='", path, "' --bs=", kBufferBytes,
      " --size=", static_cast<uint64_t>(blocks) * kBufferBytes, " --iodepth=", options.depth,
      " --direct=1 --ioengine=io_uring --fixedbufs=1 --scramble_buffers=0 --overwrite=1 --rw=",
      kFioNames[kind], " --output-format=json 2>/dev/null");
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return std::nullopt;
  std::string text;
  char part[1 << 12];
  while (const size_t got = fread(part, 1, sizeof(part), pipe)) text.append(part, got);
  if (pclose(pipe) != 0) return std::nullopt;
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("jobs")) return std::nullopt;
  double rate = 0;
  for (const char* way : {"read", "write"}) {
    rate += json["jobs"][0][way]["bw_bytes"].get<double>();
  }
  return rate;
}

// One block after the other, `depth` of them on their way.
absl::StatusOr<double> Sequential(AsyncIo* io, const std::shared_ptr<DirectFile>& file,
                                  BufferPool* pool, int depth, int blocks, bool write) {
  std::mutex mutex;
  int next = 0;
  WaitGroup group;
  std::vector<AsyncIo::Done> ends;
  for (int i = 0; i < depth; ++i) ends.push_back(group.Add());
  std::function<void(int, absl::Status, IoBuffer)> go = [&](int lane, absl::Status status,
                                                            IoBuffer buffer) {
    int block = blocks;
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (status.ok() && next < blocks) block = next++;
    }
    if (block == blocks) return ends[static_cast<size_t>(lane)](std::move(status), IoBuffer());
    const uint64_t offset = static_cast<uint64_t>(block) * kBufferBytes;
    const auto done = [&go, lane](absl::Status ended, IoBuffer back) {
      go(lane, std::move(ended), std::move(back));
    };
    write ? io->Write(file, offset, kBufferBytes, std::move(buffer), done)
          : io->Read(file, offset, kBufferBytes, std::move(buffer), done);
  };
  const double begun = Now();
  for (int lane = 0; lane < depth; ++lane) go(lane, absl::OkStatus(), pool->TryTake());
  ZS_RETURN_IF_ERROR(group.Wait());
  return static_cast<double>(blocks) * kBufferBytes / (Now() - begun);
}

// Two threads that compute.
class Threads {
 public:
  Threads() {
    for (int i = 0; i < 2; ++i) threads_.emplace_back([this] { Main(); });
  }
  ~Threads() {
    Add(nullptr);
    for (std::thread& thread : threads_) thread.join();
  }
  void Add(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

 private:
  void Main() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      if (!tasks_.front()) return;  // the end, for all
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
};

absl::StatusOr<double> Step(const std::shared_ptr<ChunkFile>& file,
                            const std::shared_ptr<BufferPool>& pool, Threads* threads,
                            uint64_t version) {
  UpdateOptions update;
  update.file = file;
  update.pool = pool;
  update.from_version = version - 1;
  update.to_version = version;
  double bytes = 0;
  for (const auto& [chunk, entry] : file->layout().chunks()) {
    update.chunks.push_back(chunk);
    bytes += 28.0 * static_cast<double>(entry.shape.elements);
  }
  update.compute = [](const UpdateRow&) { return absl::OkStatus(); };
  update.execute = [threads](std::function<void()> task) { threads->Add(std::move(task)); };
  WaitGroup group;
  update.done = [ended = group.Add()](const absl::Status& status) { ended(status, IoBuffer()); };
  const double begun = Now();
  ZS_RETURN_IF_ERROR(StartUpdate(update));
  ZS_RETURN_IF_ERROR(group.Wait());
  return bytes / (Now() - begun);
}

// A job of about `megabytes` of state, on disk, stepped as a store does it.
class Applies {
 public:
  absl::Status Make(const std::string& folder, int megabytes) {
    v1::ModelSpec* model = spec_.mutable_model();
    model->set_architecture("gpt2");
    model->set_hidden_size(768);
    model->set_layers(static_cast<uint32_t>(std::max(1, megabytes / 108)));  // 7.1 M of 16 bytes
    model->set_heads(12);
    model->set_sequence_length(128);
    model->set_vocab_size(1024);
    spec_.set_name("bench");
    spec_.mutable_bf16()->set_enabled(true);
    v1::OptimizerParams* params = spec_.mutable_optimizer()->mutable_params();
    spec_.mutable_optimizer()->set_type("AdamW");
    params->set_lr(1e-3);
    params->add_betas(0.9);
    params->add_betas(0.95);
    params->set_eps(1e-8);
    params->set_weight_decay(0.1);
    spec_.mutable_zero_optimization()->mutable_offload_optimizer()->set_device("nvme");
    ZS_ASSIGN_OR_RETURN(model_, MakeModelTable(spec_.model()));
    store::JobStateOptions options;
    options.spec = spec_;
    options.model = &model_;
    for (const Chunk& chunk : ChunkTable::Make(model_).chunks)
      options.chunks.emplace(static_cast<uint32_t>(options.chunks.size()), chunk);
    chunks_ = options.chunks;
    options.digests = true;
    options.budget = &memory_;
    options.pool = &pool_;
    options.nvme.dir = folder;
    options.nvme.budget = &disk_;
    options.nvme.run_id = "apply";
    ZS_ASSIGN_OR_RETURN(state_, store::JobState::Create(options));
    const FreshWeights fresh(1);
    std::vector<uint32_t> all;
    for (const auto& [id, chunk] : chunks_) all.push_back(id);
    return state_->Fill(
        {&fresh, nullptr, nullptr}, all, [](uint32_t) {}, nullptr);
  }

  absl::StatusOr<double> Step(uint64_t step) {
    double bytes = 0;
    const std::vector<char> gradients(2 * static_cast<size_t>(kChunkElements), '\x3a');
    for (const auto& [id, chunk] : chunks_) {
      const absl::Span<const char> part[] = {
          absl::MakeConstSpan(gradients).first(2 * static_cast<size_t>(chunk.size()))};
      ZS_RETURN_IF_ERROR(state_->Stage(id, step, 0, chunk.size(), part));
      bytes += 28.0 * static_cast<double>(chunk.size());
    }
    v1::StepDecision decision;
    decision.set_epoch(1);
    decision.set_step(step);
    decision.set_adam_step(step);
    decision.set_multiplier(1);
    decision.set_learning_rate(1e-3f);
    std::promise<absl::Status> done;
    const double begun = Now();
    state_->Apply(
        decision, [](uint32_t, uint32_t) {},
        [&done](const absl::Status& status) { done.set_value(status); });
    ZS_RETURN_IF_ERROR(done.get_future().get());
    return bytes / (Now() - begun);
  }

 private:
  v1::JobSpec spec_;
  ModelTable model_;
  std::map<uint32_t, Chunk> chunks_;
  store::MemoryBudget memory_{uint64_t{1} << 40};
  store::MemoryBudget disk_{uint64_t{1} << 50, "NVMe folder", "--nvme-limit"};
  store::TaskPool pool_{2};
  std::unique_ptr<store::JobState> state_;
};

absl::Status Bench(const Options& options, const std::string& folder) {
  const int buffers = std::max(options.depth, options.rows * kBuffersPerRow) + 4;
  ZS_ASSIGN_OR_RETURN(const auto arena, BufferArena::Create(buffers, kBufferBytes));
  for (uint64_t i = 0; i < arena->total_bytes(); i += 8) {  // bytes that no device makes less of
    const uint64_t value = (i + 1) * 0x9e3779b97f4a7c15u;
    std::memcpy(arena->base() + i, &value, 8);
  }
  AsyncIoOptions io_options;
  io_options.depth = options.depth;
  if (options.threads) io_options.engine = AsyncIoOptions::Engine::kThreads;
  ZS_ASSIGN_OR_RETURN(const auto io, AsyncIo::Create(io_options, arena));
  const int blocks =
      static_cast<int>((static_cast<uint64_t>(options.megabytes) << 20) / kBufferBytes);
  ZS_ASSIGN_OR_RETURN(const auto file, DirectFile::Create(folder + "/ours"));
  ZS_RETURN_IF_ERROR(file->Allocate(static_cast<uint64_t>(blocks) * kBufferBytes));

  ChunkFileOptions chunk_options;
  chunk_options.dir = folder;
  chunk_options.run_id = "bench";
  chunk_options.spare_slots = 0;
  chunk_options.io = io.get();
  const uint64_t n = kChunkElements;
  for (int i = 0; i < std::max(1, options.megabytes / 16); ++i) {
    chunk_options.chunks[static_cast<uint32_t>(i)] = {kChunkElements,
                                                      {4 * n, 4 * n, 4 * n, 2 * n, 2 * n}};
  }
  ZS_ASSIGN_OR_RETURN(const auto chunks, ChunkFile::Create(chunk_options));
  {
    ZS_ASSIGN_OR_RETURN(const auto pool, BufferPool::Create(arena, 4));
    const std::vector<char> values(4 * n, 'x');
    for (const auto& [chunk, entry] : chunks->layout().chunks()) {
      for (const Section section : {kMaster, kExpAvg, kExpAvgSq, kParameters}) {
        ZS_RETURN_IF_ERROR(chunks->WriteSection(
            chunk, section, 0, absl::MakeConstSpan(values).first(n * entry.element_bytes[section]),
            pool.get()));
      }
    }
  }
  const auto stage = [&](uint64_t version) -> absl::Status {
    ZS_ASSIGN_OR_RETURN(const auto pool, BufferPool::Create(arena, 4));
    const std::vector<char> values(2 * n, 'g');
    for (const auto& [chunk, entry] : chunks->layout().chunks()) {
      ZS_RETURN_IF_ERROR(chunks->WriteSection(chunk, kStaging, version, values, pool.get()));
    }
    return absl::OkStatus();
  };

  Applies job;
  ZS_RETURN_IF_ERROR(job.Make(folder, options.megabytes));

  Rates ours[2], fio[4], update, apply;  // read, write; fio's of each kind
  const auto run_ours = [&](bool write, bool timed) -> absl::Status {
    ZS_ASSIGN_OR_RETURN(const auto pool, BufferPool::Create(arena, options.depth));
    ZS_ASSIGN_OR_RETURN(const double rate,
                        Sequential(io.get(), file, pool.get(), options.depth, blocks, write));
    if (timed) ours[write].Add(rate);
    return absl::OkStatus();
  };
  const auto run_fio = [&](FioKind kind, bool timed) {
    const auto rate = Fio(options, folder + "/fio", blocks, kind);
    if (rate.has_value() && timed) fio[kind].Add(*rate);
  };
  ZS_RETURN_IF_ERROR(run_ours(true, false));
  run_fio(kFioWrite, false);
  for (int round = 0; round < options.rounds; ++round) {
    for (const bool write : {true, false}) {
      const FioKind kind = write ? kFioWrite : kFioRead;
      if (round % 2 == 0) run_fio(kind, true);
      ZS_RETURN_IF_ERROR(run_ours(write, true));
      if (round % 2 == 1) run_fio(kind, true);
    }
    run_fio(kFioMixed, true);
    const uint64_t version = static_cast<uint64_t>(round) + 1;
    ZS_RETURN_IF_ERROR(stage(version));
    ZS_ASSIGN_OR_RETURN(const auto pool, BufferPool::Create(arena, options.rows * kBuffersPerRow));
    Threads threads;
    ZS_ASSIGN_OR_RETURN(const double rate, Step(chunks, pool, &threads, version));
    update.Add(rate);
    ZS_ASSIGN_OR_RETURN(const double applied, job.Step(version));
    apply.Add(applied);
    run_fio(kFioRandom, true);
  }
  std::printf("%d blocks of %u bytes, %d at a time, over %s%s; medians of %d rounds\n", blocks,
              kBufferBytes, options.depth, io->engine(),
              file->direct() ? " past the page cache" : ", O_DIRECT refused", options.rounds);
  for (const bool write : {true, false}) {
    const char* const name = write ? "write" : "read ";
    if (!fio[write].empty()) std::printf("fio  %s  %s\n", name, fio[write].Text().c_str());
    std::printf("ours %s  %s", name, ours[write].Text().c_str());
    if (fio[write].empty()) {
      std::printf("  (no fio here to compare with)\n");
    } else {
      std::printf("  %.0f %% of fio's\n", 100 * ours[write].Median() / fio[write].Median());
    }
  }
  for (const FioKind kind : {kFioMixed, kFioRandom}) {
    if (!fio[kind].empty())
      std::printf("fio  %-6s %s\n", kFioNames[kind], fio[kind].Text().c_str());
  }
  const auto print = [&](const char* name, const Rates& rates, double buffers) {
    std::printf("ours %s %s  (%.0f MB of buffers)", name, rates.Text().c_str(), buffers / 1e6);
    for (const FioKind kind : {kFioMixed, kFioRandom}) {
      if (fio[kind].empty()) continue;
      std::printf("  %.0f %% of fio's %s", 100 * rates.Median() / fio[kind].Median(),
                  kFioNames[kind]);
    }
    std::printf("\n");
  };
  print("update", update, options.rows * kBuffersPerRow * static_cast<double>(kBufferBytes));
  print("apply ", apply, kNvmeUpdateBuffers * static_cast<double>(kBufferBytes));
  return absl::OkStatus();
}

absl::Status Run(const Options& options) {
  const std::string folder = absl::StrCat(options.dir, "/nvme_bench.", getpid());
  ZS_RETURN_IF_ERROR(MakeFolders(folder));
  const absl::Status status = Bench(options, folder);
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
  return status;
}

}  // namespace
}  // namespace zeroshard::nvme

int main(int argc, char** argv) {
  zeroshard::nvme::Options options;
  CLI::App app("The NVMe tier against the disk's own rate");
  app.add_option("--dir", options.dir, "Where the files are made")->check(CLI::ExistingDirectory);
  app.add_option("--mb", options.megabytes, "MiB read and written a round")
      ->check(CLI::Range(64, 1 << 20));
  app.add_option("--depth", options.depth, "Operations at a time")->check(CLI::Range(1, 256));
  app.add_option("--rows", options.rows, "Rows of the pipeline in memory")
      ->check(CLI::Range(zeroshard::nvme::kLeastRows, 256));
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 1000));
  app.add_flag("--threads", options.threads, "The engine for where io_uring is refused");
  CLI11_PARSE(app, argc, argv);
  if (absl::Status status = zeroshard::nvme::Run(options); !status.ok()) {
    std::fprintf(stderr, "nvme_bench: %s\n", std::string(status.message()).c_str());
    return 1;
  }
  return 0;
}
