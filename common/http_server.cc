#include "common/http_server.h"

#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <set>
#include <shared_mutex>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/http_connections.h"
#include "common/net_address.h"
#include "common/security/listener.h"

namespace zeroshard {
namespace {

constexpr size_t kConnectionBytes = 16 << 10;  // of one request's line and headers
constexpr size_t kWorthCompressing = 1 << 10;
constexpr int kBacklog = 256;

// Beside those of an answer. "no-store": everything here is of the moment.
constexpr std::pair<const char*, const char*> kHeaders[] = {
    {"Cache-Control", "no-store"},
    {"X-Content-Type-Options", "nosniff"},
    {"X-Frame-Options", "DENY"},
    {"Referrer-Policy", "no-referrer"},
    {"Cross-Origin-Resource-Policy", "same-origin"},
};

// A listening socket, or UNAVAILABLE or INVALID_ARGUMENT.
absl::StatusOr<int> Listen(const HostPort& address, const std::string& what) {
  // Its messages say more than errno's.
  if (absl::Status probed = ProbeListen(address, what); !probed.ok()) return probed;
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  int error = getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &found);
  std::string why = error == 0 ? "" : gai_strerror(error);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(
      found, [](addrinfo* list) { list == nullptr ? void() : freeaddrinfo(list); });
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    const int fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0) {
      const int on = 1;
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
      if (bind(fd, info->ai_addr, info->ai_addrlen) == 0 && listen(fd, kBacklog) == 0) return fd;
    }
    why = std::strerror(errno);
    if (fd >= 0) close(fd);
  }
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address.ToString(), " for ", what,
                                             ": ", why,
                                             "; choose another port (port 0 takes a free one)"));
}

