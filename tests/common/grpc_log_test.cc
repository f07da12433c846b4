#include "common/grpc_log.h"

#include <grpc/support/log.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "absl/time/clock.h"

namespace zeroshard {
namespace {

// What is written of a line of gRPC's; again where the bound, which is the process's, has it wait.
std::string Written(const char* line, bool patient) {
  std::string written;
  const absl::Time end = absl::Now() + absl::Seconds(patient ? 30 : 0);
  do {
    testing::internal::CaptureStderr();
    gpr_log(GPR_ERROR, "%s", line);
    written = testing::internal::GetCapturedStderr();
    if (written.empty() && patient) absl::SleepFor(absl::Milliseconds(100));
  } while (written.empty() && absl::Now() < end);
  return written;
}

TEST(GrpcLogTest, LinesComeWithoutDetailsAndWithoutThoseThatNameNobody) {
  GuardGrpcLog();
  constexpr char kOdd[] =
      "odd: UNKNOWN:outer {file:\"a.cc\", children:[INTERNAL:inner {file_line:167}]}";
  const std::string odd = Written(kOdd, true);
  EXPECT_TRUE(absl::StrContains(odd, "gRPC: odd: UNKNOWN:outer: INTERNAL:inner")) << odd;
  EXPECT_FALSE(absl::StrContains(odd, "file")) << odd;
  EXPECT_TRUE(absl::StrContains(Written("no details at all", true), "gRPC: no details at all\n"));
  EXPECT_EQ(Written("TlsChannelSecurityConnector::cancel_check_peer error: UNKNOWN:Handshake timed "
                    "out {file_line:167}",
                    false),
            "");
  EXPECT_NE(Written("it was not the bound that kept it back", false), "");
}

}  // namespace
}  // namespace zeroshard
