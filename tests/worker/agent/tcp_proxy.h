// A network between two ends of TCP connections that can fail in the middle of what passes.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {

// Listens on a free port and connects each caller to the server. One thread carries everything.
class TcpProxy {
 public:
  enum class Fault {
    kSilence,  // nothing passes any more, in either direction, and nobody is told
    kClose,    // every connection is closed, and no other is taken
  };

  // `server`: "127.0.0.1:PORT".
  explicit TcpProxy(const std::string& server) {
    int port = 0;
    EXPECT_TRUE(absl::SimpleAtoi(server.substr(server.rfind(':') + 1), &port)) << server;
    server_ = Loopback(port);
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_in own = Loopback(0);
    socklen_t size = sizeof(own);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&own), size), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&own), &size), 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(own.sin_port));
    thread_ = std::thread([this] { Carry(); });
  }
  ~TcpProxy() {
    leaving_ = true;
    thread_.join();
    CloseAll();
  }
  TcpProxy(const TcpProxy&) = delete;
  TcpProxy& operator=(const TcpProxy&) = delete;

  const std::string& address() const { return address_; }
  // Once so many more bytes have passed, from the callers or to them.
  void FailAfter(Fault fault, bool from_callers, int64_t bytes) {
    fault_ = fault;
    from_callers_ = from_callers;
    bytes_left_ = bytes;
    armed_ = true;
  }
  bool failed() const { return failed_; }

 private:
  struct Way {
    int from = -1, to = -1;
    bool from_caller = false;
    std::string waiting;  // read and not written yet
    bool ended = false;
  };
  struct Connection {
    Way ways[2];
  };

  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    return address;
  }

  void Accept() {
    const int caller = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (caller < 0) return;
    const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(server, reinterpret_cast<sockaddr*>(&server_), sizeof(server_)) != 0) {
      close(server);
      close(caller);
      return;
    }
    fcntl(server, F_SETFL, O_NONBLOCK);
    Connection& connection = connections_.emplace_back();
    connection.ways[0] = {.from = caller, .to = server, .from_caller = true, .waiting = ""};
    connection.ways[1] = {.from = server, .to = caller, .from_caller = false, .waiting = ""};
  }

  void Move(Way* way, std::vector<char>* room) {
    if (way->ended) return;
    if (way->waiting.empty()) {
      const ssize_t got = read(way->from, room->data(), room->size());
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
        shutdown(way->to, SHUT_WR);
        way->ended = true;
      }
      if (got <= 0) return;
      way->waiting.assign(room->data(), static_cast<size_t>(got));
      if (armed_ && way->from_caller == from_callers_ && (bytes_left_ -= got) < 0) failed_ = true;
      if (failed_) return;
    }
    const ssize_t put =
        send(way->to, way->waiting.data(), way->waiting.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put > 0) way->waiting.erase(0, static_cast<size_t>(put));
    if (put < 0 && errno != EAGAIN && errno != EINTR) way->ended = true;
  }

  void Carry() {
    std::vector<char> room(256 << 10);
    while (!leaving_) {
      if (failed_) {
        if (fault_ == Fault::kClose) CloseAll();
        poll(nullptr, 0, kLook);
        continue;
      }
      std::vector<pollfd> fds = {{listener_, POLLIN, 0}};
      for (const Connection& connection : connections_) {
        for (const Way& way : connection.ways) {
          if (way.ended) continue;
          fds.push_back(way.waiting.empty() ? pollfd{way.from, POLLIN, 0}
                                            : pollfd{way.to, POLLOUT, 0});
        }
      }
      if (poll(fds.data(), fds.size(), kLook) <= 0) continue;
      if ((fds[0].revents & POLLIN) != 0) Accept();
      for (Connection& connection : connections_) {
        for (Way& way : connection.ways) {
          if (!failed_) Move(&way, &room);
        }
      }
    }
  }

  void CloseAll() {
    for (const Connection& connection : connections_) {
      for (const Way& way : connection.ways) close(way.from);
    }
    connections_.clear();
    if (listener_ >= 0) close(listener_);
    listener_ = -1;
  }

  static constexpr int kLook = 20;  // ms, for a sign to leave

  sockaddr_in server_{};
  int listener_ = -1;
  std::string address_;
  std::vector<Connection> connections_;  // the thread's
  std::atomic<Fault> fault_{Fault::kSilence};
  std::atomic<bool> from_callers_{true}, armed_{false}, failed_{false}, leaving_{false};
  std::atomic<int64_t> bytes_left_{0};
  std::thread thread_;  // last
};

}  // namespace zeroshard
