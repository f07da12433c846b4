#include "client/console.h"

#include <sstream>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

TEST(PrintError, KeepsTheLinesOfAMessageAndNothingElseThatMovesTheCursor) {
  std::ostringstream err;
  PrintError(&err, "job.yaml:1: no\njob.yaml:2: \033[1A neither");
  EXPECT_EQ(err.str(), "zeroshard: job.yaml:1: no\njob.yaml:2: \\x1b[1A neither\n");
}

}  // namespace
}  // namespace zeroshard
