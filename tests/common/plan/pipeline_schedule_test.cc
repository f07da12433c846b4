#include "common/plan/pipeline_schedule.h"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>

#include "absl/strings/str_join.h"
#include "common/plan/stage_model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/plan/schedule_checker.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

std::vector<RankSchedule> Make(int p, int v, int64_t m) {
  auto schedules = MakePipelineSchedule({.stages = p, .virtual_stages = v, .micro_batches = m});
  EXPECT_TRUE(schedules.ok()) << schedules.status();
  return *std::move(schedules);
}

size_t Find(const RankSchedule& schedule, const std::function<bool(const Action&)>& is) {
  const auto found = std::find_if(schedule.actions.begin(), schedule.actions.end(), is);
  EXPECT_NE(found, schedule.actions.end());
  return static_cast<size_t>(found - schedule.actions.begin());
}

// Every shape with p <= 8, v <= 3, m <= 16.
void ForEachShape(const std::function<void(const PipelineShape&)>& body) {
  for (int p = 1; p <= 8; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int64_t m = 1; m <= 16; ++m) {
        SCOPED_TRACE(absl::StrCat("p ", p, ", v ", v, ", m ", m));
        body({.stages = p, .virtual_stages = v, .micro_batches = m});
      }
    }
  }
}

std::string Computes(const RankSchedule& schedule) {
  std::vector<std::string> names;
  for (const Action& a : schedule.actions) {
    if (a.kind == ActionKind::kTransfers) continue;
    names.push_back(absl::StrCat(a.kind == ActionKind::kForward ? "F" : "B", a.virtual_stage, ".",
                                 a.micro_batch));
  }
  return absl::StrJoin(names, " ");
}

// Narayanan et al. 2021, figure 4, with four stages and as many micro-batches.
TEST(PipelineSchedule, OneForwardOneBackwardInThePublishedOrder) {
  const auto schedules = Make(4, 1, 5);
  EXPECT_EQ(Computes(schedules[0]), "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 B0.2 B0.3 B0.4");
  EXPECT_EQ(Computes(schedules[2]), "F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 F2.4 B2.3 B2.4");
  EXPECT_EQ(Computes(schedules[3]), "F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4");
}

// Two ranks with two runs each; two micro-batches through the first run, then through the second.
TEST(PipelineSchedule, InterleavedStagesTakeTurnsOfPMicroBatches) {
  const auto schedules = Make(2, 2, 4);
  EXPECT_EQ(Computes(schedules[0]),
            "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3");
  EXPECT_EQ(Computes(schedules[1]),
            "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3");
}

TEST(PipelineSchedule, OfOneStageIsEachMicroBatchForwardAndBackward) {
  EXPECT_EQ(Computes(Make(1, 1, 2)[0]), "F0.0 B0.0 F0.1 B0.1");
  EXPECT_EQ(Make(1, 1, 2)[0].actions.size(), 4u);
}

TEST(PipelineSchedule, EveryShapeRunsWithoutDeadlockAndIsComplete) {
  ForEachShape([](const PipelineShape& shape) {
    EXPECT_EQ(
        ScheduleChecker(Make(shape.stages, shape.virtual_stages, shape.micro_batches)).Check(), "");
  });
}

// The order is right whatever the work takes.
TEST(PipelineSchedule, EveryShapeRunsWithoutDeadlockAtOtherSpeeds) {
  ForEachShape([](const PipelineShape& shape) {
    const auto schedules = Make(shape.stages, shape.virtual_stages, shape.micro_batches);
    EXPECT_EQ(ScheduleChecker(schedules, 3, 1).Check(), "");
    EXPECT_EQ(ScheduleChecker(schedules, 1, 7).Check(), "");
  });
}

// (m v + p - 1) times a forward and a backward of one virtual stage, where 1F1B or p divides m;
// else no less, and no more than with micro-batches up to the next multiple.
TEST(PipelineSchedule, TakesTheTimeOfTheFormula) {
  ForEachShape([](const PipelineShape& s) {
    ScheduleChecker checker(Make(s.stages, s.virtual_stages, s.micro_batches));
    ASSERT_EQ(checker.Check(), "");
    const auto formula = [&](int64_t m) { return 3 * (m * s.virtual_stages + s.stages - 1); };
    const int64_t rounded = (s.micro_batches + s.stages - 1) / s.stages * s.stages;
    EXPECT_GE(checker.makespan(), formula(s.micro_batches));
    EXPECT_LE(checker.makespan(), formula(s.virtual_stages == 1 ? s.micro_batches : rounded));
  });
}

