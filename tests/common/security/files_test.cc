// What is wrong with the files is said at the start, with their names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/security/certificate.h"
#include "common/security/refusals.h"
#include "common/security/security.h"
#include "common/security/security_metrics.h"
#include "common/security/token_file.h"
#include "tests/common/security/certificates.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::security {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class FilesTest : public testing::Test {
 protected:
  FilesTest() : ca_(folder_ / "ca.crt") { WriteWhole(ca_, authority_.Pem()); }

  Files Issue(const std::string& name, const Wanted& wanted = {{"spiffe://zeroshard/worker"}}) {
    return authority_.Issue(folder_ / name, wanted);
  }
  // The message of a refusal, which is a usage error.
  std::string Refused(const SecurityOptions& options, Role own = Role::kWorker) {
    const auto loaded = Security::Load(options, own);
    EXPECT_FALSE(loaded.ok());
    EXPECT_EQ(ExitCodeFor(loaded.status()), kExitUsage) << loaded.status();
    return std::string(loaded.status().message());
  }

  TempFolder folder_;
  TestAuthority authority_{"one"};
  std::string ca_;
};

TEST_F(FilesTest, AGoodPairIsTaken) {
  const Files files = Issue("w");
  const auto loaded = Security::Load({files.cert, files.key, ca_, "", false}, Role::kWorker);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE((*loaded)->tls());
  EXPECT_TRUE((*loaded)->CheckListen({"0.0.0.0", 1}, "--listen").ok());
}

TEST_F(FilesTest, WhatIsWrongWithAFileIsSaidWithItsName) {
  const Files files = Issue("w");
  const Files other = Issue("other");
  const std::string absent = folder_ / "absent.crt";
  EXPECT_THAT(Refused({absent, files.key, ca_, "", false}), HasSubstr(absent));
  EXPECT_THAT(Refused({files.cert, absent, ca_, "", false}), HasSubstr(absent));
  EXPECT_THAT(Refused({files.cert, files.key, absent, "", false}), HasSubstr(absent));
  EXPECT_THAT(Refused({folder_.path(), files.key, ca_, "", false}), HasSubstr(folder_.path()));
  const std::string junk = folder_ / "junk";
  WriteWhole(junk, "-----BEGIN CERTIFICATE-----\nnot base64\n-----END CERTIFICATE-----\n");
  EXPECT_THAT(Refused({junk, files.key, ca_, "", false}),
              AllOf(HasSubstr(junk), HasSubstr("block 1 in it is no certificate")));
  const std::string empty = folder_ / "empty";
  WriteWhole(empty, "# nothing\n");
  EXPECT_THAT(Refused({empty, files.key, ca_, "", false}),
              AllOf(HasSubstr(empty), HasSubstr("no certificate in it, wanted PEM")));
  EXPECT_THAT(Refused({files.cert, junk, ca_, "", false}),
              AllOf(HasSubstr(junk), HasSubstr("no private key")));
  EXPECT_THAT(Refused({files.cert, other.key, ca_, "", false}),
              AllOf(HasSubstr(other.key), HasSubstr("is not the key of"), HasSubstr(files.cert)));
}

// What follows a block that cannot be read must not be left out without a word.
TEST_F(FilesTest, ABundleWithABlockThatIsNotWholeIsRefused) {
  const Files files = Issue("w");
  const std::string one = authority_.Pem(), two = TestAuthority("two").Pem();
  const size_t middle = two.size() / 2;
  const auto with = [&](char seen) {
    std::string text = two;
    text[middle] = seen;
    return text;
  };
  const std::string bundle = folder_ / "bundle.crt";
  const auto load = [&](const std::string& text) {
    WriteWhole(bundle, text);
    return SecurityOptions{files.cert, files.key, bundle, "", false};
  };
  ASSERT_TRUE(Security::Load(load(one + "# the next one\n" + two), Role::kWorker).ok());
  const std::string not_der = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
  for (const std::string& bad : {with('*'), two.substr(0, middle), not_der}) {
    EXPECT_THAT(Refused(load(one + bad)),
                AllOf(HasSubstr(bundle), HasSubstr("block 2 in it is no certificate")));
    EXPECT_THAT(Refused(load(one + bad + two)), HasSubstr("block 2 in it"));
    EXPECT_THAT(Refused(load(bad + one)), HasSubstr("block 1 in it"));
  }
}

