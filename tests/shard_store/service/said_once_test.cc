#include "shard_store/service/said_once.h"

#include <gtest/gtest.h>

namespace zeroshard::store {
namespace {

TEST(SaidOnceTest, EachReasonOfEachPeerIsSaidOnce) {
  SaidOnce said;
  EXPECT_TRUE(said.First("worker-0", "RESOURCE_EXHAUSTED"));
  EXPECT_FALSE(said.First("worker-0", "RESOURCE_EXHAUSTED"));
  EXPECT_TRUE(said.First("worker-0", "PERMISSION_DENIED"));
  EXPECT_TRUE(said.First("worker-1", "RESOURCE_EXHAUSTED"));
  EXPECT_FALSE(said.First("worker-1", "RESOURCE_EXHAUSTED"));
}

TEST(SaidOnceTest, PeersThatNeverEndDoNotFillMemory) {
  SaidOnce said(2);
  EXPECT_TRUE(said.First("a", "x"));
  EXPECT_TRUE(said.First("b", "x"));
  EXPECT_TRUE(said.First("c", "x"));  // the others are forgotten
  EXPECT_FALSE(said.First("c", "x"));
  EXPECT_TRUE(said.First("a", "x"));
}

}  // namespace
}  // namespace zeroshard::store
