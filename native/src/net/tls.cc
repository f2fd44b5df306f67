#include "net/tls.h"

#include <openssl/err.h>
#include <sys/stat.h>

#include <cstring>
#include <utility>

#include "net/audit.h"

namespace persia::net {
namespace {

// The oldest error of OpenSSL's queue, which is emptied.
std::string TakeError() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  const char* reason = ERR_reason_error_string(code);
  return reason != nullptr ? reason : "error " + std::to_string(code);
}

Status CannotUse(const char* what, const std::string& path) {
  return InvalidArgument(std::string("tls: ") + what + " '" + path + "' cannot be used: " +
                         TakeError() + "; give a PEM file that this process may read");
}

}  // namespace

TlsFiles::TlsFiles(std::string certificate, std::string key, std::string ca)
    : paths_{std::move(certificate), std::move(key), std::move(ca)} {}

StatusOr<std::shared_ptr<TlsFiles>> TlsFiles::Load(std::string certificate, std::string key,
                                                   std::string ca) {
  std::shared_ptr<TlsFiles> files(
      new TlsFiles(std::move(certificate), std::move(key), std::move(ca)));
  files->stamp_ = files->Changed();
  PERSIA_ASSIGN_OR_RETURN(files->context_, files->Read());
  return files;
}

StatusOr<std::shared_ptr<SSL_CTX>> TlsFiles::Read() const {
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  if (context == nullptr) return Internal("tls: " + TakeError());
  SSL_CTX_set_min_proto_version(context.get(), TLS1_3_VERSION);
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  // Frames are gathered again after a blocked write, at another address.
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  // Connections are few and long: tickets would only be written and kept.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context.get(), 0);
  const auto& [certificate, key, ca] = paths_;
  if (SSL_CTX_use_certificate_chain_file(context.get(), certificate.c_str()) != 1) {
    return CannotUse("certificate", certificate);
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), key.c_str(), SSL_FILETYPE_PEM) != 1) {
    return CannotUse("key", key);
  }
  if (SSL_CTX_load_verify_file(context.get(), ca.c_str()) != 1) return CannotUse("ca", ca);
  return context;
}

TlsFiles::Stamp TlsFiles::Changed() const {
  Stamp stamp = {};
  for (size_t i = 0; i < paths_.size(); ++i) {
    struct stat status = {};
    if (::stat(paths_[i].c_str(), &status) == 0) stamp[i] = status.st_mtim;
  }
  return stamp;
}

std::shared_ptr<SSL_CTX> TlsFiles::Context() {
  const std::lock_guard lock(mutex_);
  const Stamp stamp = Changed();
  if (std::memcmp(&stamp, &stamp_, sizeof(stamp)) == 0) return context_;
  if (auto fresh = Read(); fresh.ok()) {
    context_ = std::move(*fresh);
    stamp_ = stamp;
  } else {
    WarnOperator(fresh.status().message() + "; the certificate read before is used");
  }
  return context_;
}

}  // namespace persia::net
