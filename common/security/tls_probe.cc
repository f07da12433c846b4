#include "common/security/tls_probe.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <csignal>
#include <cstddef>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/clock.h"
#include "common/descriptor.h"

namespace zeroshard::security {
namespace {

template <auto kFree>
struct Free {
  template <typename T>
  void operator()(T* pointer) const {
    kFree(pointer);
  }
};
using Bio = std::unique_ptr<BIO, Free<BIO_free_all>>;
using X509Ptr = std::unique_ptr<X509, Free<X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY_free>>;
using Context = std::unique_ptr<SSL_CTX, Free<SSL_CTX_free>>;
using Ssl = std::unique_ptr<SSL, Free<SSL_free>>;

// Which names of a certificate are shown.
constexpr size_t kMostNames = 8;

Bio Open(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// Moments on a clock that nobody sets.
absl::Duration Now() { return SystemClock::Get().Now(); }

// False: the time is over.
bool WaitFor(int fd, short events, absl::Duration until) {
  while (true) {
    const absl::Duration left = until - Now();
    if (left <= absl::ZeroDuration()) return false;
    pollfd waiting = {fd, events, 0};
    const int got = poll(&waiting, 1, static_cast<int>(absl::ToInt64Milliseconds(left)) + 1);
    if (got > 0) return true;
    if (got < 0 && errno != EINTR) return false;
  }
}

struct AddressList {
  addrinfo* first = nullptr;
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

// getaddrinfo has no deadline of its own: a name server that is gone holds it for long.
bool Resolve(const HostPort& address, absl::Duration until, AddressList* found) {
  struct Request {
    std::string host, port;
    addrinfo hints = {};
    gaicb control = {};
  };
  auto request = std::make_unique<Request>();
  request->host = address.host;
  request->port = absl::StrCat(address.port);
  request->hints.ai_socktype = SOCK_STREAM;
  request->control.ar_name = request->host.c_str();
  request->control.ar_service = request->port.c_str();
  request->control.ar_request = &request->hints;
  gaicb* list[] = {&request->control};
  sigevent no_event = {};
  no_event.sigev_notify = SIGEV_NONE;
  if (getaddrinfo_a(GAI_NOWAIT, list, 1, &no_event) != 0) return false;
  while (gai_error(&request->control) == EAI_INPROGRESS) {
    const absl::Duration left = until - Now();
    if (left <= absl::ZeroDuration()) {
      const int stopped = gai_cancel(&request->control);
      if (stopped == EAI_ALLDONE) break;
      // Where it cannot be stopped any more it still writes into the request.
      if (stopped == EAI_NOTCANCELED) request.release();
      return false;
    }
    const timespec wait = absl::ToTimespec(left);
    gai_suspend(list, 1, &wait);
  }
  if (gai_error(&request->control) != 0) return false;
  found->first = request->control.ar_result;
  return true;
}

// Connected to the first address that takes it; -1: none.
Descriptor Connect(const HostPort& address, absl::Duration until) {
  AddressList found;
  if (!Resolve(address, until, &found)) return Descriptor();
  for (const addrinfo* info = found.first; info != nullptr; info = info->ai_next) {
    Descriptor fd(socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd.get() < 0) continue;
    if (connect(fd.get(), info->ai_addr, info->ai_addrlen) == 0) return fd;
    if (errno != EINPROGRESS || !WaitFor(fd.get(), POLLOUT, until)) continue;
    int error = 0;
    socklen_t size = sizeof(error);
    if (getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0) return fd;
  }
  return Descriptor();
}

// With what `used` holds; its errors were found when it was read.
void Equip(SSL_CTX* context, const CredentialFiles::Set& used) {
  const Bio authorities = Open(used.ca.text);
  while (X509* one = PEM_read_bio_X509(authorities.get(), nullptr, nullptr, nullptr)) {
    const X509Ptr owner(one);
    X509_STORE_add_cert(SSL_CTX_get_cert_store(context), one);
  }
  const Bio certs = Open(used.cert.text);
  bool leaf = true;
  while (X509* one = PEM_read_bio_X509(certs.get(), nullptr, nullptr, nullptr)) {
    const X509Ptr owner(one);
    if (leaf) {
      SSL_CTX_use_certificate(context, one);
    } else {
      SSL_CTX_add1_chain_cert(context, one);
    }
    leaf = false;
  }
  const Bio keys = Open(used.key.text);
  const Key key(PEM_read_bio_PrivateKey(keys.get(), nullptr, nullptr, nullptr));
  if (key != nullptr) SSL_CTX_use_PrivateKey(context, key.get());
  ERR_clear_error();
}

// How far a connection came.
struct Outcome {
  bool tls = false;           // the server's answer was one of TLS
  bool other = false;         // it was something else
  int alert = 0;              // of the server
  bool ended = false;         // by the server, before it said anything over TLS
  X509Ptr certificate;        // the server's
  long verified = X509_V_OK;  // what OpenSSL thinks of it
};

enum class Driven { kDone, kFailed, kLate };

// What a handshake of a server's may take; a peer that never stops sending is none.
constexpr size_t kMostReceived = 256 << 10;

// What passes between OpenSSL and the socket, in memory: OpenSSL itself would read for as long as
// there is something to read.
class Wire {
 public:
  // All outlive it. What `ssl` reads and writes is its business from here on.
  Wire(SSL* ssl, int fd, absl::Duration until)
      : ssl_(ssl), fd_(fd), until_(until), in_(BIO_new(BIO_s_mem())), out_(BIO_new(BIO_s_mem())) {
    SSL_set_bio(ssl, in_, out_);
  }

  // One call of OpenSSL, repeated until it is done, fails or the time is over.
  template <typename Call>
  Driven Drive(const Call& call) {
    while (true) {
      ERR_clear_error();
      const int result = call();
      const int error = result > 0 ? SSL_ERROR_NONE : SSL_get_error(ssl_, result);
      if (!Send()) return Driven::kLate;
      if (result > 0) return Driven::kDone;
      if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) return Driven::kFailed;
      if (ended_) return Driven::kFailed;
      if (!Receive()) return Driven::kLate;
    }
  }

 private:
  // False: the time is over. What the peer does not take any more is dropped: it may have said why.
  bool Send() {
    char* data = nullptr;
    size_t left = static_cast<size_t>(BIO_get_mem_data(out_, &data));
    while (left > 0) {
      const ssize_t sent = send(fd_, data, left, MSG_NOSIGNAL);
      if (sent > 0) {
        data += sent;
        left -= static_cast<size_t>(sent);
      } else if (sent < 0 && errno == EAGAIN) {
        if (!WaitFor(fd_, POLLOUT, until_)) return false;
      } else if (sent < 0 && errno != EINTR) {
        break;
      }
    }
    BIO_reset(out_);
    return true;
  }

  // False: the time is over, or it was too much.
  bool Receive() {
    char bytes[16 << 10];
    while (WaitFor(fd_, POLLIN, until_)) {
      const ssize_t got = recv(fd_, bytes, sizeof(bytes), 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (got <= 0) {
        ended_ = true;
        BIO_set_mem_eof_return(in_, 0);
        return true;
      }
      received_ += static_cast<size_t>(got);
      BIO_write(in_, bytes, static_cast<int>(got));
      return received_ <= kMostReceived;
    }
    return false;
  }

  SSL* const ssl_;
  const int fd_;
  const absl::Duration until_;
  BIO* const in_;   // of `ssl`
  BIO* const out_;  // likewise
  size_t received_ = 0;
  bool ended_ = false;  // by the peer
};

Outcome Shake(SSL* ssl, int fd, absl::Duration until) {
  Outcome outcome;
  Wire wire(ssl, fd, until);
  Driven driven = wire.Drive([&] { return SSL_connect(ssl); });
  outcome.certificate.reset(SSL_get1_peer_certificate(ssl));
  outcome.verified = SSL_get_verify_result(ssl);
  if (driven == Driven::kDone) {
    // With TLS 1.3 the server judges our certificate after we are done; gRPC speaks first if it
    // likes it, and closes without an alert if not.
    char byte;
    driven = wire.Drive([&] { return SSL_read(ssl, &byte, 1); });
  }
  const unsigned long error = driven == Driven::kFailed ? ERR_peek_error() : 0;
  outcome.ended = driven == Driven::kFailed && outcome.certificate != nullptr;
  const int reason = ERR_GET_LIB(error) == ERR_LIB_SSL ? ERR_GET_REASON(error) : 0;
  if (reason >= SSL_AD_REASON_OFFSET) outcome.alert = reason - SSL_AD_REASON_OFFSET;
  outcome.tls = outcome.certificate != nullptr || outcome.alert != 0;
  outcome.other = reason == SSL_R_WRONG_VERSION_NUMBER || reason == SSL_R_HTTP_REQUEST ||
                  reason == SSL_R_PACKET_LENGTH_TOO_LONG || reason == SSL_R_UNEXPECTED_MESSAGE;
  ERR_clear_error();
  return outcome;
}

std::string NameText(const X509_NAME* name) {
  const Bio bio(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(bio.get(), name, 0, XN_FLAG_RFC2253);
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(size)).substr(0, 200);
}

std::string TimeText(const ASN1_TIME* time) {
  tm parts = {};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return "a time that cannot be read";
  return absl::FormatTime(absl::FromTM(parts, absl::UTCTimeZone()), absl::UTCTimeZone());
}

struct Names {
  std::vector<std::string> hosts, uris;
};

Names NamesOf(X509* certificate) {
  Names names;
  const std::unique_ptr<GENERAL_NAMES, Free<GENERAL_NAMES_free>> all(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; i < sk_GENERAL_NAME_num(all.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(all.get(), i);
    if (name->type == GEN_IPADD) {
      const int size = ASN1_STRING_length(name->d.iPAddress);
      char text[INET6_ADDRSTRLEN] = {};
      if (size == 4 || size == 16) {
        inet_ntop(size == 4 ? AF_INET : AF_INET6, ASN1_STRING_get0_data(name->d.iPAddress), text,
                  sizeof(text));
        names.hosts.emplace_back(text);
      }
    } else if (name->type == GEN_DNS || name->type == GEN_URI) {
      const ASN1_IA5STRING* const text = name->d.ia5;
      (name->type == GEN_DNS ? names.hosts : names.uris)
          .emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                        static_cast<size_t>(ASN1_STRING_length(text)));
    }
  }
  return names;
}

std::string Listed(std::vector<std::string> names) {
  if (names.empty()) return "no host";
  if (names.size() > kMostNames) {
    names.resize(kMostNames);
    names.emplace_back("...");
  }
  return absl::StrJoin(names, ", ");
}

// What is wrong with the server's certificate.
std::string Blame(const Security& security, const HostPort& address, Role role,
                  const Outcome& outcome) {
  X509* const certificate = outcome.certificate.get();
  const std::string at = address.ToString();
  switch (outcome.verified) {
    case X509_V_OK:
      break;
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return absl::StrCat("the certificate of ", at, " expired on ",
                          TimeText(X509_get0_notAfter(certificate)), " (it is ",
                          absl::FormatTime(absl::Now(), absl::UTCTimeZone()),
                          " here): put a new one into its --tls-cert and --tls-key, which takes "
                          "hold without a restart");
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return absl::StrCat("the certificate of ", at, " is not valid before ",
                          TimeText(X509_get0_notBefore(certificate)), " (it is ",
                          absl::FormatTime(absl::Now(), absl::UTCTimeZone()),
                          " here): set this host's clock, or wait");
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return absl::StrCat("the certificate of ", at, " is for ", Listed(NamesOf(certificate).hosts),
                          ", not for ", address.host,
                          ": call it by one of those names, or make its --tls-cert with ",
                          address.host, " among its DNS names or IP addresses");
    default:
      return absl::StrCat(
          "the certificate of ", at, " (", NameText(X509_get_subject_name(certificate)),
          ", signed by ", NameText(X509_get_issuer_name(certificate)),
          ") does not follow from --tls-ca ", security.options().ca, " (",
          X509_verify_cert_error_string(outcome.verified),
          "): give the file of the authority that signed it, or look whether this is the right "
          "address");
  }
  const Identity identity = Identity::FromUris(NamesOf(certificate).uris);
  if (identity.Has(role)) return "";
  return absl::StrCat("the certificate of ", at, " is for ", identity.Describe(), ", wanted ",
                      NameOf(role), " (", UriOf(role), "): is this the right address?");
}

// What the server does not like about ours, or that there is none.
std::string Refusal(const Security& security, const std::string& at, int alert) {
  const std::string& own = security.options().cert;
  const std::string how =
      alert == 0 ? "" : absl::StrCat(" (alert: ", SSL_alert_desc_string_long(alert), ")");
  if (own.empty()) {
    return absl::StrCat(at, " ended the connection", how,
                        ", as one without a certificate: give --tls-cert and --tls-key, or start "
                        "the coordinator with --token-file too");
  }
  return absl::StrCat(at, " refuses --tls-cert ", own, how,
                      ": it must be signed by an authority in the --tls-ca there, be valid by the "
                      "clock there, and be usable for client auth");
}

}  // namespace

std::string TlsTrouble(const Security& security, const std::string& address, Role role,
                       absl::Duration budget) {
  const absl::StatusOr<HostPort> parsed = ParseHostPort(address);
  if (!parsed.ok() || parsed->port == 0) return "";
  const absl::Duration until = Now() + budget;
  const Descriptor fd = Connect(*parsed, until);
  if (fd.get() < 0) return "";
  const Context context(SSL_CTX_new(TLS_client_method()));
  if (context == nullptr) return "";
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_NONE, nullptr);  // judged afterwards
  if (security.tls()) Equip(context.get(), security.files()->used());
  const Ssl ssl(SSL_new(context.get()));
  if (ssl == nullptr) return "";
  static constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_set_alpn_protos(ssl.get(), kHttp2, sizeof(kHttp2));
  if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl.get()), parsed->host.c_str()) != 1) {
    SSL_set1_host(ssl.get(), parsed->host.c_str());
    SSL_set_tlsext_host_name(ssl.get(), parsed->host.c_str());
  }
  const Outcome outcome = Shake(ssl.get(), fd.get(), until);
  const std::string at = parsed->ToString();
  if (!security.tls()) {
    if (!outcome.tls) return "";
    return absl::StrCat(at,
                        " speaks TLS, and was called without: give --tls-ca with --tls-cert and "
                        "--tls-key (a client may have --token-file instead of these two)");
  }
  if (outcome.other) {
    return absl::StrCat(
        at,
        " does not speak TLS, and was called with it: start what listens there with --tls-cert, "
        "--tls-key and --tls-ca, look whether this is the right address, or call it without "
        "--tls-ca",
        IsLoopback(parsed->host) ? "" : " and with --insecure");
  }
  if (outcome.certificate == nullptr) return "";
  const std::string blame = Blame(security, *parsed, role, outcome);
  if (!blame.empty() || !outcome.ended) return blame;
  return Refusal(security, at, outcome.alert);
}

}  // namespace zeroshard::security