TEST_F(FilesTest, ACertificateOfAnotherTimeOrAuthorityIsRefused) {
  const Files expired = Issue(
      "expired",
      {.uris = {"spiffe://zeroshard/worker"}, .from = -absl::Hours(2), .to = -absl::Hours(1)});
  EXPECT_THAT(Refused({expired.cert, expired.key, ca_, "", false}),
              AllOf(HasSubstr(expired.cert), HasSubstr("expired on")));
  const Files future =
      Issue("future",
            {.uris = {"spiffe://zeroshard/worker"}, .from = absl::Hours(1), .to = absl::Hours(2)});
  EXPECT_THAT(Refused({future.cert, future.key, ca_, "", false}), HasSubstr("not valid before"));
  const TestAuthority stranger("two");
  const Files strange = stranger.Issue(folder_ / "strange", "spiffe://zeroshard/worker");
  EXPECT_THAT(Refused({strange.cert, strange.key, ca_, "", false}),
              AllOf(HasSubstr(strange.cert), HasSubstr(ca_)));
}

TEST_F(FilesTest, ACertificateForAnotherRoleIsRefused) {
  const Files files = Issue("w");
  EXPECT_THAT(Refused({files.cert, files.key, ca_, "", false}, Role::kStore),
              AllOf(HasSubstr("is for worker"), HasSubstr("spiffe://zeroshard/store")));
}

TEST_F(FilesTest, ACertificateThatCannotBeUsedAsTheRoleDoesIsRefused) {
  const auto issue = [&](const std::string& name, Role role, const std::string& usage) {
    const Files files = Issue(name, {.uris = {UriOf(role)}, .usage = usage});
    return SecurityOptions{files.cert, files.key, ca_, "", false};
  };
  EXPECT_THAT(Refused(issue("a", Role::kWorker, "serverAuth")), HasSubstr("client of TLS"));
  EXPECT_THAT(Refused(issue("b", Role::kStore, "clientAuth"), Role::kStore),
              HasSubstr("server of TLS"));
  EXPECT_THAT(Refused(issue("c", Role::kCoordinator, "clientAuth"), Role::kCoordinator),
              HasSubstr("wanted server auth"));
  EXPECT_TRUE(
      Security::Load(issue("d", Role::kWorker, "serverAuth,clientAuth"), Role::kWorker).ok());
  EXPECT_TRUE(Security::Load(issue("e", Role::kClient, "clientAuth"), Role::kClient).ok());
  EXPECT_TRUE(
      Security::Load(issue("f", Role::kCoordinator, "serverAuth"), Role::kCoordinator).ok());
}

TEST_F(FilesTest, OptionsThatDoNotBelongTogetherAreRefused) {
  const Files files =
      Issue("w", {.uris = {"spiffe://zeroshard/client", "spiffe://zeroshard/coordinator"}});
  const std::string tokens = folder_ / "tokens";
  WriteWhole(tokens, "0123456789abcdef\n");
  EXPECT_THAT(Refused({files.cert, "", ca_, "", false}), HasSubstr("--tls-key: missing"));
  EXPECT_THAT(Refused({"", files.key, ca_, "", false}), HasSubstr("--tls-cert: missing"));
  EXPECT_THAT(Refused({files.cert, files.key, "", "", false}), HasSubstr("--tls-ca: missing"));
  EXPECT_THAT(Refused({files.cert, files.key, ca_, "", true}), HasSubstr("--insecure"));
  EXPECT_THAT(Refused({"", "", ca_, "", false}), HasSubstr("--tls-cert: missing"));
  EXPECT_THAT(Refused({"", "", "", tokens, false}, Role::kCoordinator),
              HasSubstr("--token-file: seen without TLS"));
  EXPECT_THAT(Refused({"", "", "", tokens, true}, Role::kClient), HasSubstr("--tls-ca"));
  EXPECT_THAT(Refused({"", "", ca_, "", false}, Role::kClient), HasSubstr("--token-file"));
  EXPECT_TRUE(Security::Load({"", "", ca_, tokens, false}, Role::kClient).ok());
  EXPECT_TRUE(Security::Load({files.cert, files.key, ca_, tokens, false}, Role::kCoordinator).ok());
}

TEST(SecurityTest, WithoutTlsOnlyLoopbackIsSpokenToUnlessAskedFor) {
  const auto closed = Security::Plaintext();
  for (const char* host : {"127.0.0.1", "127.9.9.9", "localhost", "::1"}) {
    EXPECT_TRUE(closed->CheckListen({host, 7070}, "--listen").ok()) << host;
  }
  for (const char* host : {"0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "localhost.evil.com",
                           "127.0.0.1.evil.com", "::ffff:10.0.0.1", ""}) {
    const absl::Status refused = closed->CheckListen({host, 7070}, "--listen");
    EXPECT_EQ(ExitCodeFor(refused), kExitUsage) << host;
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("--listen"), HasSubstr("--tls-cert"), HasSubstr("--insecure")));
  }
  EXPECT_TRUE(closed->CheckTarget("127.0.0.1:7070", "--coordinator").ok());
  EXPECT_FALSE(closed->CheckTarget("10.0.0.5:7070", "--coordinator").ok());
  const auto open = Security::Plaintext(/*insecure=*/true);
  EXPECT_TRUE(open->CheckListen({"0.0.0.0", 7070}, "--listen").ok());
  EXPECT_TRUE(open->CheckTarget("10.0.0.5:7070", "--coordinator").ok());
}

