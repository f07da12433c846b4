// What a user gets to read where TLS is the reason that nothing is answered: the cause, and the
// option that it is about.
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/exit_codes.h"
#include "common/security/certificate.h"
#include "tests/client/command_fixture.h"
#include "tests/common/security/certificates.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TlsMistakesTest : public CommandTest {
 protected:
  TlsMistakesTest() : ca_((folder_ / "ca.crt").string()) {
    std::signal(SIGPIPE, SIG_IGN);  // as in the program
    security::WriteWhole(ca_, authority_.Pem());
    client_ = Issue(authority_, "client", {.uris = {"spiffe://zeroshard/client"}});
  }

  security::Files Issue(const security::TestAuthority& authority, const std::string& name,
                        const security::Wanted& wanted) {
    return authority.Issue((folder_ / name).string(), wanted);
  }
  // A server with TLS alone: what it does with calls is not asked.
  void Serve(const security::Files& files, const std::string& ca) {
    grpc::SslServerCredentialsOptions options(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    options.pem_root_certs = security::ReadPem(ca)->text;
    options.pem_key_cert_pairs.push_back(
        {security::ReadPem(files.key)->text, security::ReadPem(files.cert)->text});
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::SslServerCredentials(options), &port);
    builder.RegisterService(&jobs_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  void ServeAs(const security::Wanted& wanted) { Serve(Issue(authority_, "server", wanted), ca_); }

  // `list` at the server, which must fail with one message that does not say that nobody is there.
  std::string Refused(std::vector<std::string> options) {
    options.insert(options.begin(), {"list", "--timeout", "5", "--coordinator", address_});
    const Outcome outcome = Run(options);
    EXPECT_EQ(outcome.code, kExitUnavailable) << outcome.err;
    ExpectOneMessage(outcome);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr(address_), Not(HasSubstr("no coordinator answers"))));
    return outcome.err;
  }
  std::vector<std::string> Tls() const { return With(client_, ca_); }
  static std::vector<std::string> With(const security::Files& files, const std::string& ca) {
    return {"--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", ca};
  }

  const security::TestAuthority authority_{"one"};
  const security::TestAuthority stranger_{"two"};
  const std::string ca_;
  security::Files client_;
  const security::Wanted good_ = {.uris = {"spiffe://zeroshard/coordinator"}};
  v1::Jobs::Service jobs_;
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(TlsMistakesTest, WithoutTlsAtAServerThatWantsIt) {
  ServeAs(good_);
  EXPECT_THAT(Refused({}), AllOf(HasSubstr("speaks TLS"), HasSubstr("give --tls-ca"),
                                 HasSubstr("--tls-cert"), HasSubstr("--token-file")));
}

TEST_F(TlsMistakesTest, WithTlsAtAServerThatHasNone) {
  address_ = fake_.address();
  EXPECT_THAT(Refused(Tls()), AllOf(HasSubstr("does not speak TLS"), HasSubstr("--tls-ca")));
}

TEST_F(TlsMistakesTest, AServerThatNoAuthorityOfOursSigned) {
  ServeAs(good_);
  const std::string other = (folder_ / "other_ca.crt").string();
  security::WriteWhole(other, stranger_.Pem());
  const security::Files theirs =
      Issue(stranger_, "theirs", {.uris = {"spiffe://zeroshard/client"}});
  EXPECT_THAT(Refused(With(theirs, other)),
              AllOf(HasSubstr("signed by CN=one"), HasSubstr("--tls-ca " + other)));
}

TEST_F(TlsMistakesTest, AServerWhoseCertificateHasExpiredOrIsNotValidYet) {
  security::Wanted wanted = good_;
  wanted.from = -absl::Hours(2);
  wanted.to = -absl::Hours(1);
  ServeAs(wanted);
  EXPECT_THAT(Refused(Tls()), AllOf(HasSubstr("expired on 20"), HasSubstr("--tls-cert")));
  server_->Shutdown();
  wanted.from = absl::Hours(1);
  wanted.to = absl::Hours(2);
  ServeAs(wanted);
  EXPECT_THAT(Refused(Tls()), AllOf(HasSubstr("not valid before 20"), HasSubstr("clock")));
}

TEST_F(TlsMistakesTest, AServerThatIsCalledByANameThatItsCertificateLacks) {
  security::Wanted wanted = good_;
  wanted.hosts = {"DNS:coordinator.example", "IP:10.1.2.3"};
  ServeAs(wanted);
  EXPECT_THAT(Refused(Tls()), AllOf(HasSubstr("is for coordinator.example, 10.1.2.3, not for "
                                              "127.0.0.1"),
                                    HasSubstr("--tls-cert")));
}

TEST_F(TlsMistakesTest, AServerOfAnotherRole) {
  ServeAs({.uris = {"spiffe://zeroshard/worker"}});
  EXPECT_THAT(Refused(Tls()), HasSubstr("is for worker, wanted coordinator"));
}

TEST_F(TlsMistakesTest, ACertificateThatTheServerDoesNotTake) {
  ServeAs(good_);
  const std::string both = (folder_ / "both.crt").string();
  security::WriteWhole(both, authority_.Pem() + stranger_.Pem());
  const security::Files theirs =
      Issue(stranger_, "theirs", {.uris = {"spiffe://zeroshard/client"}});
  EXPECT_THAT(Refused(With(theirs, both)),
              AllOf(HasSubstr("refuses --tls-cert " + theirs.cert), HasSubstr("--tls-ca there")));
  const std::string tokens = (folder_ / "tokens").string();
  security::WriteWhole(tokens, "0123456789abcdef\n");
  EXPECT_THAT(Refused({"--tls-ca", ca_, "--token-file", tokens}),
              AllOf(HasSubstr("without a certificate"), HasSubstr("--tls-cert and --tls-key")));
}

TEST_F(TlsMistakesTest, NobodyAtAllIsNoMistakeOfTls) {
  const Outcome outcome = Run({"list", "--timeout", "2", "--coordinator", "127.0.0.1:1"});
  EXPECT_EQ(outcome.code, kExitUnavailable);
  EXPECT_THAT(outcome.err, HasSubstr("no coordinator answers at 127.0.0.1:1"));
  std::vector<std::string> args = {"list", "--timeout", "2", "--coordinator", "127.0.0.1:1"};
  for (const std::string& option : Tls()) args.push_back(option);
  EXPECT_THAT(Run(args).err, HasSubstr("no coordinator answers at 127.0.0.1:1"));
}

}  // namespace
}  // namespace zeroshard
