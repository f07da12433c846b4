#include "common/security/security.h"

#include <arpa/inet.h>

#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/security/authoriser.h"
#include "common/security/certificate.h"
#include "common/status_macros.h"
#include "grpcpp/security/tls_certificate_verifier.h"
#include "grpcpp/security/tls_credentials_options.h"

namespace zeroshard::security {
namespace {

constexpr absl::Duration kLookEvery = absl::Seconds(1);
constexpr char kWayOut[] =
    "give --tls-cert, --tls-key and --tls-ca (common/security/README.md says how they are made), "
    "stay on 127.0.0.1, or accept that with --insecure";

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// The host's name alone would let a worker of the same host pass for the coordinator.
class ServerVerifier : public grpc::experimental::ExternalCertificateVerifier {
 public:
  // `files`: gRPC deletes this together with the credentials that read them.
  ServerVerifier(Role role, std::shared_ptr<const CredentialFiles> files)
      : role_(role), files_(std::move(files)) {}

  bool Verify(grpc::experimental::TlsCustomVerificationCheckRequest* request,
              std::function<void(grpc::Status)>, grpc::Status* status) override {
    host_.Verify(request, nullptr, status);  // at once
    if (!status->ok()) {
      *status = grpc::Status(
          grpc::StatusCode::UNAUTHENTICATED,
          absl::StrCat("the server's certificate is not for the host that was called (",
                       Text(request->target_name()),
                       "); name it among the certificate's DNS names or IP addresses"));
      return true;
    }
    std::vector<std::string> uris;
    for (const grpc::string_ref& uri : request->uri_names()) uris.push_back(Text(uri));
    const Identity identity = Identity::FromUris(uris);
    if (!identity.Has(role_)) {
      *status = grpc::Status(grpc::StatusCode::UNAUTHENTICATED,
                             absl::StrCat("the server's certificate is for ", identity.Describe(),
                                          ", wanted ", NameOf(role_), " (", UriOf(role_), ")"));
    }
    return true;
  }
  void Cancel(grpc::experimental::TlsCustomVerificationCheckRequest*) override {}

 private:
  static std::string Text(grpc::string_ref text) { return {text.data(), text.size()}; }