TEST_F(FilesTest, TokensAreReadAgainWhenTheyChange) {
  const std::string path = folder_ / "tokens";
  WriteWhole(path, "\n  first-token-of-all  \nsecond-token-of-all\r\n");
  ManualClock clock;
  const auto tokens = TokenFile::Open(path, &clock);
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ((*tokens)->First(), "first-token-of-all");
  EXPECT_TRUE((*tokens)->Contains("second-token-of-all"));
  EXPECT_FALSE((*tokens)->Contains("second-token-of-al"));
  EXPECT_FALSE((*tokens)->Contains(""));
  WriteWhole(path, "third-token-of-them-all\n");
  clock.Advance(absl::Seconds(2));
  EXPECT_TRUE((*tokens)->Contains("third-token-of-them-all"));
  EXPECT_FALSE((*tokens)->Contains("first-token-of-all"));
  WriteWhole(path, "");  // whoever writes it is not done yet
  clock.Advance(absl::Seconds(2));
  EXPECT_TRUE((*tokens)->Contains("third-token-of-them-all"));
}

TEST_F(FilesTest, ATokenThatCanBeGuessedOrCannotBeSentIsRefused) {
  const std::string path = folder_ / "tokens";
  ManualClock clock;
  for (const std::string& text :
       {std::string("short"), std::string(2000, 'x'), std::string("with a space in it"),
        std::string("with\0a-nul-in-the-token", 23), std::string("\n\n"),
        std::string("g\xc3\xbcltig-aber-kein-ascii")}) {
    WriteWhole(path, text);
    const auto refused = TokenFile::Open(path, &clock);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr(path));
    EXPECT_EQ(std::string(refused.status().message()).find(text), std::string::npos)
        << "a token is not for logs";
  }
}

double ValueOf(const std::vector<prometheus::MetricFamily>& families, const std::string& name) {
  for (const auto& family : families) {
    if (family.name == name) return family.metric.at(0).gauge.value;
  }
  return -1;
}

double CountOf(const std::vector<prometheus::MetricFamily>& families, const std::string& name) {
  for (const auto& family : families) {
    if (family.name == name) return family.metric.at(0).counter.value;
  }
  return -1;
}

TEST_F(FilesTest, MetricsShowTheCertificatesEndAlsoAfterARenewal) {
  const Files files = Issue("w");
  const auto loaded = Security::Load({files.cert, files.key, ca_, "", false}, Role::kWorker);
  ASSERT_TRUE(loaded.ok());
  const SecurityMetrics metrics(*loaded);
  constexpr char kName[] = "zeroshard_tls_certificate_expiry_timestamp_seconds";
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  EXPECT_NEAR(ValueOf(metrics.Collect(), kName), now + 3600, 60);
  Issue("w", {.uris = {"spiffe://zeroshard/worker"}, .to = absl::Hours(5)});
  const auto becomes = [&](const std::function<bool()>& is) {
    for (const absl::Time end = absl::Now() + absl::Seconds(20); !is() && absl::Now() < end;) {
      absl::SleepFor(absl::Milliseconds(50));
    }
    return is();
  };
  EXPECT_TRUE(becomes([&] { return ValueOf(metrics.Collect(), kName) > now + 4 * 3600; }));
  constexpr char kFailures[] = "zeroshard_tls_certificate_reload_failures_total";
  EXPECT_EQ(CountOf(metrics.Collect(), kFailures), 0);
  WriteWhole(files.cert, "");
  EXPECT_TRUE(becomes([&] { return CountOf(metrics.Collect(), kFailures) == 1; }));
  EXPECT_NEAR(ValueOf(metrics.Collect(), kName), now + 5 * 3600, 60);
}

TEST(SecurityMetricsTest, RefusalsAreThereFromTheStartAndNoExpiryWithoutTls) {
  const auto families = SecurityMetrics(Security::Plaintext()).Collect();
  ASSERT_EQ(families.size(), 1u);
  EXPECT_EQ(families[0].name, "zeroshard_rpc_refused_total");
  ASSERT_EQ(families[0].metric.size(), 4u);
  EXPECT_EQ(families[0].metric[0].label[0].value, "unauthenticated");
  EXPECT_EQ(families[0].metric[1].label[0].value, "role");
  EXPECT_EQ(families[0].metric[2].label[0].value, "flood");
  EXPECT_EQ(families[0].metric[3].label[0].value, "handshake");
}

}  // namespace
}  // namespace zeroshard::security
