#include "common/security/credential_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/files.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace zeroshard::security {
namespace {

using grpc::experimental::FileWatcherCertificateProvider;

constexpr unsigned kGrpcLooksEverySeconds = 1;

// Has no name and is gone with the process: no key is left behind on a disk. gRPC compares times of
// change in whole seconds to see whether a pair was replaced while it read: no two files of ours
// have the same.
absl::StatusOr<Descriptor> MakeMemoryFile(const std::string& text) {
  static std::atomic<time_t> next_time{1};
  Descriptor file(memfd_create("zeroshard-tls", MFD_CLOEXEC));
  if (file.get() < 0) return ErrnoError(errno, "make", "a file in memory for TLS");
  fchmod(file.get(), 0600);
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t wrote = write(file.get(), text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return ErrnoError(errno, "write", "a file in memory for TLS");
    done += static_cast<size_t>(wrote);
  }
  const timespec time = {next_time++, 0};
  const timespec times[] = {time, time};
  if (futimens(file.get(), times) != 0) {
    return ErrnoError(errno, "set the time of", "a file in memory for TLS");
  }
  return file;
}

std::string PathOf(const Descriptor& file) { return absl::StrCat("/proc/self/fd/", file.get()); }

// At once: whoever opens the path gets the old file or the new one. The number stays.
absl::Status Replace(Descriptor* file, Descriptor next) {
  if (file->get() < 0) {
    *file = std::move(next);
    if (access(PathOf(*file).c_str(), R_OK) == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("cannot open ", PathOf(*file), " for TLS; is /proc mounted?"));
  }
  if (dup3(next.get(), file->get(), O_CLOEXEC) >= 0) return absl::OkStatus();
  return ErrnoError(errno, "replace", PathOf(*file));
}

}  // namespace

absl::StatusOr<std::shared_ptr<CredentialFiles>> CredentialFiles::Open(const std::string& cert,
                                                                       const std::string& key,
                                                                       const std::string& ca,
                                                                       Check check,
                                                                       absl::Duration look_every) {
  std::shared_ptr<CredentialFiles> files(new CredentialFiles);
  files->paths_ = {{cert, ""}, {key, ""}, {ca, ""}};
  files->check_ = std::move(check);
  files->look_every_ = look_every;
  ZS_ASSIGN_OR_RETURN(const Set set, files->Read());
  ZS_RETURN_IF_ERROR(files->check_(set, absl::Now()));
  ZS_RETURN_IF_ERROR(files->Use(set));
  const std::string pair = cert.empty() ? "" : PathOf(files->pair_);
  files->provider_ = std::make_shared<FileWatcherCertificateProvider>(
      pair, pair, PathOf(files->ca_), kGrpcLooksEverySeconds);
  if (look_every < absl::InfiniteDuration()) {
    files->thread_ = std::thread([raw = files.get()] { raw->Loop(); });
  }
  return files;
}

CredentialFiles::~CredentialFiles() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (thread_.joinable()) thread_.join();
  provider_.reset();  // it reads the copies
}

void CredentialFiles::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (
      !stop_.wait_for(lock, absl::ToChronoNanoseconds(look_every_), [this] { return stopping_; })) {
    lock.unlock();
    Look();
    lock.lock();
  }
}

absl::StatusOr<CredentialFiles::Set> CredentialFiles::Read() const {
  Set set;
  if (!paths_.cert.path.empty()) {
    ZS_ASSIGN_OR_RETURN(set.cert, ReadPem(paths_.cert.path));
    ZS_ASSIGN_OR_RETURN(set.key, ReadPem(paths_.key.path));
  }
  ZS_ASSIGN_OR_RETURN(set.ca, ReadPem(paths_.ca.path));
  return set;
}

void CredentialFiles::Look() {
  std::lock_guard<std::mutex> looking(look_mutex_);
  const absl::StatusOr<Set> found = Read();
  if (found.ok() && *found == used()) {
    bad_.clear();
    return;
  }
  absl::Status status = found.status();
  if (status.ok()) status = check_(*found, absl::Now());
  if (status.ok()) status = Use(*found);
  if (status.ok()) {
    bad_.clear();
    LogInfo(
        "TLS: read again from ", paths_.cert.path.empty() ? "" : paths_.cert.path + " and ",
        paths_.ca.path,
        paths_.cert.path.empty() ? "" : "; the certificate ends on " + absl::FormatTime(expiry()));
    return;
  }
  // One that is not valid yet is judged again at each look, but spoken of once.
  const std::string seen =
      found.ok() ? absl::StrCat(found->cert.text, "\n", found->key.text, "\n", found->ca.text)
                 : std::string(status.message());
  if (std::exchange(bad_, seen) != seen) {
    complained_ = false;
  } else if (!std::exchange(complained_, true)) {
    Complain(status);
  }
}

void CredentialFiles::Complain(const absl::Status& bad) {
  absl::Time expires;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++refused_;
    expires = expiry_;
  }
  LogWarning("TLS: ", bad.message(), ". What was read before stays in use",
             expires == absl::InfiniteFuture()
                 ? ""
                 : "; that certificate ends on " + absl::FormatTime(expires),
             ". Replace the files with ones that belong together: they are taken within seconds, "
             "without a restart");
}

absl::Status CredentialFiles::Use(const Set& set) {
  Descriptor pair;
  absl::Time expires = absl::InfiniteFuture();
  if (!set.cert.path.empty()) {
    ZS_ASSIGN_OR_RETURN(const Certificate certificate, ReadCertificate(set.cert));
    expires = certificate.not_after;
    ZS_ASSIGN_OR_RETURN(const std::string joined, JoinPair(set.cert, set.key));
    ZS_ASSIGN_OR_RETURN(pair, MakeMemoryFile(joined));
  }
  ZS_ASSIGN_OR_RETURN(Descriptor ca, MakeMemoryFile(set.ca.text));
  if (pair.get() >= 0) ZS_RETURN_IF_ERROR(Replace(&pair_, std::move(pair)));
  ZS_RETURN_IF_ERROR(Replace(&ca_, std::move(ca)));
  std::lock_guard<std::mutex> lock(mutex_);
  used_ = set;
  expiry_ = expires;
  return absl::OkStatus();
}

CredentialFiles::Set CredentialFiles::used() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

absl::Time CredentialFiles::expiry() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return expiry_;
}

uint64_t CredentialFiles::refused() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return refused_;
}

}  // namespace zeroshard::security
