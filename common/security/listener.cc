#include "common/security/listener.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/security/refusals.h"

namespace zeroshard::security {
namespace {

constexpr int kBacklog = 4096;
constexpr int kBindTries = 20;  // port 0 on a host of several addresses
constexpr size_t kMostFiles = 65536;
constexpr size_t kOwnFiles = 1024;  // for all but gRPC: the HTTP and health ports too
constexpr absl::Duration kComplainEvery = absl::Seconds(5);

// "10.0.0.7"; an IPv4 address that came through an IPv6 socket is the same peer.
std::string PeerOf(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in&>(address).sin_addr, text, sizeof(text));
  } else if (address.ss_family == AF_INET6) {
    const in6_addr& v6 = reinterpret_cast<const sockaddr_in6&>(address).sin6_addr;
    if (IN6_IS_ADDR_V4MAPPED(&v6)) {
      inet_ntop(AF_INET, v6.s6_addr + 12, text, sizeof(text));
    } else {
      inet_ntop(AF_INET6, &v6, text, sizeof(text));
    }
  }
  return text;
}

// gRPC closes what it was given and tells nobody; whether a number is still the same socket can be
// asked at any time.
ConnectionGate::Alive AliveCheck(int fd) {
  struct stat seen = {};
  fstat(fd, &seen);
  return [fd, inode = seen.st_ino] {
    struct stat now = {};
    return fstat(fd, &now) == 0 && S_ISSOCK(now.st_mode) && now.st_ino == inode;
  };
}

void SetOn(int fd, int level, int option) {
  const int on = 1;
  setsockopt(fd, level, option, &on, sizeof(on));
}

// The socket, or -1 and errno.
int BindOne(const addrinfo& info, int port) {
  const int fd =
      socket(info.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, info.ai_protocol);
  if (fd < 0) return -1;
  SetOn(fd, SOL_SOCKET, SO_REUSEADDR);
  sockaddr_storage address = {};
  std::memcpy(&address, info.ai_addr, info.ai_addrlen);
  if (info.ai_family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(address).sin_port = htons(static_cast<uint16_t>(port));
  } else {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
    v6.sin6_port = htons(static_cast<uint16_t>(port));
    // [::] takes IPv4 too; other IPv6 addresses have no IPv4 side.
    const int only = IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr) ? 0 : 1;
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
  }
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), info.ai_addrlen) != 0 ||
      listen(fd, kBacklog) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

int PortOf(int fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                            : reinterpret_cast<sockaddr_in6&>(address).sin6_port);
}

// All addresses on one port, or none. `error` is what the first one that failed for a reason other
// than that this host has no such address failed for.
std::vector<int> BindAll(const addrinfo* found, int port, int* error) {
  std::vector<int> bound;
  int absent = 0;
  *error = 0;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    const int fd = BindOne(*info, port);
    if (fd >= 0) {
      bound.push_back(fd);
      if (port == 0) port = PortOf(fd);
    } else if (errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT) {
      absent = errno;
    } else {
      *error = errno;
      break;
    }
  }
  if (bound.empty() && *error == 0) *error = absent;
  if (*error != 0) {
    for (const int fd : bound) close(fd);
    bound.clear();
  }
  return bound;
}

}  // namespace

size_t RaiseFileLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kOwnFiles;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, kMostFiles);
  if (limit.rlim_cur < wanted) {
    limit.rlim_cur = wanted;
    setrlimit(RLIMIT_NOFILE, &limit);
    getrlimit(RLIMIT_NOFILE, &limit);
  }
  const size_t files = std::min<rlim_t>(limit.rlim_cur, kMostFiles);
  return files > 2 * kOwnFiles ? files - kOwnFiles : files / 2;
}

