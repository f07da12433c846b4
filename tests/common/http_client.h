// An HTTP client that can misbehave, for tests: raw bytes over one connection, every wait bounded.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {

class HttpConnection {
 public:
  explicit HttpConnection(int port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in to = {};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(port));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0;
  }
  ~HttpConnection() { close(fd_); }
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  bool connected() const { return connected_; }
  bool Send(const std::string& bytes) {
    return send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // What comes until the other side closes, or `most` has passed; `closed` says which.
  std::string ReadAll(std::chrono::milliseconds most, bool* closed) {
    const auto end = std::chrono::steady_clock::now() + most;
    std::string all;
    *closed = false;
    while (!*closed) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          end - std::chrono::steady_clock::now());
      pollfd wait = {fd_, POLLIN, 0};
      if (left.count() <= 0 || poll(&wait, 1, static_cast<int>(left.count())) <= 0) break;
      char buffer[16384];
      const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
      *closed = got <= 0;
      if (got > 0) all.append(buffer, static_cast<size_t>(got));
    }
    return all;
  }

 private:
  const int fd_;
  bool connected_ = false;
};

struct HttpReply {
  int status = 0;  // 0: none came
  std::string head, body;
};

// One request and its answer; `request` as sent, without the empty line at the end.
inline HttpReply HttpSend(int port, const std::string& request) {
  HttpConnection connection(port);
  HttpReply reply;
  bool closed = false;
  if (!connection.Send(request + "\r\nConnection: close\r\n\r\n")) return reply;
  const std::string all = connection.ReadAll(std::chrono::seconds(20), &closed);
  const size_t end = all.find("\r\n\r\n");
  if (!closed || end == std::string::npos || !absl::StartsWith(all, "HTTP/1.")) return reply;
  reply.head = all.substr(0, end + 2);
  reply.body = all.substr(end + 4);
  if (!absl::SimpleAtoi(all.substr(9, 3), &reply.status)) reply.status = 0;
  return reply;
}

inline HttpReply HttpGet(int port, const std::string& path, const std::string& headers = "") {
  return HttpSend(port, absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: test", headers));
}

}  // namespace zeroshard
