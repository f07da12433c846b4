// The HTTP port of a daemon: metrics, and what the coordinator shows people. One thread serves all
// connections by epoll (libmicrohttpd), so a slow client costs memory and no thread.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace zeroshard {

struct HttpRequest {
  // As sent, nothing decoded: no path that is served needs a character that must be encoded.
  std::string path;
  std::map<std::string, std::string> query;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
};

// One line of text that says what is wrong.
HttpResponse HttpError(int status, const std::string& message);

// Answers one request; called exactly once, on any thread, during the handler or later.
using HttpAnswer = std::function<void(HttpResponse)>;
// On the server's only thread: what takes long is done elsewhere. GET and HEAD alone; of HEAD the
// server leaves the body away.
using HttpHandler = std::function<void(const HttpRequest& request, HttpAnswer answer)>;

// Thread-safe. Only reads: other methods get 405, bodies 413, headers over 16 KiB 431. Each
// answer carries headers against sniffing, framing and caching; it is compressed where the client
// takes gzip.
class HttpServer {
 public:
  struct Options {
    std::string listen;  // host:port; port 0 takes a free one
    std::string what;    // for messages: "metrics"
    unsigned max_connections = 512;
    // One address never has all of them.
    unsigned max_connections_per_address = 256;
    std::chrono::milliseconds first_request{10'000};  // from the connection to a whole request
    std::chrono::milliseconds next_request{75'000};   // from an answer to the next whole request
    std::chrono::milliseconds taking_answer{30'000};  // until the answer is sent
  };

  // UNAVAILABLE: the address is taken. INVALID_ARGUMENT: no address of this host. Of a name with
  // several addresses it serves the first.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const Options& options);
  // Requests that wait get 503.
  ~HttpServer();

  // What paths that begin with `prefix` get; the longest prefix counts. Replaces an older handler.
  void Handle(const std::string& prefix, HttpHandler handler);
  // Afterwards the handler is not running and never will.
  void StopHandling(const std::string& prefix);

  int port() const;
  const std::string& address() const;  // host:port, with the port that was bound

 private:
  class Impl;
  explicit HttpServer(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace zeroshard
