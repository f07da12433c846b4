// The options as programs have them.
#include "common/security/options.h"

#include <stdlib.h>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard::security {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class OptionsTest : public testing::Test {
 protected:
  // The message of the refusal; empty: taken.
  std::string Parse(Role own, std::vector<std::string> reversed) {
    CLI::App app;
    options_ = {};
    AddSecurityOptions(&app, &options_, own);
    try {
      app.parse(std::move(reversed));
    } catch (const CLI::ParseError& error) {
      return error.what();
    }
    return "";
  }

  SecurityOptions options_;
};

TEST_F(OptionsTest, AnEmptyNameOfAFileIsRefusedByEveryProgram) {
  for (const Role own : {Role::kClient, Role::kCoordinator, Role::kWorker, Role::kStore}) {
    for (const std::string option : {"--tls-cert", "--tls-key", "--tls-ca", "--token-file"}) {
      const bool tokens = own == Role::kClient || own == Role::kCoordinator;
      if (option == "--token-file" && !tokens) continue;
      EXPECT_THAT(Parse(own, {"", option}), AllOf(HasSubstr(option), HasSubstr("seen no name")));
      EXPECT_THAT(Parse(own, {option + "="}), HasSubstr(option));
      EXPECT_EQ(Parse(own, {"a.pem", option}), "");
    }
  }
}

TEST_F(OptionsTest, AnEmptyVariableIsOneThatIsNotSet) {
  for (const char* variable :
       {"ZEROSHARD_TLS_CERT", "ZEROSHARD_TLS_KEY", "ZEROSHARD_TLS_CA", "ZEROSHARD_TOKEN_FILE"}) {
    setenv(variable, "", 1);
  }
  EXPECT_EQ(Parse(Role::kClient, {}), "");
  EXPECT_EQ(options_.cert + options_.key + options_.ca + options_.token_file, "");
  setenv("ZEROSHARD_TLS_CERT", "b.pem", 1);
  EXPECT_EQ(Parse(Role::kClient, {}), "");
  EXPECT_EQ(options_.cert, "b.pem");
  for (const char* variable :
       {"ZEROSHARD_TLS_CERT", "ZEROSHARD_TLS_KEY", "ZEROSHARD_TLS_CA", "ZEROSHARD_TOKEN_FILE"}) {
    unsetenv(variable);
  }
}

}  // namespace
}  // namespace zeroshard::security
