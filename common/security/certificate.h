// Certificates in PEM files, looked at before gRPC does, which would only say that a handshake
// failed.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace zeroshard::security {

// A file as it was read; the path is for messages.
struct PemFile {
  std::string path;
  std::string text;
  bool operator==(const PemFile&) const = default;
};

struct Certificate {
  absl::Time not_before;
  absl::Time not_after;
  std::vector<std::string> uris;  // of the subject's alternative names
  // What its (extended) key usage lets it be; any where it says nothing.
  bool for_clients = false;
  bool for_servers = false;
};

// Every error here is INVALID_ARGUMENT and names the file.
absl::StatusOr<PemFile> ReadPem(const std::string& path);

// The first certificate of the file: a chain begins with the one it is for.
absl::StatusOr<Certificate> ReadCertificate(const PemFile& file);

// What makes a certificate of no use to its owner at `now`: a file that is not what it should be, a
// key that is not the certificate's, a time in which it is not valid, a CA that did not sign it.
absl::Status CheckPair(const PemFile& cert, const PemFile& key, const PemFile& ca, absl::Time now);

// The key and then the certificates, as one PEM text from which nothing else is read as either.
absl::StatusOr<std::string> JoinPair(const PemFile& cert, const PemFile& key);

// That the file has at least one certificate of an authority in it.
absl::Status CheckAuthority(const PemFile& ca);

}  // namespace zeroshard::security
