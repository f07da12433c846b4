#include "worker/comm/listen_address.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

socklen_t LengthOf(const sockaddr* address) {
  return address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
}

std::string Numeric(const sockaddr* address) {
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(address, LengthOf(address), text.data(), text.size(), nullptr, 0,
                  NI_NUMERICHOST) != 0) {
    return "";
  }
  return text.data();
}

bool CanBind(const sockaddr* address) {
  const int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool bound = bind(fd, address, LengthOf(address)) == 0;
  close(fd);
  return bound;
}

bool IsInternet(const sockaddr* address) {
  return address != nullptr && (address->sa_family == AF_INET || address->sa_family == AF_INET6);
}

// The first usable address of interface `name`, or of any interface but loopback where empty; IPv4
// before IPv6.
std::optional<std::string> InterfaceAddress(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return std::nullopt;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  for (int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
      if (!IsInternet(at->ifa_addr) || at->ifa_addr->sa_family != family) continue;
      const bool wanted = name.empty()
                              ? (at->ifa_flags & IFF_UP) != 0 && (at->ifa_flags & IFF_LOOPBACK) == 0
                              : name == at->ifa_name;
      if (wanted && CanBind(at->ifa_addr)) return Numeric(at->ifa_addr);
    }
  }
  return std::nullopt;
}

// Sets *error where the name resolves to nothing that can be bound here.
std::optional<std::string> BindableAddressOf(const std::string& host, std::string* error) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (const int code = getaddrinfo(host.c_str(), nullptr, &hints, &list); code != 0) {
    *error = gai_strerror(code);
    return std::nullopt;
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  std::string seen;
  for (int family : {AF_INET, AF_INET6}) {
    for (const addrinfo* at = list; at != nullptr; at = at->ai_next) {
      if (at->ai_family != family) continue;
      if (CanBind(at->ai_addr)) return Numeric(at->ai_addr);
      absl::StrAppend(&seen, seen.empty() ? "" : ", ", Numeric(at->ai_addr));
    }
  }
  *error = absl::StrCat("it resolves to ", seen.empty() ? "nothing" : seen,
                        ", which is no address of this machine");
  return std::nullopt;
}

}  // namespace

absl::StatusOr<std::string> ResolveListenAddress(const std::string& host) {
  std::string error;
  if (host.empty()) {
    std::array<char, HOST_NAME_MAX + 1> own{};
    // Debian maps the own name to 127.0.1.1, where other hosts cannot connect.
    if (gethostname(own.data(), own.size() - 1) == 0) {
      auto address = BindableAddressOf(own.data(), &error);
      if (address && !address->starts_with("127.") && *address != "::1") return *address;
    }
    return InterfaceAddress("").value_or("127.0.0.1");
  }
  if (if_nametoindex(host.c_str()) != 0) {
    if (auto address = InterfaceAddress(host)) return *address;
    return absl::InvalidArgumentError(
        absl::StrCat("interface \"", host, "\" has no address to listen on for collectives"));
  }
  if (auto address = BindableAddressOf(host, &error)) return *address;
  return absl::InvalidArgumentError(
      absl::StrCat("cannot listen on \"", host, "\" for collectives: ", error,
                   "; give an address or an interface of this machine"));
}

}  // namespace zeroshard