// Counted here from the list: alive from a forward on until the backward's end.
TEST(ForwardSchedule, EveryShapeRunsWithoutDeadlockAndTakesTheTimeOfTheFormula) {
  ForEachShape([](const PipelineShape& shape) {
    const auto schedules = MakeForwardSchedule(shape);
    ASSERT_TRUE(schedules.ok()) << schedules.status();
    for (const int64_t forward : {1, 3}) {
      ScheduleChecker checker(*schedules, forward);
      ASSERT_EQ(checker.WithoutBackwards().Check(), "");
      const int64_t p = shape.stages, v = shape.virtual_stages, m = shape.micro_batches;
      if (v == 1 || m % p == 0) {
        EXPECT_EQ(checker.makespan(), forward * (m * v + p - 1));
      }
    }
  });
}

// So it runs in the memory of any training step, and fewer micro-batches need no more than many.
TEST(ForwardSchedule, InputsDoNotWaitAndMoreMicroBatchesOpenNoFewer) {
  ForEachShape([](const PipelineShape& shape) {
    PipelineShape longer = shape;
    ++longer.micro_batches;
    const auto schedules = *MakeForwardSchedule(shape);
    const auto more = *MakeForwardSchedule(longer);
    for (size_t rank = 0; rank < schedules.size(); ++rank) {
      for (int k = schedules[rank].rank; k < shape.VirtualStages(); k += shape.stages)
        EXPECT_EQ(InputSlots(schedules[rank], k), k > 0 ? 1 : 0);
      EXPECT_LE(OpenMicroBatches(schedules[rank]), OpenMicroBatches(more[rank]));
      if (shape.virtual_stages == 1) {
        EXPECT_EQ(OpenMicroBatches(schedules[rank]), 1);
      }
    }
  });
}

TEST(ForwardSchedule, CheckerCatchesAMissingForwardAndABackward) {
  auto schedules = *MakeForwardSchedule({.stages = 2, .virtual_stages = 1, .micro_batches = 3});
  EXPECT_THAT(ScheduleChecker(schedules).Check(), HasSubstr("no backward"));
  schedules[1].actions.pop_back();
  EXPECT_THAT(ScheduleChecker(schedules).WithoutBackwards().Check(),
              HasSubstr("no forward 1 of 2"));
}

TEST(PipelineSchedule, ActivationsAliveStayWithinTheBound) {
  ForEachShape([](const PipelineShape& s) {
    const int64_t p = s.stages, v = s.virtual_stages, m = s.micro_batches;
    for (const RankSchedule& schedule : Make(s.stages, s.virtual_stages, m)) {
      int64_t alive = 0, most = 0;
      for (const Action& a : schedule.actions) {
        if (a.kind == ActionKind::kForward) most = std::max(most, ++alive);
        if (a.kind == ActionKind::kBackward) --alive;
      }
      EXPECT_EQ(alive, 0);
      EXPECT_EQ(MostAlive(schedule), most);
      const int64_t r = schedule.rank;
      const int64_t bound =
          v == 1 ? std::min(m, p - r) : std::min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1);
      EXPECT_EQ(AliveBound(s, schedule.rank), bound);
      EXPECT_LE(most, bound);
      if (v == 1 || m % p == 0) {
        EXPECT_EQ(most, bound);
      }
      int64_t sum = 0;
      for (int k = schedule.rank; k < s.VirtualStages(); k += s.stages)
        sum += MostAlive(schedule, k);
      EXPECT_GE(sum, most);
      EXPECT_LE(sum, m * v);
    }
  });
}

TEST(PipelineSchedule, InputsThatWaitStayWithinTheBound) {
  ForEachShape([](const PipelineShape& s) {
    const int64_t bound =
        s.virtual_stages == 1 || s.stages == 1 ? 1 : std::max(2, (s.stages + 1 + 2) / 3);
    for (const RankSchedule& schedule : Make(s.stages, s.virtual_stages, s.micro_batches)) {
      for (int k = schedule.rank; k < s.VirtualStages(); k += s.stages) {
        EXPECT_EQ(InputSlots(schedule, k) == 0, k == 0);
        EXPECT_EQ(GradientSlots(schedule, k) == 0, k == s.VirtualStages() - 1);
        EXPECT_LE(InputSlots(schedule, k), bound);
        EXPECT_LE(GradientSlots(schedule, k), bound);
      }
    }
  });
}

