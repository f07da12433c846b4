#include "shard_store/state/numa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "shard_store/state/task_pool.h"
#include "tests/common/temp_folder.h"
#include "tests/shard_store/state/state_world.h"

namespace zeroshard::store {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(NumaTest, ListsOfProcessorsAreReadWithinThoseThatMayBeUsed) {
  std::vector<bool> allowed(8, true);
  EXPECT_THAT(ParseCpuList("0-3,6", allowed), ElementsAre(0, 1, 2, 3, 6));
  EXPECT_THAT(ParseCpuList("5", allowed), ElementsAre(5));
  allowed[1] = false;
  EXPECT_THAT(ParseCpuList("0-2,7-2000000000", allowed), ElementsAre(0, 2, 7));
  for (const char* nothing : {"", "\n", "x", "3-1", "1-2-3", "-4", "99"})
    EXPECT_THAT(ParseCpuList(nothing, allowed), IsEmpty()) << nothing;
}

// A folder as Linux has it.
class NumaFolder : public testing::Test {
 protected:
  void Node(const std::string& name, const std::string& cpus) {
    std::filesystem::create_directory(folder_ / name);
    std::ofstream(folder_ / (name + "/cpulist")) << cpus << "\n";
  }
  const TempFolder folder_;
  const std::vector<bool> all_ = std::vector<bool>(16, true);
};

TEST_F(NumaFolder, NodesAreReadInOrderWithGapsAndWithoutThoseThatHaveNoProcessor) {
  Node("node10", "12-15");
  Node("node0", "0-3,8-11");
  Node("node2", "");  // memory alone
  Node("nodes", "4");
  Node("power", "4");
  const NumaLayout layout = ReadNumaLayout(folder_.path(), all_);
  EXPECT_THAT(layout.cpus,
              ElementsAre(ElementsAre(0, 1, 2, 3, 8, 9, 10, 11), ElementsAre(12, 13, 14, 15)));
}

TEST_F(NumaFolder, WhereThereAreNotTwoNodesThreadsRunAnywhere) {
  for (const NumaLayout& layout :
       {ReadNumaLayout(folder_ / "none", all_), ReadNumaLayout(folder_.path(), all_)})
    EXPECT_THAT(layout.cpus, ElementsAre(IsEmpty()));
  Node("node0", "0-7");
  Node("node1", "8-15");
  EXPECT_EQ(ReadNumaLayout(folder_.path(), all_).nodes(), 2);
  const std::vector<bool> first_only(8, true);
  EXPECT_THAT(ReadNumaLayout(folder_.path(), first_only).cpus, ElementsAre(IsEmpty()));
}

TEST(NumaTest, ThreadsFollowTheProcessorsAndEachNodeHasOne) {
  const NumaLayout even{{{0, 1}, {2, 3}}}, uneven{{{0, 1, 2, 3, 4, 5}, {6, 7}}};
  EXPECT_THAT(ThreadsOfNodes(NumaLayout(), 5), ElementsAre(5));
  EXPECT_THAT(ThreadsOfNodes(NumaLayout(), 0), ElementsAre(1));
  EXPECT_THAT(ThreadsOfNodes(even, 1), ElementsAre(1)) << "a node without a thread";
  EXPECT_THAT(ThreadsOfNodes(even, 2), ElementsAre(1, 1));
  EXPECT_THAT(ThreadsOfNodes(even, 4), ElementsAre(2, 2));
  EXPECT_THAT(ThreadsOfNodes(uneven, 8), ElementsAre(6, 2));
  EXPECT_THAT(ThreadsOfNodes(uneven, 2), ElementsAre(1, 1));
}

TEST(NumaTest, ChunksGoWhereThereIsLeastForEachThread) {
  const std::vector<uint64_t> six(6, 10);
  EXPECT_THAT(SpreadOverNodes(six, {2, 2}, {}), ElementsAre(0, 1, 0, 1, 0, 1));
  EXPECT_THAT(SpreadOverNodes(six, {4, 2}, {}), ElementsAre(0, 0, 1, 0, 0, 1));
  EXPECT_THAT(SpreadOverNodes(six, {1}, {}), ElementsAre(0, 0, 0, 0, 0, 0));
  EXPECT_THAT(SpreadOverNodes(six, {2, 2}, {40, 0}), ElementsAre(1, 1, 1, 1, 0, 1));
  EXPECT_THAT(SpreadOverNodes({}, {2, 2}, {}), IsEmpty());
}

TEST(NumaTest, TasksOfANodeRunOnItsThreadsAlone) {
  std::mutex mutex;
  std::map<int, std::set<std::thread::id>> ran;
  {
    TaskPool pool(5, NumaLayout{{{}, {}}});  // bound to no processor
    EXPECT_EQ(pool.nodes(), 2);
    EXPECT_EQ(pool.threads(), 5);
    for (int i = 0; i < 200; ++i) {
      for (const int node : {0, 1}) {
        pool.Add(
            [&, node] {
              std::lock_guard<std::mutex> lock(mutex);
              ran[node].insert(std::this_thread::get_id());
            },
            node);
      }
    }
  }
  for (const std::thread::id id : ran[0]) EXPECT_FALSE(ran[1].contains(id));
  EXPECT_GE(ran[0].size(), 1u);
  EXPECT_LE(ran[0].size(), 3u);
  EXPECT_GE(ran[1].size(), 1u);
  EXPECT_LE(ran[1].size(), 2u);
}

TEST(NumaTest, ThreadsOfANodeRunOnItsProcessors) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(static_cast<size_t>(cpu), &set)) cpus.push_back(cpu);
  if (cpus.size() < 2) GTEST_SKIP() << "one processor";
  TaskPool pool(2, NumaLayout{{{cpus[0]}, {cpus[1]}}});
  for (const size_t node : {0, 1}) {
    std::promise<int> seen;
    pool.Add([&] { seen.set_value(sched_getcpu()); }, static_cast<int>(node));
    EXPECT_EQ(seen.get_future().get(), cpus[node]);
  }
}

// Two nodes that are none: the same bits, and a store that has every second chunk uses both.
TEST(NumaTest, StateOnTwoNodesIsTheSameAndBothHaveHalfOfIt) {
  for (const bool every_second : {false, true}) {
    SCOPED_TRACE(every_second);
    const JobShape shape;
    World world(shape, 4096, 2);
    TaskPool pool(2, NumaLayout{{{}, {}}});  // a thread each
    JobStateOptions options = world.options_;
    options.pool = &pool;
    if (every_second) std::erase_if(options.chunks, [](const auto& c) { return c.first % 2; });
    auto state = JobState::Create(options);
    ASSERT_TRUE(state.ok()) << state.status();
    const FreshWeights fresh(shape.seed);
    std::vector<uint32_t> ids;
    for (const auto& [id, chunk] : options.chunks) ids.push_back(id);
    std::mutex mutex;
    std::map<std::thread::id, int> filled;
    ASSERT_TRUE((*state)
                    ->Fill(
                        {&fresh, nullptr, nullptr}, ids,
                        [&](uint32_t) {
                          std::lock_guard<std::mutex> lock(mutex);
                          ++filled[std::this_thread::get_id()];
                        },
                        nullptr)
                    .ok());
    EXPECT_TRUE(StateEquals(state->get(), world.reference_, options.chunks));
    EXPECT_EQ(filled.size(), 2u);
    for (const auto& [thread, count] : filled)
      EXPECT_LE(static_cast<size_t>(count), ids.size() / 2 + 1);
  }
}

}  // namespace
}  // namespace zeroshard::store