Listener::Listener(const ConnectionGate::Most& most)
    : gate_([&most] {
        ConnectionGate::Most bounded = most;
        bounded.in_all = std::min(most.in_all, RaiseFileLimit());
        // However few files there are, one peer never has them all.
        bounded.of_peer = std::min(most.of_peer, std::max<size_t>(1, bounded.in_all / 2));
        return bounded;
      }()) {}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(const HostPort& address,
                                                         const ConnectionGate::Most& most,
                                                         absl::string_view what) {
  const std::string cannot =
      absl::StrCat("cannot listen on ", address.ToString(), " for ", what, ": ");
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(address.host.c_str(), "0", &hints, &found)) {
    return absl::InvalidArgumentError(
        absl::StrCat(cannot, "host \"", address.host, "\": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  std::unique_ptr<Listener> listener(new Listener(most));
  int error = 0;
  for (int tried = 0; tried < kBindTries; ++tried) {
    listener->listening_ = BindAll(found, address.port, &error);
    if (error != EADDRINUSE || address.port != 0) break;
  }
  if (error == EADDRINUSE) {
    return absl::UnavailableError(absl::StrCat(
        cannot, std::strerror(error), ". Stop the process that holds it (ss -ltnp 'sport = :",
        address.port, "' shows it) or choose another port; port 0 takes a free one"));
  }
  if (listener->listening_.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(cannot, std::strerror(error)));
  }
  listener->port_ = PortOf(listener->listening_.front());
  listener->wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (listener->wake_ < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("eventfd: ", std::strerror(errno)));
  }
  return listener;
}

Listener::~Listener() {
  Stop();
  if (wake_ >= 0) close(wake_);
}

void Listener::Serve(Take take) {
  take_ = std::move(take);
  thread_ = std::thread([this] { Loop(); });
}

void Listener::Stop() {
  stopping_ = true;
  const uint64_t one = 1;
  if (wake_ >= 0) [[maybe_unused]]
    const ssize_t told = write(wake_, &one, sizeof(one));
  if (thread_.joinable()) thread_.join();
  for (const int fd : listening_) close(fd);
  listening_.clear();
}

void Listener::Loop() {
  std::vector<pollfd> waiting;
  waiting.push_back({wake_, POLLIN, 0});
  for (const int fd : listening_) waiting.push_back({fd, POLLIN, 0});
  while (!stopping_) {
    // Where files have run out the queue stays readable: look again a little later.
    const bool rest = out_of_files_.exchange(false);
    if (rest) {
      poll(waiting.data(), 1, 100);
    } else {
      poll(waiting.data(), waiting.size(), -1);
    }
    for (size_t i = 1; i < waiting.size() && !stopping_; ++i) {
      while (!stopping_ && AcceptOne(waiting[i].fd)) {
      }
    }
  }
}

bool Listener::AcceptOne(int listening) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  const int fd = accept4(listening, reinterpret_cast<sockaddr*>(&address), &size,
                         SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno == EINTR || errno == ECONNABORTED || errno == EPROTO) return true;
    out_of_files_ = errno != EAGAIN;
    return false;
  }
  const std::string peer = PeerOf(address);
  const ConnectionGate::Verdict verdict = gate_.Judge(peer, SystemClock::Get().Now());
  if (verdict == ConnectionGate::Verdict::kLetIn) {
    SetOn(fd, IPPROTO_TCP, TCP_NODELAY);
    gate_.LetIn(peer, AliveCheck(fd));
    take_(listening, fd);
    return true;
  }
  // Ended at once and without a trace of it in this host's tables.
  const linger at_once = {1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  close(fd);
  CountRefusal(Refusal::kFlood);
  if (const absl::Duration now = SystemClock::Get().Now(); now - complained_ >= kComplainEvery) {
    complained_ = now;
    LogWarning("refused a connection of ", peer,
               verdict == ConnectionGate::Verdict::kTooManyInAll ? ": too many are open"
               : verdict == ConnectionGate::Verdict::kTooManyOfPeer
                   ? ": it has too many open"
                   : ": it opens too many a second",
               "; zeroshard_rpc_refused_total{reason=\"flood\"} counts them");
  }
  return true;
}

}  // namespace zeroshard::security