// Share of the inputs from other ranks that are there before the compute that uses them could
// begin, so that they arrive while another one runs.
double ShareReceivedEarly(const std::vector<RankSchedule>& schedules) {
  int early = 0, all = 0;
  for (const RankSchedule& schedule : schedules) {
    std::map<std::tuple<bool, int, int64_t>, int64_t> there;
    for (const Action& a : schedule.actions) {
      for (const StageTransfer& t : a.transfers) {
        if (!t.send) there[{t.gradient, t.To(), t.micro_batch}] = a.time;
      }
      const auto input =
          there.find({a.kind == ActionKind::kBackward, a.virtual_stage, a.micro_batch});
      if (a.kind == ActionKind::kTransfers || input == there.end()) continue;
      early += input->second < a.time;
      ++all;
    }
  }
  return static_cast<double>(early) / all;
}

// 1F1B within p - r micro-batches has every input just in time but while the pipeline fills and
// empties; interleaved stages have more to do meanwhile.
TEST(PipelineSchedule, WhatIsReadyEarlierIsReceivedDuringAnEarlierCompute) {
  for (int p = 2; p <= 8; ++p) {
    // The last stage has its second input while it goes backward with the first.
    const RankSchedule last = Make(p, 1, 16).back();
    const size_t second = Find(last, [](const Action& a) {
      return a.transfers.size() == 1 && !a.transfers[0].send && a.transfers[0].micro_batch == 1;
    });
    const size_t backward = Find(last, [](const Action& a) {
      return a.kind == ActionKind::kBackward && a.micro_batch == 0;
    });
    EXPECT_EQ(last.actions[second].time, last.actions[backward].time);
    EXPECT_LT(second, backward);
    EXPECT_GT(ShareReceivedEarly(Make(p, 1, 16)), 0);
    EXPECT_GT(ShareReceivedEarly(Make(p, 2, 16)), ShareReceivedEarly(Make(p, 1, 16)));
  }
}

TEST(PipelineSchedule, GroupsHaveOneSendAndTwoReceivesAtMost) {
  ForEachShape([](const PipelineShape& s) {
    for (const RankSchedule& schedule : Make(s.stages, s.virtual_stages, s.micro_batches)) {
      int64_t time = 0;
      for (const Action& a : schedule.actions) {
        const auto sends = std::count_if(a.transfers.begin(), a.transfers.end(),
                                         [](const StageTransfer& t) { return t.send; });
        EXPECT_LE(sends, 1);
        EXPECT_LE(static_cast<int64_t>(a.transfers.size()) - sends, 2);
        EXPECT_GE(a.time, time);
        time = a.time;
      }
    }
  });
}

