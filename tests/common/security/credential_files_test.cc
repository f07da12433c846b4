// Files that change: what is of no use is left alone and said once, what is good takes hold.
#include "common/security/credential_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "absl/time/clock.h"
#include "tests/common/security/certificates.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::security {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kUri[] = "spiffe://zeroshard/worker";

class CredentialFilesTest : public testing::Test {
 protected:
  CredentialFilesTest() : ca_(folder_ / "ca.crt"), pair_(authority_.Issue(folder_ / "w", kUri)) {
    WriteWhole(ca_, authority_.Pem());
    auto opened = CredentialFiles::Open(
        pair_.cert, pair_.key, ca_,
        [this](const CredentialFiles::Set& set, absl::Time now) {
          return verdict_.ok() ? CheckPair(set.cert, set.key, set.ca, now) : verdict_;
        },
        absl::InfiniteDuration());
    EXPECT_TRUE(opened.ok()) << opened.status();
    files_ = *std::move(opened);
  }

  // What a look writes.
  std::string Look() {
    testing::internal::CaptureStderr();
    files_->Look();
    return testing::internal::GetCapturedStderr();
  }
  static std::string Text(const std::string& path) { return ReadPem(path)->text; }

  TempFolder folder_;
  TestAuthority authority_{"one"};
  std::string ca_;
  Files pair_;
  absl::Status verdict_;
  std::shared_ptr<CredentialFiles> files_;
};

TEST_F(CredentialFilesTest, ABadFileIsSaidOnceAndTheOldSetStays) {
  const CredentialFiles::Set before = files_->used();
  for (const std::string& bad : {std::string(), std::string("no PEM at all")}) {
    const uint64_t refused = files_->refused();
    WriteWhole(pair_.cert, bad);
    EXPECT_THAT(Look(), IsEmpty()) << "it may be half of a replacement";
    EXPECT_THAT(Look(), AllOf(HasSubstr("WARNING"), HasSubstr(pair_.cert),
                              HasSubstr("no certificate in it"), HasSubstr("stays in use"),
                              HasSubstr("Replace the files")));
    for (int i = 0; i < 3; ++i) EXPECT_THAT(Look(), IsEmpty());
    EXPECT_EQ(files_->refused(), refused + 1);
    EXPECT_EQ(files_->used(), before);
  }
  unlink(pair_.key.c_str());
  Look();
  EXPECT_THAT(Look(), HasSubstr(pair_.key));
  EXPECT_EQ(files_->refused(), 3u);
  const Files good = authority_.Issue(folder_ / "w", kUri);
  EXPECT_THAT(Look(), AllOf(HasSubstr("INFO"), HasSubstr("read again from"), HasSubstr(good.cert)));
  EXPECT_EQ(files_->used().cert.text, Text(good.cert));
  EXPECT_EQ(files_->refused(), 3u);
}

TEST_F(CredentialFilesTest, ABundleThatIsNotWholeIsCountedAndTheOldOneStays) {
  const CredentialFiles::Set before = files_->used();
  WriteWhole(ca_, authority_.Pem() + "-----BEGIN CERTIFICATE-----\nhalf of o");
  Look();
  EXPECT_THAT(Look(), AllOf(HasSubstr(ca_), HasSubstr("block 2 in it is no certificate")));
  EXPECT_EQ(files_->refused(), 1u);
  EXPECT_EQ(files_->used(), before);
}

TEST_F(CredentialFilesTest, AKeyThatComesBeforeItsCertificateIsWaitedFor) {
  const CredentialFiles::Set before = files_->used();
  const Files next = authority_.Issue(folder_ / "next", kUri);
  WriteWhole(pair_.key, Text(next.key));
  EXPECT_THAT(Look(), IsEmpty());
  EXPECT_EQ(files_->used(), before);
  WriteWhole(pair_.cert, Text(next.cert));
  EXPECT_THAT(Look(), HasSubstr("read again from"));
  EXPECT_EQ(files_->used().key.text, Text(next.key));
  EXPECT_EQ(files_->refused(), 0u);
}

TEST_F(CredentialFilesTest, WhatBecomesGoodWithoutAnotherChangeIsTaken) {
  authority_.Issue(folder_ / "w", kUri);
  verdict_ = absl::InvalidArgumentError("not valid before noon");
  Look();
  EXPECT_THAT(Look(), HasSubstr("not valid before noon"));
  verdict_ = absl::InvalidArgumentError("not valid before noon, it is a second later");
  EXPECT_THAT(Look(), IsEmpty());
  verdict_ = absl::OkStatus();
  EXPECT_THAT(Look(), HasSubstr("read again from"));
  EXPECT_EQ(files_->used().cert.text, Text(pair_.cert));
}

TEST_F(CredentialFilesTest, TheOldSetComingBackIsNoChange) {
  const std::string cert = Text(pair_.cert);
  WriteWhole(pair_.cert, "junk");
  Look();
  EXPECT_THAT(Look(), HasSubstr(pair_.cert));
  WriteWhole(pair_.cert, cert);
  EXPECT_THAT(Look(), IsEmpty());
  WriteWhole(pair_.cert, "junk");
  Look();
  EXPECT_THAT(Look(), HasSubstr(pair_.cert)) << "a new change is said again";
  EXPECT_EQ(files_->refused(), 2u);
}

TEST_F(CredentialFilesTest, AFileThatHoldsMoreThanItShouldGivesThePairThatWasChecked) {
  const Files other = authority_.Issue(folder_ / "other", kUri);
  const PemFile cert = {"cert", Text(pair_.cert) + Text(other.key) + Text(other.cert)};
  const PemFile key = {"key", Text(other.cert) + Text(pair_.key) + Text(other.key)};
  const absl::StatusOr<std::string> joined = JoinPair(cert, key);
  ASSERT_TRUE(joined.ok()) << joined.status();
  const PemFile both = {"joined", *joined};
  const PemFile ca = {"ca", authority_.Pem()};
  EXPECT_TRUE(CheckPair(both, both, ca, absl::Now()).ok());
  EXPECT_EQ(joined->find(Text(other.key)), std::string::npos);
  EXPECT_NE(joined->find(Text(pair_.cert)), std::string::npos);
}

}  // namespace
}  // namespace zeroshard::security
