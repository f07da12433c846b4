#include "common/security/certificate.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <openssl/x509v3.h>

#include <ctime>
#include <memory>

#include "absl/strings/str_cat.h"
#include "common/files.h"
#include "common/status_macros.h"

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
using Store = std::unique_ptr<X509_STORE, Free<X509_STORE_free>>;
using Context = std::unique_ptr<X509_STORE_CTX, Free<X509_STORE_CTX_free>>;

constexpr size_t kMostBytes = 1 << 20;

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

Bio Open(const std::string& text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

// A key that is encrypted is refused instead of asked for on the terminal.
int NoPassword(char*, int, int, void*) { return -1; }

absl::StatusOr<std::vector<X509Ptr>> ReadAll(const PemFile& file) {
  const Bio bio = Open(file.text);
  std::vector<X509Ptr> found;
  while (X509* one = PEM_read_bio_X509(bio.get(), nullptr, NoPassword, nullptr)) {
    found.emplace_back(one);
  }
  const unsigned long end = ERR_peek_last_error();
  ERR_clear_error();
  const bool no_more =
      ERR_GET_LIB(end) == ERR_LIB_PEM && ERR_GET_REASON(end) == PEM_R_NO_START_LINE;
  if (end != 0 && !no_more) {
    return Bad(file.path, ": block ", found.size() + 1,
               " in it is no certificate that can be read (", ERR_reason_error_string(end),
               "); wanted PEM text that is whole: make the file anew");
  }
  if (found.empty()) {
    return Bad(file.path, ": no certificate in it, wanted PEM text (-----BEGIN CERTIFICATE-----)");
  }
  return found;
}

absl::StatusOr<Key> ReadKey(const PemFile& file) {
  const Bio bio = Open(file.text);
  Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassword, nullptr));
  ERR_clear_error();
  if (key == nullptr) {
    return Bad(file.path,
               ": no private key in it that can be read, wanted PEM text without a password");
  }
  return key;
}

absl::Time TimeOf(const ASN1_TIME* time) {
  tm parts = {};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return absl::InfinitePast();
  return absl::FromTM(parts, absl::UTCTimeZone());
}

std::vector<std::string> UrisOf(X509* certificate) {
  std::vector<std::string> uris;
  std::unique_ptr<GENERAL_NAMES, Free<GENERAL_NAMES_free>> names(static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const ASN1_IA5STRING* text = name->d.uniformResourceIdentifier;
    uris.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                      static_cast<size_t>(ASN1_STRING_length(text)));
  }
  return uris;
}

absl::Status CheckSignature(const std::vector<X509Ptr>& chain, const std::string& cert_path,
                            const std::vector<X509Ptr>& authorities, const std::string& ca_path) {
  const Store store(X509_STORE_new());
  for (const X509Ptr& authority : authorities) X509_STORE_add_cert(store.get(), authority.get());
  STACK_OF(X509)* between = sk_X509_new_null();
  for (const X509Ptr& one : chain) sk_X509_push(between, one.get());
  const Context context(X509_STORE_CTX_new());
  X509_STORE_CTX_init(context.get(), store.get(), chain.front().get(), between);
  const bool verified = X509_verify_cert(context.get()) == 1;
  const int error = X509_STORE_CTX_get_error(context.get());
  sk_X509_free(between);
  ERR_clear_error();
  if (verified) return absl::OkStatus();
  return Bad(cert_path, ": ", X509_verify_cert_error_string(error), ", by the authorities in ",
             ca_path, "; wanted a certificate that one of them signed");
}

}  // namespace

absl::StatusOr<PemFile> ReadPem(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, kMostBytes);
  if (!text.ok()) return absl::InvalidArgumentError(text.status().message());
  return PemFile{path, *std::move(text)};
}

absl::StatusOr<Certificate> ReadCertificate(const PemFile& file) {
  ZS_ASSIGN_OR_RETURN(const std::vector<X509Ptr> chain, ReadAll(file));
  X509* const first = chain.front().get();
  return Certificate{TimeOf(X509_get0_notBefore(first)), TimeOf(X509_get0_notAfter(first)),
                     UrisOf(first), X509_check_purpose(first, X509_PURPOSE_SSL_CLIENT, 0) == 1,
                     X509_check_purpose(first, X509_PURPOSE_SSL_SERVER, 0) == 1};
}

absl::Status CheckPair(const PemFile& cert, const PemFile& key_file, const PemFile& ca,
                       absl::Time now) {
  ZS_ASSIGN_OR_RETURN(const Certificate certificate, ReadCertificate(cert));
  ZS_ASSIGN_OR_RETURN(const std::vector<X509Ptr> chain, ReadAll(cert));
  ZS_ASSIGN_OR_RETURN(const Key key, ReadKey(key_file));
  ZS_ASSIGN_OR_RETURN(const std::vector<X509Ptr> authorities, ReadAll(ca));
  const bool match = X509_check_private_key(chain.front().get(), key.get()) == 1;
  ERR_clear_error();
  if (!match) {
    return Bad(key_file.path, ": is not the key of the certificate in ", cert.path,
               "; wanted the pair that was made together");
  }
  const absl::TimeZone utc = absl::UTCTimeZone();
  if (now > certificate.not_after) {
    return Bad(cert.path, ": expired on ", absl::FormatTime(certificate.not_after, utc), ", it is ",
               absl::FormatTime(now, utc), "; renew it");
  }
  if (now < certificate.not_before) {
    return Bad(cert.path, ": not valid before ", absl::FormatTime(certificate.not_before, utc),
               ", it is ", absl::FormatTime(now, utc), "; is this host's clock right?");
  }
  return CheckSignature(chain, cert.path, authorities, ca.path);
}

absl::StatusOr<std::string> JoinPair(const PemFile& cert, const PemFile& key_file) {
  ZS_ASSIGN_OR_RETURN(const std::vector<X509Ptr> chain, ReadAll(cert));
  ZS_ASSIGN_OR_RETURN(const Key key, ReadKey(key_file));
  const Bio bio(BIO_new(BIO_s_mem()));
  bool written = bio != nullptr && PEM_write_bio_PrivateKey(bio.get(), key.get(), nullptr, nullptr,
                                                            0, nullptr, nullptr) == 1;
  for (const X509Ptr& one : chain) written = written && PEM_write_bio_X509(bio.get(), one.get());
  ERR_clear_error();
  if (!written) return Bad(key_file.path, ": cannot be written as PEM text again");
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio.get(), &data);
  return std::string(data, static_cast<size_t>(size));
}

absl::Status CheckAuthority(const PemFile& ca) { return ReadAll(ca).status(); }

}  // namespace zeroshard::security