TEST(PipelineSchedule, SizesOutOfRangeAreRefusedWithTheKeys) {
  for (const PipelineShape& shape :
       {PipelineShape{.stages = 0}, PipelineShape{.virtual_stages = 0},
        PipelineShape{.micro_batches = 0}, PipelineShape{.stages = 1 << 30, .virtual_stages = 8},
        PipelineShape{.stages = 8, .micro_batches = int64_t{1} << 40}}) {
    const auto schedules = MakePipelineSchedule(shape);
    EXPECT_EQ(schedules.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(schedules.status().message(), HasSubstr("(parallel.pipeline)"));
  }
}

// What follows breaks a schedule that is right, and the checker must say how.

// Where a rank has a group of one send and one receive, in two groups of their own, this one first.
void Split(RankSchedule* schedule, size_t at, bool send_first) {
  Action first{.kind = ActionKind::kTransfers, .transfers = {}}, second = first;
  for (const StageTransfer& t : schedule->actions[at].transfers)
    (t.send == send_first ? first : second).transfers.push_back(t);
  schedule->actions[at] = first;
  schedule->actions.insert(schedule->actions.begin() + static_cast<int64_t>(at) + 1, second);
}

bool IsExchange(const Action& a) {
  return a.transfers.size() == 2 && a.transfers[0].peer == a.transfers[1].peer;
}

// Both ends of an exchange send first: neither reaches its receive.
TEST(ScheduleCheckerTest, CatchesTwoRanksThatBothSendFirst) {
  auto schedules = Make(2, 1, 4);
  ASSERT_EQ(ScheduleChecker(schedules).Check(), "");
  for (RankSchedule& schedule : schedules) Split(&schedule, Find(schedule, IsExchange), true);
  EXPECT_THAT(ScheduleChecker(schedules).Check(), HasSubstr("deadlock"));
}

TEST(ScheduleCheckerTest, CatchesSwappedGroups) {
  // One rank's first two groups with a peer in the other order.
  auto schedules = Make(3, 1, 4);
  std::vector<Action>& actions = schedules[2].actions;
  const size_t first = Find(schedules[2], [](const Action& a) { return !a.transfers.empty(); });
  size_t second = first + 1;
  while (actions[second].kind != ActionKind::kTransfers) ++second;
  std::swap(actions[first], actions[second]);
  EXPECT_NE(ScheduleChecker(schedules).Check(), "");
}

// Two receives from one peer in the other order: nothing blocks, but each gets the other's data.
TEST(ScheduleCheckerTest, CatchesReceivesThatMatchTheWrongSends) {
  auto schedules = Make(2, 2, 4);
  std::vector<StageTransfer*> receives;
  for (Action& a : schedules[1].actions) {
    for (StageTransfer& t : a.transfers) {
      if (!t.send && !t.gradient) receives.push_back(&t);
    }
  }
  std::swap(*receives[0], *receives[1]);
  EXPECT_NE(ScheduleChecker(schedules).Check(), "");
}

TEST(ScheduleCheckerTest, CatchesSwappedComputes) {
  // In every place of every rank: no two neighbouring computes with an input between may swap.
  int caught = 0;
  const auto right = Make(4, 2, 8);
  for (size_t r = 0; r < right.size(); ++r) {
    for (size_t a = 0; a + 1 < right[r].actions.size(); ++a) {
      auto schedules = right;
      std::vector<Action>& actions = schedules[r].actions;
      if (actions[a].kind == ActionKind::kTransfers ||
          actions[a + 1].kind != ActionKind::kTransfers)
        continue;
      const bool sent_there =
          std::any_of(actions[a + 1].transfers.begin(), actions[a + 1].transfers.end(),
                      [&](const StageTransfer& t) {
                        return t.send && t.micro_batch == actions[a].micro_batch &&
                               t.virtual_stage == actions[a].virtual_stage;
                      });
      if (!sent_there) continue;
      std::swap(actions[a], actions[a + 1]);
      EXPECT_NE(ScheduleChecker(schedules).Check(), "") << r << " " << a;
      ++caught;
    }
  }
  EXPECT_GT(caught, 50);
}

TEST(ScheduleCheckerTest, CatchesWhatIsMissingDoubledOrOutOfOrder) {
  const auto right = Make(3, 1, 3);
  // Each single action left out, or twice.
  for (size_t r = 0; r < right.size(); ++r) {
    for (size_t a = 0; a < right[r].actions.size(); ++a) {
      const auto at = static_cast<int64_t>(a);
      auto missing = right;
      missing[r].actions.erase(missing[r].actions.begin() + at);
      EXPECT_NE(ScheduleChecker(missing).Check(), "") << r << " " << a;
      auto doubled = right;
      doubled[r].actions.insert(doubled[r].actions.begin() + at, right[r].actions[a]);
      EXPECT_NE(ScheduleChecker(doubled).Check(), "") << r << " " << a;
    }
  }
  // Gradients of micro-batches 0 and 1 added in the other order.
  auto descending = right;
  for (Action& a : descending[0].actions) {
    if (a.kind == ActionKind::kBackward && a.micro_batch < 2) a.micro_batch = 1 - a.micro_batch;
  }
  EXPECT_THAT(ScheduleChecker(descending).Check(), HasSubstr("out of order"));
  auto peer = right;
  for (Action& a : peer[1].actions) {
    for (StageTransfer& t : a.transfers) t.peer = 2 - t.peer;
  }
  EXPECT_THAT(ScheduleChecker(peer).Check(), HasSubstr("with rank"));
}

}  // namespace
}  // namespace zeroshard
