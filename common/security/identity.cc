#include "common/security/identity.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace zeroshard::security {
namespace {

constexpr absl::string_view kDomain = "spiffe://zeroshard/";

}  // namespace

absl::string_view NameOf(Role role) {
  switch (role) {
    case Role::kClient:
      return "client";
    case Role::kWorker:
      return "worker";
    case Role::kStore:
      return "store";
    case Role::kCoordinator:
      return "coordinator";
  }
  return "";
}

std::string UriOf(Role role) { return absl::StrCat(kDomain, NameOf(role)); }

Identity Identity::FromUris(const std::vector<std::string>& uris) {
  Identity identity;
  std::map<Role, bool> any_name;
  for (const std::string& uri : uris) {
    absl::string_view rest = uri;
    if (!absl::ConsumePrefix(&rest, kDomain)) continue;
    const size_t slash = rest.find('/');
    const absl::string_view name = rest.substr(0, slash);
    const auto* role = std::find_if(std::begin(kAllRoles), std::end(kAllRoles),
                                    [name](Role candidate) { return NameOf(candidate) == name; });
    if (role == std::end(kAllRoles)) continue;
    if (slash == absl::string_view::npos) {
      any_name[*role] = true;
      identity.names_[*role];
    } else if (slash + 1 < rest.size()) {  // with nothing after the slash it names nobody
      identity.names_[*role].emplace_back(rest.substr(slash + 1));
    }
  }
  for (const auto& [role, any] : any_name) identity.names_[role].clear();
  return identity;
}

bool Identity::MayBe(Role role, absl::string_view name) const {
  const auto found = names_.find(role);
  if (found == names_.end()) return false;
  const std::vector<std::string>& names = found->second;
  return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
}

std::vector<std::string> Identity::NamesFor(Role role) const {
  const auto found = names_.find(role);
  return found == names_.end() ? std::vector<std::string>() : found->second;
}

std::string Identity::Describe() const {
  if (names_.empty()) return "no role";
  return absl::StrJoin(names_, ", ", [](std::string* out, const auto& entry) {
    absl::StrAppend(out, NameOf(entry.first));
    if (!entry.second.empty()) {
      absl::StrAppend(out, " (", absl::CHexEscape(absl::StrJoin(entry.second, ", ")), ")");
    }
  });
}

}  // namespace zeroshard::security