int PortOf(int socket) {
  sockaddr_storage bound = {};
  socklen_t size = sizeof(bound);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return 0;
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                           : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

// "gzip;q=0" refuses it.
bool TakesGzip(const char* accepted) {
  if (accepted == nullptr) return false;
  for (absl::string_view part : absl::StrSplit(accepted, ',')) {
    const std::vector<absl::string_view> words = absl::StrSplit(part, ';');
    if (absl::StripAsciiWhitespace(words[0]) != "gzip") continue;
    for (size_t i = 1; i < words.size(); ++i) {
      absl::string_view word = absl::StripAsciiWhitespace(words[i]);
      if (absl::ConsumePrefix(&word, "q=0") && word.find_first_not_of(".0") == word.npos) {
        return false;
      }
    }
    return true;
  }
  return false;
}

// Empty: it could not be done.
std::string Gzip(const std::string& text) {
  z_stream stream = {};
  constexpr int kGzip = 15 + 16;  // the largest window, in gzip's wrapping
  if (deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, kGzip, 8, Z_DEFAULT_STRATEGY) != Z_OK) {
    return "";
  }
  std::string packed(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  const bool whole = deflate(&stream, Z_FINISH) == Z_STREAM_END;
  packed.resize(whole ? stream.total_out : 0);
  deflateEnd(&stream);
  return packed;
}

MHD_Result Send(MHD_Connection* connection, HttpResponse answer) {
  bool packed = false;
  if (answer.body.size() >= kWorthCompressing &&
      TakesGzip(MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Accept-Encoding"))) {
    if (std::string smaller = Gzip(answer.body); !smaller.empty()) {
      answer.body = std::move(smaller);
      packed = true;
    }
  }
  MHD_Response* response = MHD_create_response_from_buffer(answer.body.size(), answer.body.data(),
                                                           MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  MHD_add_response_header(response, "Content-Type", answer.content_type.c_str());
  for (const auto& [name, value] : kHeaders) MHD_add_response_header(response, name, value);
  for (const auto& [name, value] : answer.headers) {
    MHD_add_response_header(response, name.c_str(), value.c_str());
  }
  if (packed) MHD_add_response_header(response, "Content-Encoding", "gzip");
  if (answer.body.size() >= kWorthCompressing || packed) {
    MHD_add_response_header(response, "Vary", "Accept-Encoding");
  }
  const MHD_Result queued =
      MHD_queue_response(connection, static_cast<unsigned>(answer.status), response);
  MHD_destroy_response(response);
  return queued;
}

int SocketOf(MHD_Connection* connection) {
  const MHD_ConnectionInfo* info =
      MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
  return info == nullptr ? -1 : info->connect_fd;
}

// A request between its headers and its answer.
struct Exchange {
  MHD_Connection* connection = nullptr;
  std::mutex mutex;
  bool asked = false;      // the handler was called
  bool answered = false;   // `answer` is there; nobody touches the connection for it any more
  bool suspended = false;  // the connection waits for it
  HttpResponse answer;

  // The first answer counts.
  void Answer(HttpResponse response) {
    std::lock_guard<std::mutex> lock(mutex);
    if (answered) return;
    answer = std::move(response);
    answered = true;
    if (suspended) MHD_resume_connection(connection);
  }
};

MHD_Result AddQuery(void* to, MHD_ValueKind, const char* key, const char* value) {
  (*static_cast<std::map<std::string, std::string>*>(to))[key] = value == nullptr ? "" : value;
  return MHD_YES;
}

bool HasBody(MHD_Connection* connection) {
  const char* length = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Content-Length");
  return (length != nullptr && std::strcmp(length, "0") != 0) ||
         MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Transfer-Encoding") != nullptr;
}

}  // namespace

HttpResponse HttpError(int status, const std::string& message) {
  HttpResponse response;
  response.status = status;
  response.body = message + "\n";
  return response;
}

class HttpServer::Impl {
 public:
  explicit Impl(const Options& options) : options_(options) {}

  absl::Status Start() {
    absl::StatusOr<HostPort> address = ParseHostPort(options_.listen);
    if (!address.ok()) return address.status();
    const absl::StatusOr<int> socket = Listen(*address, options_.what);
    if (!socket.ok()) return socket.status();
    address->port = PortOf(*socket);
    daemon_ = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME, 0, nullptr, nullptr, &Impl::Serve,
        this, MHD_OPTION_LISTEN_SOCKET, *socket, MHD_OPTION_CONNECTION_LIMIT,
        static_cast<unsigned>(
            std::min<size_t>(options_.max_connections, security::RaiseFileLimit() / 4)),
        MHD_OPTION_PER_IP_CONNECTION_LIMIT, options_.max_connections_per_address,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, kConnectionBytes, MHD_OPTION_STRICT_FOR_CLIENT, 1,
        MHD_OPTION_UNESCAPE_CALLBACK, &Impl::KeepEscapes, nullptr, MHD_OPTION_NOTIFY_CONNECTION,
        &Impl::Connected, this, MHD_OPTION_NOTIFY_COMPLETED, &Impl::Completed, this,
        MHD_OPTION_END);
    if (daemon_ == nullptr) {
      const std::string why = std::strerror(errno);
      close(*socket);
      return absl::UnavailableError(
          absl::StrCat("cannot serve ", options_.what, " on ", address->ToString(), ": ", why));
    }
    port_ = address->port;
    address_ = address->ToString();
    return absl::OkStatus();
  }

  ~Impl() {
    if (daemon_ == nullptr) return;
    std::set<std::shared_ptr<Exchange>> waiting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
      waiting = waiting_;
    }
    // The library wants none suspended when it ends.
    for (const auto& exchange : waiting) {
      exchange->Answer(HttpError(503, "the program is ending"));
    }
    MHD_stop_daemon(daemon_);
  }

  void Handle(const std::string& prefix, HttpHandler handler) {
    std::unique_lock<std::shared_mutex> lock(handlers_mutex_);
    handlers_[prefix] = std::move(handler);
  }
  void StopHandling(const std::string& prefix) {
    std::unique_lock<std::shared_mutex> lock(handlers_mutex_);
    handlers_.erase(prefix);
  }

  int port() const { return port_; }
  const std::string& address() const { return address_; }

 private:
  static size_t KeepEscapes(void*, MHD_Connection*, char* text) { return std::strlen(text); }

  static void Connected(void* self, MHD_Connection* connection, void**,
                        MHD_ConnectionNotificationCode what) {
    Impl& impl = *static_cast<Impl*>(self);
    const int socket = SocketOf(connection);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
      impl.connections_.Expect(socket, impl.options_.first_request);
    } else {
      impl.connections_.Remove(socket);
    }
  }

  static void Completed(void* self, MHD_Connection* connection, void** context,
                        MHD_RequestTerminationCode) {
    Impl& impl = *static_cast<Impl*>(self);
    const std::unique_ptr<std::shared_ptr<Exchange>> exchange(
        static_cast<std::shared_ptr<Exchange>*>(*context));
    *context = nullptr;
    if (exchange != nullptr) {
      (*exchange)->Answer(HttpError(503, "gone"));  // a late answer finds no connection
      std::lock_guard<std::mutex> lock(impl.mutex_);
      impl.waiting_.erase(*exchange);
    }
    impl.connections_.Expect(SocketOf(connection), impl.options_.next_request);
  }

  static MHD_Result Serve(void* self, MHD_Connection* connection, const char* url,
                          const char* method, const char*, const char*, size_t*, void** context) {
    Impl& impl = *static_cast<Impl*>(self);
    try {
      if (*context != nullptr) {
        return impl.Go(*static_cast<std::shared_ptr<Exchange>*>(*context), url);
      }
      auto exchange = std::make_unique<std::shared_ptr<Exchange>>(std::make_shared<Exchange>());
      (*exchange)->connection = connection;
      *context = exchange.release();
      if (std::strcmp(method, "GET") != 0 && std::strcmp(method, "HEAD") != 0) {
        HttpResponse refused = HttpError(405, "only GET and HEAD: nothing can be changed here");
        refused.headers.emplace_back("Allow", "GET, HEAD");
        return impl.SendNow(connection, std::move(refused));
      }
      if (HasBody(connection)) {
        return impl.SendNow(connection, HttpError(413, "a request without a body is wanted"));
      }
      return MHD_YES;                  // it is called again when the request is whole
    } catch (const std::exception&) {  // no memory: the connection is closed
      return MHD_NO;
    }
  }

  MHD_Result SendNow(MHD_Connection* connection, HttpResponse response) {
    connections_.Expect(SocketOf(connection), options_.taking_answer);
    return Send(connection, std::move(response));
  }

  MHD_Result Go(const std::shared_ptr<Exchange>& exchange, const char* url) {
    if (!exchange->asked) {
      exchange->asked = true;
      Ask(exchange, url);
    }
    std::lock_guard<std::mutex> lock(exchange->mutex);
    exchange->suspended = false;
    if (exchange->answered) return SendNow(exchange->connection, std::move(exchange->answer));
    std::lock_guard<std::mutex> waiting_lock(mutex_);
    if (closing_) {
      exchange->answered = true;
      return SendNow(exchange->connection, HttpError(503, "the program is ending"));
    }
    waiting_.insert(exchange);
    connections_.Release(SocketOf(exchange->connection));
    MHD_suspend_connection(exchange->connection);
    exchange->suspended = true;
    return MHD_YES;
  }

  void Ask(const std::shared_ptr<Exchange>& exchange, const char* url) {
    HttpRequest request;
    request.path = url;
    MHD_get_connection_values(exchange->connection, MHD_GET_ARGUMENT_KIND, &AddQuery,
                              &request.query);
    std::shared_lock<std::shared_mutex> lock(handlers_mutex_);
    // Of two prefixes of one path the longer one sorts behind.
    const HttpHandler* handler = nullptr;
    for (const auto& [prefix, candidate] : handlers_) {
      if (absl::StartsWith(request.path, prefix)) handler = &candidate;
    }
    if (handler == nullptr) {
      exchange->Answer(HttpError(404, "there is nothing here; /metrics is"));
      return;
    }
    try {
      (*handler)(request,
                 [exchange](HttpResponse response) { exchange->Answer(std::move(response)); });
    } catch (const std::exception& error) {
      exchange->Answer(HttpError(500, absl::StrCat("it failed: ", error.what())));
    }
  }

  const Options options_;
  HttpConnections connections_;
  MHD_Daemon* daemon_ = nullptr;
  int port_ = 0;
  std::string address_;

  std::shared_mutex handlers_mutex_;
  std::map<std::string, HttpHandler> handlers_;

  std::mutex mutex_;  // taken after an exchange's, never before it
  std::set<std::shared_ptr<Exchange>> waiting_;
  bool closing_ = false;
};

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const Options& options) {
  auto impl = std::make_unique<Impl>(options);
  if (absl::Status started = impl->Start(); !started.ok()) return started;
  return std::unique_ptr<HttpServer>(new HttpServer(std::move(impl)));
}

HttpServer::HttpServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpServer::~HttpServer() = default;

void HttpServer::Handle(const std::string& prefix, HttpHandler handler) {
  impl_->Handle(prefix, std::move(handler));
}
void HttpServer::StopHandling(const std::string& prefix) { impl_->StopHandling(prefix); }
int HttpServer::port() const { return impl_->port(); }
const std::string& HttpServer::address() const { return impl_->address(); }

}  // namespace zeroshard
