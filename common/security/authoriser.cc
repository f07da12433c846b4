#include "common/security/authoriser.h"

#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/grpc_status.h"
#include "common/security/refusals.h"
#include "common/security/rpc_roles.h"
#include "grpc/grpc_security_constants.h"

namespace zeroshard::security {
namespace {

constexpr char kHeader[] = "authorization";
constexpr absl::string_view kBearer = "Bearer ";

std::string ListOf(const std::vector<Role>& roles) {
  return absl::StrJoin(roles, " or ", [](std::string* out, Role role) {
    absl::StrAppend(out, NameOf(role), " (", UriOf(role), ")");
  });
}

// Of a peer that may be anybody.
std::string Shown(absl::string_view text) { return absl::CHexEscape(text.substr(0, 80)); }

absl::string_view View(grpc::string_ref text) { return {text.data(), text.size()}; }

}  // namespace

Identity IdentityOf(const grpc::AuthContext& context) {
  std::vector<std::string> uris;
  for (const grpc::string_ref& uri : context.FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME)) {
    uris.emplace_back(uri.data(), uri.size());
  }
  return Identity::FromUris(uris);
}

absl::Status MayCall(const Identity& identity, absl::string_view method) {
  const RpcRule* const rule = FindRule(method);
  if (identity.empty()) {
    return absl::UnauthenticatedError(absl::StrCat(
        Shown(method), ": the caller is unknown: its certificate names no role and it sent no ",
        "token that is known here; wanted ",
        rule == nullptr ? "the name of a role, for example spiffe://zeroshard/client"
                        : ListOf(rule->roles)));
  }
  if (rule == nullptr) {
    return absl::PermissionDeniedError(
        absl::StrCat(Shown(method), ": no role may call it; is the caller of another version?"));
  }
  for (const Role role : rule->roles) {
    if (identity.Has(role)) return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrCat(
      Shown(method), ": the caller is ", identity.Describe(), ", wanted ", ListOf(rule->roles)));
}

absl::Status CheckMember(const grpc::AuthContext& context, Role role, absl::string_view name) {
  if (context.FindPropertyValues(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME).empty()) {
    return absl::OkStatus();
  }
  const Identity identity = IdentityOf(context);
  if (identity.MayBe(role, name)) return absl::OkStatus();
  CountRefusal(Refusal::kRole);
  return absl::PermissionDeniedError(
      absl::StrCat("it says that it is the ", NameOf(role), " \"", Shown(name),
                   "\", but its certificate is for ", identity.Describe(),
                   "; start it with the --name and the certificate that belong together"));
}

grpc::Status Authoriser::Process(const InputMetadata& metadata, grpc::AuthContext* context,
                                 OutputMetadata* consumed, OutputMetadata*) {
  Identity identity = IdentityOf(*context);
  const auto header = metadata.find(kHeader);
  if (header != metadata.end()) {
    const absl::string_view text = View(header->second);
    if (tokens_ != nullptr && absl::StartsWith(text, kBearer) &&
        tokens_->Contains(text.substr(kBearer.size()))) {
      identity.Add(Role::kClient);
    }
    // Handlers have no use for it.
    consumed->emplace(kHeader, std::string(text));
  }
  const auto path = metadata.find(":path");
  const absl::Status may =
      MayCall(identity, path == metadata.end() ? absl::string_view() : View(path->second));
  if (!may.ok()) {
    CountRefusal(absl::IsUnauthenticated(may) ? Refusal::kUnauthenticated : Refusal::kRole);
  }
  return ToGrpcStatus(may);
}

}  // namespace zeroshard::security