  const Role role_;
  const std::shared_ptr<const CredentialFiles> files_;
  grpc::experimental::HostNameCertificateVerifier host_;
};

absl::Status CheckPresent(const SecurityOptions& options, Role own) {
  const bool any = !options.cert.empty() || !options.key.empty() || !options.ca.empty();
  if (options.insecure && any) {
    return Bad("--insecure and --tls-...: seen both, wanted one of them");
  }
  if (options.cert.empty() != options.key.empty()) {
    return Bad(options.cert.empty() ? "--tls-cert" : "--tls-key",
               ": missing, wanted the file that belongs to ",
               options.cert.empty() ? "--tls-key" : "--tls-cert");
  }
  if (any && options.ca.empty()) {
    return Bad(
        "--tls-ca: missing, wanted the certificates of the authorities that peers are "
        "signed by");
  }
  if (any && options.cert.empty() && own != Role::kClient) {
    return Bad("--tls-cert: missing, wanted this ", NameOf(own),
               "'s certificate and its --tls-key");
  }
  if (!options.token_file.empty() && options.ca.empty()) {
    return Bad(
        "--token-file: seen without TLS, where anybody on the way could read the token; ",
        own == Role::kClient ? "give --tls-ca too" : "give --tls-cert, --tls-key and --tls-ca too");
  }
  if (own == Role::kClient && any && options.cert.empty() && options.token_file.empty()) {
    return Bad(
        "--tls-ca: seen alone; wanted --tls-cert and --tls-key, or --token-file, too: the "
        "coordinator serves nobody whom it does not know");
  }
  return absl::OkStatus();
}

absl::Status CheckOwn(const CredentialFiles::Set& set, Role own, absl::Time now) {
  if (set.cert.path.empty()) return CheckAuthority(set.ca);
  ZS_RETURN_IF_ERROR(CheckPair(set.cert, set.key, set.ca, now));
  ZS_ASSIGN_OR_RETURN(const Certificate certificate, ReadCertificate(set.cert));
  const Identity identity = Identity::FromUris(certificate.uris);
  // Members call as well as they are called.
  const bool calls = own != Role::kCoordinator;
  const bool serves = own != Role::kClient;
  if ((calls && !certificate.for_clients) || (serves && !certificate.for_servers)) {
    return Bad("--tls-cert ", set.cert.path, ": its key usage does not let it be a ",
               calls && !certificate.for_clients ? "client" : "server", " of TLS; wanted ",
               calls ? "client auth" : "", calls && serves ? " and " : "",
               serves ? "server auth" : "", " among its usages, or no extended key usage");
  }
  if (identity.Has(own)) return absl::OkStatus();
  return Bad("--tls-cert ", set.cert.path, ": is for ", identity.Describe(), ", wanted ",
             NameOf(own), ": the URI ", UriOf(own), " among its subject alternative names");
}

std::shared_ptr<const Security>& OfProcess() {
  static auto* const process = new std::shared_ptr<const Security>(Security::Plaintext());
  return *process;
}
std::mutex process_mutex;

}  // namespace

std::shared_ptr<const Security> Security::Plaintext(bool insecure) {
  std::shared_ptr<Security> result(new Security);
  result->options_.insecure = insecure;
  return result;
}

absl::StatusOr<std::shared_ptr<const Security>> Security::Load(const SecurityOptions& options,
                                                               Role own) {
  ZS_RETURN_IF_ERROR(CheckPresent(options, own));
  if (options.ca.empty()) return Plaintext(options.insecure);
  std::shared_ptr<Security> result(new Security);
  result->options_ = options;
  const auto check = [own](const CredentialFiles::Set& set, absl::Time now) {
    return CheckOwn(set, own, now);
  };
  ZS_ASSIGN_OR_RETURN(result->files_, CredentialFiles::Open(options.cert, options.key, options.ca,
                                                            check, kLookEvery));
  if (!options.token_file.empty()) {
    ZS_ASSIGN_OR_RETURN(result->tokens_, TokenFile::Open(options.token_file, &SystemClock::Get()));
  }
  return result;
}

absl::Status Security::CheckListen(const HostPort& address, absl::string_view option) const {
  if (open() || IsLoopback(address.host)) return absl::OkStatus();
  return Bad(
      option, " ", address.ToString(),
      ": other hosts reach it, and nothing says who they are or hides what is sent: ", kWayOut);
}

absl::Status Security::CheckTarget(absl::string_view address, absl::string_view option) const {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  if (open() || !parsed.ok() || IsLoopback(parsed->host)) return absl::OkStatus();
  return Bad(option, " ", address,
             ": is another host, and nothing says whether it is the right one or hides what is "
             "sent: ",
             kWayOut);
}

std::shared_ptr<grpc::ServerCredentials> Security::ServerCredentials() const {
  if (!tls()) return grpc::InsecureServerCredentials();
  grpc::experimental::TlsServerCredentialsOptions options(files_->provider());
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(tokens_ != nullptr
                                    ? GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  auto credentials = grpc::experimental::TlsServerCredentials(options);
  credentials->SetAuthMetadataProcessor(std::make_shared<Authoriser>(tokens_, files_));
  return credentials;
}

std::shared_ptr<grpc::ChannelCredentials> Security::ChannelCredentials(Role role) const {
  if (!tls()) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(files_->provider());
  options.watch_root_certs();
  if (!options_.cert.empty()) options.watch_identity_key_cert_pairs();
  options.set_certificate_verifier(
      grpc::experimental::ExternalCertificateVerifier::Create<ServerVerifier>(role, files_));
  return grpc::experimental::TlsCredentials(options);
}

std::string Security::Authorization() const {
  return tokens_ == nullptr ? "" : absl::StrCat("Bearer ", tokens_->First());
}

bool IsLoopback(absl::string_view host) {
  const std::string text(host);
  if (text == "localhost") return true;
  in_addr v4 = {};
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6 = {};
  return inet_pton(AF_INET6, text.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

std::shared_ptr<const Security> ProcessSecurity() {
  std::lock_guard<std::mutex> lock(process_mutex);
  return OfProcess();
}

void SetProcessSecurity(std::shared_ptr<const Security> security) {
  std::lock_guard<std::mutex> lock(process_mutex);
  OfProcess() = std::move(security);
}

}  // namespace zeroshard::security
