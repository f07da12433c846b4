// Authorities and certificates that a test makes for itself.
#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace zeroshard::security {

struct Wanted {
  std::vector<std::string> uris = {};  // spiffe://zeroshard/worker
  // As OpenSSL writes them: "DNS:localhost", "IP:127.0.0.1".
  std::vector<std::string> hosts = {"DNS:localhost", "IP:127.0.0.1"};
  std::string usage = "";                 // extended: "serverAuth"; empty: none
  absl::Duration from = -absl::Hours(1);  // relative to now
  absl::Duration to = absl::Hours(1);
};

struct Files {
  std::string cert;
  std::string key;
};

// Not thread-safe.
class TestAuthority {
 public:
  explicit TestAuthority(const std::string& name);

  std::string Pem() const;
  // PATH.crt and PATH.key, each by a rename; an older pair there is replaced, the key first.
  Files Issue(const std::string& path, const Wanted& wanted) const;
  // For one role, valid.
  Files Issue(const std::string& path, const std::string& uri) const {
    Wanted wanted;
    wanted.uris = {uri};
    return Issue(path, wanted);
  }

 private:
  using Key = std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)>;
  using Certificate = std::unique_ptr<X509, void (*)(X509*)>;

  Certificate Sign(EVP_PKEY* key, const std::string& name, const Wanted& wanted,
                   bool authority) const;

  Key key_;
  Certificate own_;
};

// Whole, by a rename.
void WriteWhole(const std::string& path, const std::string& text);

}  // namespace zeroshard::security
