#include "common/security/connection_gate.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace zeroshard::security {
namespace {

using Verdict = ConnectionGate::Verdict;

class ConnectionGateTest : public testing::Test {
 protected:
  Verdict Come(const std::string& peer) {
    const Verdict verdict = gate_.Judge(peer, now_);
    if (verdict == Verdict::kLetIn) {
      auto alive = std::make_shared<bool>(true);
      gate_.LetIn(peer, [alive] { return *alive; });
      open_.push_back(alive);
    }
    return verdict;
  }

  ConnectionGate gate_{{.in_all = 10, .of_peer = 4, .burst = 20, .per_second = 2}};
  absl::Duration now_;
  std::vector<std::shared_ptr<bool>> open_;
};

TEST_F(ConnectionGateTest, APeerHasAtMostSoManyAndAnotherStillComesIn) {
  for (int i = 0; i < 4; ++i) EXPECT_EQ(Come("10.0.0.1"), Verdict::kLetIn);
  EXPECT_EQ(Come("10.0.0.1"), Verdict::kTooManyOfPeer);
  EXPECT_EQ(Come("10.0.0.2"), Verdict::kLetIn);
  *open_[0] = false;
  EXPECT_EQ(Come("10.0.0.1"), Verdict::kLetIn);
  EXPECT_EQ(Come("10.0.0.1"), Verdict::kTooManyOfPeer);
}

TEST_F(ConnectionGateTest, AllPeersTogetherHaveAtMostSoMany) {
  for (int peer = 0; peer < 5; ++peer) {
    for (int i = 0; i < 2; ++i) EXPECT_EQ(Come("10.0.0." + std::to_string(peer)), Verdict::kLetIn);
  }
  EXPECT_EQ(Come("10.0.0.9"), Verdict::kTooManyInAll);
  *open_[3] = false;
  now_ += absl::Seconds(1);
  EXPECT_EQ(Come("10.0.0.9"), Verdict::kLetIn);
  EXPECT_EQ(gate_.open(), 10u);
}

TEST_F(ConnectionGateTest, ComingAndGoingIsBoundedByTheSecond) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(Come("10.0.0.1"), Verdict::kLetIn) << i;
    *open_.back() = false;
  }
  EXPECT_EQ(Come("10.0.0.1"), Verdict::kTooFast);
  EXPECT_EQ(Come("10.0.0.2"), Verdict::kLetIn);
  now_ += absl::Milliseconds(500);  // two a second
  EXPECT_EQ(Come("10.0.0.1"), Verdict::kLetIn);
  EXPECT_EQ(Come("10.0.0.1"), Verdict::kTooFast);
}

TEST_F(ConnectionGateTest, PeersThatAreGoneAreForgotten) {
  for (int i = 0; i < 500; ++i) {
    ASSERT_EQ(Come("10.1." + std::to_string(i / 250) + "." + std::to_string(i % 250)),
              Verdict::kLetIn);
    *open_.back() = false;
    now_ += absl::Milliseconds(200);
  }
  now_ += absl::Minutes(2);
  EXPECT_EQ(Come("10.0.0.1"), Verdict::kLetIn);
  EXPECT_EQ(gate_.peers(), 1u);
  EXPECT_EQ(gate_.open(), 1u);
}

}  // namespace
}  // namespace zeroshard::security
