// What protects this process's connections: mutual TLS from files that are watched, or nothing,
// which is for loopback alone unless it was asked for.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/net_address.h"
#include "common/security/credential_files.h"
#include "common/security/identity.h"
#include "common/security/token_file.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"

namespace zeroshard::security {

struct SecurityOptions {
  std::string cert;        // PEM: this process's certificate, then those up to the authority's
  std::string key;         // PEM, without a password
  std::string ca;          // PEM: the authorities that may sign a peer's certificate
  std::string token_file;  // coordinator: tokens that make a client; client: the one it sends
  bool insecure = false;   // other hosts may be spoken to without TLS
};

// Thread-safe.
class Security {
 public:
  // How soon changed files count: they are looked at every second, and so are our copies by gRPC.
  static constexpr unsigned kRefreshSeconds = 2;

  // No TLS; only this host is spoken to, or, `insecure`, any.
  static std::shared_ptr<const Security> Plaintext(bool insecure = false);

  // Checks everything that can be known at the start. A client needs no certificate where it has a
  // token. INVALID_ARGUMENT names the option or the file, and what to do.
  static absl::StatusOr<std::shared_ptr<const Security>> Load(const SecurityOptions& options,
                                                              Role own);

  bool tls() const { return files_ != nullptr; }
  bool insecure() const { return options_.insecure; }
  // Whether other hosts may be spoken to.
  bool open() const { return tls() || insecure(); }
  const SecurityOptions& options() const { return options_; }
  // With TLS: what is in use; null without.
  const CredentialFiles* files() const { return files_.get(); }

  // INVALID_ARGUMENT where nothing protects what others would see. `option` is for the message.
  absl::Status CheckListen(const HostPort& address, absl::string_view option) const;
  absl::Status CheckTarget(absl::string_view address, absl::string_view option) const;

  // With TLS, peers need a certificate (or, of a client, a token), and every call a role.
  std::shared_ptr<grpc::ServerCredentials> ServerCredentials() const;
  // With TLS, the server's certificate must be for the host that is called, and for `role`.
  std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials(Role role) const;
  // "Bearer ..." for the header `authorization`; empty: none is sent.
  std::string Authorization() const;

 private:
  Security() = default;

  SecurityOptions options_;
  std::shared_ptr<CredentialFiles> files_;
  std::shared_ptr<TokenFile> tokens_;
};

bool IsLoopback(absl::string_view host);

// The one of this process: a process has one identity, as it has one log. Plaintext on loopback
// until set; set once, before there are servers or channels.
std::shared_ptr<const Security> ProcessSecurity();
void SetProcessSecurity(std::shared_ptr<const Security> security);

}  // namespace zeroshard::security
