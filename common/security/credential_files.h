// The certificate, its key and the authorities of this process, from files that may change at any
// time. gRPC's own watcher takes whatever it finds, and for a file that is empty, half written or
// another's it drops the pair it had: nobody could connect any more. So it watches copies of ours,
// in memory, which only change for the better.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/descriptor.h"
#include "common/security/certificate.h"
#include "grpcpp/security/tls_certificate_provider.h"

namespace zeroshard::security {

// Thread-safe. Must outlive the credentials that were made with its provider.
class CredentialFiles {
 public:
  // What belongs together. Without a pair (a client with a token) `cert` and `key` are empty.
  struct Set {
    PemFile cert, key, ca;
    bool operator==(const Set&) const = default;
  };
  // Whether a set is of use at `now`. From the looking thread.
  using Check = std::function<absl::Status(const Set& set, absl::Time now)>;

  // Reads and checks the files, then looks at them every `look_every` (infinite: only when Look is
  // called). The check's errors; RESOURCE_EXHAUSTED and FAILED_PRECONDITION where the copies cannot
  // be made.
  static absl::StatusOr<std::shared_ptr<CredentialFiles>> Open(const std::string& cert,
                                                               const std::string& key,
                                                               const std::string& ca, Check check,
                                                               absl::Duration look_every);
  ~CredentialFiles();
  CredentialFiles(const CredentialFiles&) = delete;
  CredentialFiles& operator=(const CredentialFiles&) = delete;

  // A set that is good is used from now on, by gRPC within a second. One that is not is left alone;
  // that is said, and counted, when it is found a second time: files are replaced one by one.
  void Look();

  Set used() const;
  // Of the certificate in use; infinite future: there is none.
  absl::Time expiry() const;
  // Sets that were left alone.
  uint64_t refused() const;

  const std::shared_ptr<grpc::experimental::CertificateProviderInterface>& provider() const {
    return provider_;
  }

 private:
  CredentialFiles() = default;

  absl::StatusOr<Set> Read() const;
  absl::Status Use(const Set& set);
  void Complain(const absl::Status& bad);
  void Loop();

  Set paths_;  // without texts
  Check check_;
  absl::Duration look_every_;

  std::mutex look_mutex_;  // one look at a time; taken before mutex_
  std::string bad_;        // what was found and is of no use
  bool complained_ = false;
  Descriptor pair_, ca_;

  mutable std::mutex mutex_;
  std::condition_variable stop_;
  Set used_;
  absl::Time expiry_ = absl::InfiniteFuture();
  uint64_t refused_ = 0;
  bool stopping_ = false;

  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
  std::thread thread_;
};

}  // namespace zeroshard::security
