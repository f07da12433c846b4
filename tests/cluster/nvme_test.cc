// Jobs whose state is on the disks of the shard stores, on real processes: what a store takes of
// the host's memory, what a damaged disk does, what a killed store leaves.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/offload_fixture.h"

namespace zeroshard::cluster {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::Ge;
using testing::HasSubstr;
using testing::Le;
using Json = nlohmann::ordered_json;

// As shard_store/nvme/chunk_layout.h has the format.
constexpr size_t kPage = 4096;
constexpr const char* kSections[] = {"master", "exp_avg", "exp_avg_sq", "parameters", "staging"};

class NvmeTest : public OffloadTest {
 protected:
  static std::vector<std::string> OnDisks(int stores, int replicas) {
    return Endurance(stores, replicas, /*parameters=*/true, "nvme");
  }
  std::vector<std::string> FilesOf(const std::string& workdir, const std::string& store) const {
    std::vector<std::string> paths;
    std::error_code error;  // files come and go
    for (fs::directory_iterator it(WorkPath(workdir, "nvme/" + store), error), end;
         !error && it != end; it.increment(error)) {
      if (it->path().extension() == ".chunks") paths.push_back(it->path().string());
    }
    return paths;
  }
  // Changes a byte of each block of a section, as a failing disk does.
  void Damage(const std::string& workdir, const std::string& store, uint32_t section) const {
    for (const std::string& path : FilesOf(workdir, store)) {
      const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (fd < 0) continue;
      char page[kPage];
      for (size_t at = kPage; pread(fd, page, kPage, static_cast<off_t>(at)) == kPage;
           at += kPage) {
        uint32_t seen = 0, bytes = 0;
        std::memcpy(&seen, page + 12, sizeof(seen));
        std::memcpy(&bytes, page + 20, sizeof(bytes));
        const size_t padded = (bytes + kPage - 1) / kPage * kPage;
        if (std::memcmp(page, "ZSBLOCK\n", 8) != 0 || seen != section || padded > at) continue;
        const off_t middle = static_cast<off_t>(at - padded + bytes / 2);
        char byte = 0;
        if (pread(fd, &byte, 1, middle) != 1) continue;
        byte = static_cast<char>(byte ^ 0x10);
        EXPECT_EQ(pwrite(fd, &byte, 1, middle), 1) << path;
      }
      close(fd);
    }
  }
  // Until the store has met it; its files are in `folder`, or in that of its own name.
  bool DamageUntilFound(const std::string& workdir, const std::string& store, uint32_t section,
                        Process* local, const std::string& folder = "") const {
    const bool found = Eventually(kPatience, [&] {
      for (int i = 0; i < 5; ++i) Damage(workdir, folder.empty() ? store : folder, section);
      return absl::StrContains(LogOf(workdir, store), "is damaged") || local->Ended();
    });
    return found && !local->Ended();
  }
  // No file can be made in the store's folder any more, and what is there is damaged.
  bool LoseDisk(const std::string& workdir, const std::string& store, Process* local) const {
    const std::string folder = WorkPath(workdir, "nvme/" + store);
    fs::rename(folder, folder + ".gone");
    std::ofstream(folder) << "in its place";
    return DamageUntilFound(workdir, store, 0, local, store + ".gone");
  }
  std::string LogOf(const std::string& workdir, const std::string& store) const {
    return ReadText(WorkPath(workdir, absl::StrCat("logs/", store, ".log")));
  }
  static std::string EventsOf(const Result& result) { return result.status["events"].dump(); }
};

// --- memory -----------------------------------------------------------------------------------

uint64_t PeakBytes(pid_t pid) {
  for (const absl::string_view line :
       absl::StrSplit(ReadText(absl::StrCat("/proc/", pid, "/status")), '\n')) {
    absl::string_view text = line;
    uint64_t kib = 0;
    if (!absl::ConsumePrefix(&text, "VmHWM:") || !absl::ConsumeSuffix(&text, "kB")) continue;
    if (absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &kib)) return kib << 10;
  }
  return 0;
}

// The limit of a store process: what it takes itself (shard_store/README.md), half a MiB of it for
// each core, and the buffers of one job.
uint64_t SmallLimit() {
  return (uint64_t{109} << 20) + (uint64_t{std::thread::hardware_concurrency()} << 19);
}

