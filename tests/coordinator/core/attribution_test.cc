#include "coordinator/core/attribution.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kStoreGone[] = "store s1 at 10.0.0.7:7072: recvmsg: connection reset by peer";

std::vector<RankEvidence> Ranks(uint32_t world) {
  std::vector<RankEvidence> ranks(world);
  for (uint32_t rank = 0; rank < world; ++rank) {
    ranks[rank].rank = rank;
    ranks[rank].member = absl::StrCat("w", rank);
    ranks[rank].host = absl::StrCat("host-", rank);
  }
  return ranks;
}

// The rank's report, given as the `order`-th sign of the failure.
void Reports(std::vector<RankEvidence>& ranks, uint32_t rank, uint64_t order,
             const std::string& message, std::optional<uint32_t> blamed = {}) {
  v1::ReportEndRequest end;
  end.set_error_code("UNAVAILABLE");
  end.set_message(message);
  if (blamed) {
    end.set_blamed_rank(*blamed);
    ranks[*blamed].accusers[rank] = absl::StrCat("UNAVAILABLE: ", message);
  }
  ranks[rank].failed = end;
  ranks[rank].order = order;
}

void LosesStore(std::vector<RankEvidence>& ranks, uint32_t rank, uint64_t order) {
  Reports(ranks, rank, order, kStoreGone);
  ranks[rank].names_store = true;
}

TEST(Attribution, ARanksOwnReportOfAStoreBeatsAPeerThatLostTheRank) {
  for (const uint64_t first : {1, 2}) {
    std::vector<RankEvidence> ranks = Ranks(2);
    LosesStore(ranks, 0, first);
    Reports(ranks, 1, 3 - first, "a peer closed the connection", 0);
    const Blame blame = Attribute(ranks);
    EXPECT_EQ(blame.rank, 0u);
    EXPECT_FALSE(blame.own_error);
    EXPECT_EQ(blame.message, absl::StrCat("rank 0 (w0 on host-0): UNAVAILABLE: ", kStoreGone));
  }
}

// Rank 1 gives up because of rank 0, and rank 2 then loses rank 1.
TEST(Attribution, AChainOfLostPeersEndsAtTheStore) {
  std::vector<RankEvidence> ranks = Ranks(3);
  Reports(ranks, 2, 1, "connection reset", 1);
  Reports(ranks, 1, 2, "connection reset", 0);
  LosesStore(ranks, 0, 3);
  EXPECT_THAT(Attribute(ranks).message,
              AllOf(HasSubstr(kStoreGone), Not(HasSubstr("stopped answering"))));
}

TEST(Attribution, AProcessThatEndedOrABrokenStreamBeatsAReportOfAStore) {
  std::vector<RankEvidence> ranks = Ranks(2);
  LosesStore(ranks, 0, 1);
  ranks[1].disconnected = absl::Seconds(2);
  EXPECT_EQ(Attribute(ranks).rank, 1u);
  ranks[1].disconnected.reset();
  ranks[1].exit = RankEvidence::Exit{0, 9};
  EXPECT_EQ(Attribute(ranks).rank, 1u);
}

TEST(Attribution, WithoutAStoreThePeersAreBelieved) {
  std::vector<RankEvidence> ranks = Ranks(2);
  Reports(ranks, 0, 1, "the coordinator is away");
  Reports(ranks, 1, 2, "connection reset", 0);
  EXPECT_THAT(Attribute(ranks).message, HasSubstr("rank 0 (w0 on host-0) stopped answering"));
}

TEST(Attribution, AReportNamesAStoreByNameAndAddressAndForItself) {
  v1::StoreMap::Store store;
  store.set_member("s1");
  store.set_address("10.0.0.7:7072");
  v1::ReportEndRequest end;
  end.set_error_code("UNAVAILABLE");
  end.set_message(kStoreGone);
  EXPECT_TRUE(NamesStore(end, 0, store));
  // What a peer of rank 0 says of it.
  end.set_blamed_rank(0);
  EXPECT_TRUE(NamesStore(end, 0, store));
  EXPECT_FALSE(NamesStore(end, 1, store));
  end.clear_blamed_rank();
  end.set_error_code("INVALID_ARGUMENT");  // the store answers
  EXPECT_FALSE(NamesStore(end, 0, store));
  end.set_error_code("UNAVAILABLE");
  store.set_member("s10");
  EXPECT_FALSE(NamesStore(end, 0, store));
}

}  // namespace
}  // namespace zeroshard::coordinator
