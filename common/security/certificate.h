// Certificates in PEM files, looked at before gRPC does, which would only say that a handshake
// failed.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace zeroshard::security {

struct Certificate {
  absl::Time not_before;
  absl::Time not_after;
  std::vector<std::string> uris;  // of the subject's alternative names
  // What its (extended) key usage lets it be; any where it says nothing.
  bool for_clients = false;
  bool for_servers = false;
};

// The first certificate of a PEM file: a chain begins with the one it is for. Every error is
// INVALID_ARGUMENT and names the file.
absl::StatusOr<Certificate> ReadCertificate(const std::string& path);

// What makes a certificate of no use to its owner at `now`: a file that is missing or is not what
// it should be, a key that is not the certificate's, a time in which it is not valid, a CA that did
// not sign it. INVALID_ARGUMENT, with the file.
absl::Status CheckPair(const std::string& cert_path, const std::string& key_path,
                       const std::string& ca_path, absl::Time now);

// That the file has at least one certificate of an authority in it.
absl::Status CheckAuthority(const std::string& ca_path);

}  // namespace zeroshard::security
