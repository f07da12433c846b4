// `zeroshard health` as a container engine runs it.
#include "common/exit_codes.h"
#include "common/health_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/client/command_fixture.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

using HealthCommandTest = CommandTest;

TEST_F(HealthCommandTest, ItsExitCodeSaysWhetherTheServiceServes) {
  const auto server = HealthServer::Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.status();
  const std::string address = (*server)->address();
  const Outcome alive = Run({"health", address});
  EXPECT_EQ(alive.code, kExitOk) << alive.err;
  EXPECT_EQ(alive.out, "SERVING\n");
  const Outcome unready = Run({"health", address, "--service", "ready"});
  EXPECT_EQ(unready.code, kExitFailed);
  EXPECT_EQ(unready.out, "NOT_SERVING\n");
  (*server)->SetReady(true);
  const Outcome ready = Run({"health", address, "--service", "ready", "--output", "json"});
  EXPECT_EQ(ready.code, kExitOk) << ready.err;
  const auto json = nlohmann::json::parse(ready.out);
  EXPECT_EQ(json["service"], "ready");
  EXPECT_EQ(json["status"], "SERVING");
  const Outcome unknown = Run({"health", address, "--service", "x"});
  EXPECT_EQ(unknown.code, kExitNotFound);
  ExpectOneMessage(unknown);
}

TEST_F(HealthCommandTest, NobodyThereAndNoAddressAreToldApart) {
  auto server = HealthServer::Start("127.0.0.1:0");
  ASSERT_TRUE(server.ok());
  const std::string address = (*server)->address();
  server->reset();
  const Outcome nobody = Run({"health", address});
  EXPECT_EQ(nobody.code, kExitUnavailable);
  ExpectOneMessage(nobody);
  EXPECT_THAT(nobody.err, HasSubstr(address));
  for (const std::vector<std::string>& wrong :
       {std::vector<std::string>{"health"}, {"health", "nowhere"}, {"health", "127.0.0.1:0"}}) {
    const Outcome outcome = Run(wrong);
    EXPECT_EQ(outcome.code, kExitUsage) << outcome.err;
    ExpectOneMessage(outcome);
  }
}

}  // namespace
}  // namespace zeroshard
