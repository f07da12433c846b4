// Who a peer is, by its certificate. A role is a URI among the certificate's subject alternative
// names; after it may come the one member name that the certificate is for:
//   spiffe://zeroshard/worker
//   spiffe://zeroshard/worker/worker-0
// A certificate may carry several. Other URIs say nothing here.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace zeroshard::security {

enum class Role { kClient, kWorker, kStore, kCoordinator };

inline constexpr Role kAllRoles[] = {Role::kClient, Role::kWorker, Role::kStore,
                                     Role::kCoordinator};

absl::string_view NameOf(Role role);  // client, worker, store, coordinator
std::string UriOf(Role role);         // spiffe://zeroshard/worker

class Identity {
 public:
  static Identity FromUris(const std::vector<std::string>& uris);

  bool empty() const { return names_.empty(); }
  bool Has(Role role) const { return names_.contains(role); }
  // A role by other means than a certificate's URI: a token. For every name.
  void Add(Role role) { names_[role].clear(); }
  // Whether a member of that role may have that name.
  bool MayBe(Role role, absl::string_view name) const;
  // The names that it may have in a role; empty: any.
  std::vector<std::string> NamesFor(Role role) const;
  std::string Describe() const;  // "worker (worker-0), store", "no role"

 private:
  std::map<Role, std::vector<std::string>> names_;  // empty: any name
};

}  // namespace zeroshard::security