// So many blocks of a hidden size that their state, 16 bytes an element, is more than four times
// that. A checkpoint each step.
TEST_F(NvmeTest, AStateFourTimesTheStoresMemoryIsTrainedAndSavedFromItsDisk) {
  constexpr uint64_t kHidden = 896, kBlock = 12 * kHidden * kHidden;
  const uint64_t limit = SmallLimit();
  const uint64_t layers = (4 * limit) / (16 * kBlock) + 1;
  const std::vector<std::string> model = {"--set", absl::StrCat("model.hidden_size=", kHidden),
                                          "--set", absl::StrCat("model.layers=", layers),
                                          "--set", "model.heads=4",
                                          "--set", "steps=3",
                                          "--set", "bf16.enabled=true",
                                          "--set", "zero_optimization.stage=3"};
  const Result without = Train("without", model);
  std::vector<std::string> args = model;
  const std::vector<std::string> offload = Offload(1, 1, /*parameters=*/true, "nvme");
  args.insert(args.end(), offload.begin(), offload.end());
  args.insert(args.end(), {"--store-memory", absl::StrCat(limit), "--set",
                           "checkpoint={dir: ckpt, interval_steps: 1}"});
  const auto local = StartJson("w", args);
  uint64_t peak = 0, disk = 0;
  EXPECT_TRUE(Eventually(kPatience, [&] {
    peak = std::max(peak, PeakBytes(PidOf("w", "store-0")));
    for (const std::string& path : FilesOf("w", "store-0")) {
      std::error_code gone;
      const uintmax_t bytes = fs::file_size(path, gone);
      if (!gone) disk = std::max<uint64_t>(disk, bytes);
    }
    return local->Ended();
  }));
  const Result with = Finish("w", local.get());
  EXPECT_EQ(with.history, without.history);
  EXPECT_EQ(with.digest, without.digest);
  EXPECT_GE(with.status["store_plan"]["chunks"], 14);
  EXPECT_GE(disk, 4 * limit);
  EXPECT_GT(peak, 0u);
  EXPECT_LE(peak, limit);
  RecordProperty("peak_mib", static_cast<int>(peak >> 20));
  ExpectSound(WorkPath("w", "ckpt/small"));
  EXPECT_TRUE(FilesOf("w", "store-0").empty()) << "nothing of it is left";
}

// --- a damaged disk -----------------------------------------------------------------------------

TEST_F(NvmeTest, WhereverADiskIsDamagedTheOtherCopyGoesOnAndNothingIsTrainedOnWhatIsWrong) {
  const Result wanted = Undisturbed(OnDisks(3, 2));
  for (const uint32_t section : {0u, 1u, 3u, 4u}) {
    SCOPED_TRACE(kSections[section]);
    const std::string workdir = absl::StrCat("w-", kSections[section]);
    const auto local = StartJson(workdir, OnDisks(3, 2));
    ASSERT_TRUE(AwaitSteps(workdir, 5, local.get()));
    ASSERT_TRUE(DamageUntilFound(workdir, "store-1", section, local.get())) << local->Out();
    const Result seen = Finish(workdir, local.get());
    EXPECT_EQ(seen.history, wanted.history);
    EXPECT_EQ(seen.digest, wanted.digest);
    EXPECT_EQ(seen.status["steps_lost"], 0);
    EXPECT_THAT(EventsOf(seen),
                AllOf(HasSubstr("store-1"), HasSubstr("DATA_LOSS"), HasSubstr(".chunks: chunk "),
                      HasSubstr(absl::StrCat(" ", kSections[section], " block 0 (offset ")),
                      HasSubstr("is damaged")));
  }
}

