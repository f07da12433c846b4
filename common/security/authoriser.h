// Looks at every call before its handler sees it, unary, streaming or raw: who is it, and may they?
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "common/security/credential_files.h"
#include "common/security/identity.h"
#include "common/security/token_file.h"
#include "grpcpp/security/auth_context.h"
#include "grpcpp/security/auth_metadata_processor.h"

namespace zeroshard::security {

// By the certificate of the connection. Empty where it has none, or has no role.
Identity IdentityOf(const grpc::AuthContext& context);

// UNAUTHENTICATED: nobody we know; PERMISSION_DENIED: not with this role. Pure.
absl::Status MayCall(const Identity& identity, absl::string_view method);

// That a member is what its Hello says: its role, and its name where the certificate has one. OK on
// a connection without TLS. PERMISSION_DENIED, counted as a refusal.
absl::Status CheckMember(const grpc::AuthContext& context, Role role, absl::string_view name);

// Thread-safe.
class Authoriser : public grpc::AuthMetadataProcessor {
 public:
  // `tokens` may be null: no bearer tokens. `files`: what the server's credentials read, with which
  // gRPC deletes this.
  Authoriser(std::shared_ptr<TokenFile> tokens, std::shared_ptr<const CredentialFiles> files)
      : tokens_(std::move(tokens)), files_(std::move(files)) {}

  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context,
                       OutputMetadata* consumed, OutputMetadata* answer) override;

 private:
  const std::shared_ptr<TokenFile> tokens_;
  const std::shared_ptr<const CredentialFiles> files_;
};

}  // namespace zeroshard::security
