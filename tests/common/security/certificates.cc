#include "tests/common/security/certificates.h"

#include <openssl/bio.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>

#include "absl/strings/str_join.h"

namespace zeroshard::security {
namespace {

// A test that cannot make certificates shows nothing.
void Must(bool done, const char* what) {
  if (done) return;
  std::fprintf(stderr, "certificates.cc: %s failed\n", what);
  std::abort();
}

void Extend(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str());
  Must(extension != nullptr, value.c_str());
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

template <typename Write>
std::string ToPem(const Write& write) {
  BIO* bio = BIO_new(BIO_s_mem());
  Must(write(bio) == 1, "writing PEM");
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, static_cast<size_t>(size));
  BIO_free(bio);
  return text;
}

}  // namespace

void WriteWhole(const std::string& path, const std::string& text) {
  const std::string next = path + ".next";
  std::ofstream(next, std::ios::binary) << text;
  Must(std::rename(next.c_str(), path.c_str()) == 0, "renaming a file");
}

TestAuthority::TestAuthority(const std::string& name)
    : key_(EVP_EC_gen("P-256"), EVP_PKEY_free), own_(nullptr, X509_free) {
  Must(key_ != nullptr, "making a key");
  Wanted wanted;
  wanted.hosts.clear();
  own_ = Sign(key_.get(), name, wanted, /*authority=*/true);
}

TestAuthority::Certificate TestAuthority::Sign(EVP_PKEY* key, const std::string& name,
                                               const Wanted& wanted, bool authority) const {
  Certificate certificate(X509_new(), X509_free);
  X509* const x509 = certificate.get();
  X509_set_version(x509, 2);
  uint64_t serial = 0;
  Must(RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof(serial)) == 1, "random");
  ASN1_INTEGER_set_uint64(X509_get_serialNumber(x509), serial >> 1 | 1);
  const time_t now = time(nullptr);
  ASN1_TIME_set(X509_getm_notBefore(x509), now + absl::ToInt64Seconds(wanted.from));
  ASN1_TIME_set(X509_getm_notAfter(x509), now + absl::ToInt64Seconds(wanted.to));
  X509_set_pubkey(x509, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(x509), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509* const issuer = authority ? x509 : own_.get();
  X509_set_issuer_name(x509, X509_get_subject_name(issuer));
  if (authority) {
    Extend(x509, issuer, NID_basic_constraints, "critical,CA:TRUE");
    Extend(x509, issuer, NID_key_usage, "critical,keyCertSign,cRLSign");
  }
  if (!wanted.usage.empty()) Extend(x509, issuer, NID_ext_key_usage, wanted.usage);
  std::vector<std::string> names = wanted.hosts;
  for (const std::string& uri : wanted.uris) names.push_back("URI:" + uri);
  if (!names.empty()) Extend(x509, issuer, NID_subject_alt_name, absl::StrJoin(names, ","));
  Must(X509_sign(x509, key_.get(), EVP_sha256()) > 0, "signing");
  return certificate;
}

std::string TestAuthority::Pem() const {
  return ToPem([this](BIO* bio) { return PEM_write_bio_X509(bio, own_.get()); });
}

Files TestAuthority::Issue(const std::string& path, const Wanted& wanted) const {
  const Key key(EVP_EC_gen("P-256"), EVP_PKEY_free);
  const Certificate certificate = Sign(key.get(), "test", wanted, /*authority=*/false);
  const Files files = {path + ".crt", path + ".key"};
  WriteWhole(files.key, ToPem([&](BIO* bio) {
               return PEM_write_bio_PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr,
                                               nullptr);
             }));
  WriteWhole(files.cert,
             ToPem([&](BIO* bio) { return PEM_write_bio_X509(bio, certificate.get()); }));
  return files;
}

}  // namespace zeroshard::security