TEST_F(NvmeTest, WithoutAnotherCopyADamagedDiskTakesTheJobBackToItsCheckpoint) {
  std::vector<std::string> args = OnDisks(1, 1);
  const Result wanted = Undisturbed(args);
  args.insert(args.end(), {"--set", "checkpoint={dir: ckpt, interval_steps: 10}"});
  for (const uint32_t section : {0u, 3u}) {
    SCOPED_TRACE(kSections[section]);
    const std::string workdir = absl::StrCat("w-", kSections[section]);
    const auto local = StartJson(workdir, args);
    ASSERT_TRUE(Eventually(kPatience, [&] { return fs::exists(Checkpoint(workdir, 10)); }));
    ASSERT_TRUE(AwaitSteps(workdir, 12, local.get()));
    ASSERT_TRUE(DamageUntilFound(workdir, "store-0", section, local.get())) << local->Out();
    const Result seen = Finish(workdir, local.get());
    EXPECT_EQ(seen.history, wanted.history);
    EXPECT_EQ(seen.digest, wanted.digest);
    EXPECT_THAT(seen.status["version"]["epoch"].get<int>(), Ge(2));
    EXPECT_THAT(EventsOf(seen),
                AllOf(HasSubstr(absl::StrCat(" ", kSections[section], " block 0 (offset ")),
                      HasSubstr("is damaged"), HasSubstr("step")));
    ExpectSound(WorkPath(workdir, "ckpt/small"));
    fs::remove_all(WorkPath(workdir, "ckpt"));
  }
}

TEST_F(NvmeTest, ADiskThatTakesNothingAnyMoreCostsACopyAndNotTheJob) {
  const Result wanted = Undisturbed(OnDisks(2, 2));
  const auto local = StartJson("w", OnDisks(2, 2));
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  ASSERT_TRUE(LoseDisk("w", "store-1", local.get())) << local->Out();
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
  EXPECT_THAT(EventsOf(seen), HasSubstr("goes on with 1 of 2 replicas"));
}

TEST_F(NvmeTest, WithoutAnotherCopyTheJobGoesOnWhereADiskTakesItsState) {
  std::vector<std::string> args = OnDisks(2, 1);
  const Result wanted = Undisturbed(args);
  args.insert(args.end(), {"--set", "checkpoint={dir: ckpt, interval_steps: 10}"});
  const auto local = StartJson("w", args);
  ASSERT_TRUE(Eventually(kPatience, [&] { return fs::exists(Checkpoint("w", 10)); }));
  ASSERT_TRUE(LoseDisk("w", "store-1", local.get())) << local->Out();
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_THAT(seen.status["version"]["epoch"].get<int>(), Ge(2));
  EXPECT_THAT(seen.status["store_plan"].dump(), testing::Not(HasSubstr("store-1")));
}

// --- from and to other devices ------------------------------------------------------------------

TEST_F(NvmeTest, AJobGoesOnFromTheDeviceToTheDiskToMemoryWithTheSameNumbers) {
  const auto upto = [](int steps, std::vector<std::string> args) {
    args.insert(args.end(),
                {"--set", absl::StrCat("steps=", steps), "--set", "scheduler.params.total_steps=15",
                 "--set", "bf16.enabled=true", "--set", "deterministic=true", "--set",
                 "checkpoint={dir: ckpt, interval_steps: 5}"});
    return args;
  };
  const Result wanted = Undisturbed(upto(15, {}));
  (void)Train("w", upto(5, {}));
  (void)Train("w", upto(10, Offload(3, 2, /*parameters=*/true, "nvme")));
  const Result seen = Train("w", upto(15, Offload(2, 1, /*parameters=*/false)));
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.history.size(), 15u);
  EXPECT_EQ(seen.digest, wanted.digest);
}

// --- stores that die -----------------------------------------------------------------------------

TEST_F(NvmeTest, AKilledStoreCostsNoStepAndItsFileIsRemovedAndNeverRead) {
  const Result wanted = Undisturbed(OnDisks(3, 2));
  const auto local = StartJson("w", OnDisks(3, 2));
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  const std::vector<std::string> left = FilesOf("w", "store-1");
  ASSERT_EQ(left.size(), 1u);
  ASSERT_EQ(kill(PidOf("w", "store-1"), SIGKILL), 0);
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
  // `zeroshard local` has started it again, on the same folder.
  EXPECT_THAT(LogOf("w", "store-1"), HasSubstr(absl::StrCat("removed ", left[0])));
  for (const char* store : {"store-0", "store-1", "store-2"})
    EXPECT_TRUE(FilesOf("w", store).empty()) << store;
}

}  // namespace
}  // namespace zeroshard::cluster
