#include "common/net_address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {

std::string HostPort::ToString() const {
  if (host.find(':') != std::string::npos) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<HostPort> ParseHostPort(absl::string_view text) {
  const auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("address \"", text, "\": ", why,
                                                   "; wanted host:port, for example 127.0.0.1:50051"
                                                   " (port 0 takes a free one)"));
  };
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return refuse("no port");
  HostPort result;
  absl::string_view host = text.substr(0, colon);
  if (!host.empty() && host.front() == '[') {
    if (host.back() != ']') return refuse("unbalanced brackets");
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != absl::string_view::npos) {
    return refuse("an IPv6 host needs brackets");
  }
  if (host.empty()) return refuse("no host");
  result.host = std::string(host);
  const absl::string_view port = text.substr(colon + 1);
  if (!absl::SimpleAtoi(port, &result.port) || result.port < 0 || result.port > 65535) {
    return refuse("the port is not a number from 0 to 65535");
  }
  return result;
}

absl::Status ProbeListen(const HostPort& address, absl::string_view what) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const std::string port = absl::StrCat(address.port);
  if (const int error = getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found)) {
    return absl::InvalidArgumentError(absl::StrCat("cannot listen on ", address.ToString(), " for ",
                                                   what, ": host \"", address.host,
                                                   "\": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);

  bool usable = false;
  int last_error = 0;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    const int fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      last_error = errno;
      continue;
    }
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    const int error = bind(fd, info->ai_addr, info->ai_addrlen) == 0 ? 0 : errno;
    close(fd);
    if (error == EADDRINUSE) {
      return absl::UnavailableError(absl::StrCat(
          "cannot listen on ", address.ToString(), " for ", what, ": ", std::strerror(error),
          ". Stop the process that holds it (ss -ltnp 'sport = :", address.port,
          "' shows it) or choose another port; port 0 takes a free one"));
    }
    if (error == 0) {
      usable = true;
    } else {
      last_error = error;
    }
  }
  if (usable) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("cannot listen on ", address.ToString(), " for ",
                                                 what, ": ", std::strerror(last_error)));
}

}  // namespace zeroshard
