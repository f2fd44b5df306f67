#include "net/tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string_view>
#include <utility>

#include "net/audit.h"
#include "net/message.h"

namespace persia::net {
namespace {

// The server takes the first one of the client that it knows. 128 bits are enough, and the fewer
// rounds cost less.
constexpr const char* kCiphers =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

// Of TLS 1.2: HTTP/2 forbids the others (RFC 9113).
constexpr const char* kHttp2Ciphers = "ECDHE+AESGCM:ECDHE+CHACHA20";

// The only protocol that is spoken. A client that offers others alone is refused.
int SelectHttp2(SSL*, const unsigned char** selected, unsigned char* selected_size,
                const unsigned char* offered, unsigned int offered_size, void*) {
  static constexpr std::array<unsigned char, 3> kHttp2 = {2, 'h', '2'};
  unsigned char* found = nullptr;
  const int result = SSL_select_next_proto(&found, selected_size, kHttp2.data(), kHttp2.size(),
                                           offered, offered_size);
  *selected = found;
  return result == OPENSSL_NPN_NEGOTIATED ? SSL_TLSEXT_ERR_OK : SSL_TLSEXT_ERR_ALERT_FATAL;
}

// Several records cross the socket in one system call. Each direction of a connection has so much.
constexpr long kBufferBytes = 64 << 10;

// The oldest error of OpenSSL's queue, which is emptied.
std::string TakeError() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  const char* reason = ERR_reason_error_string(code);
  return reason != nullptr ? reason : "error " + std::to_string(code);
}

// OpenSSL's reason is the one of the call before: call nothing of it in between.
Status CannotUse(const char* what, const std::string& path) {
  return InvalidArgument("tls: ", what, " '", path, "' cannot be used: ", TakeError(),
                         "; give a PEM file that this process may read");
}

// A socket as OpenSSL sees it. Its own kind would raise SIGPIPE where the peer has gone.
int FdOf(BIO* bio) { return static_cast<int>(reinterpret_cast<intptr_t>(BIO_get_data(bio))); }

int Moved(BIO* bio, ssize_t bytes, int retry_flag) {
  BIO_clear_retry_flags(bio);
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) {
    BIO_set_flags(bio, retry_flag | BIO_FLAGS_SHOULD_RETRY);
  }
  return static_cast<int>(bytes);
}

int BioWrite(BIO* bio, const char* from, int size) {
  const ssize_t sent =
      ::send(FdOf(bio), from, static_cast<size_t>(size), MSG_NOSIGNAL | MSG_DONTWAIT);
  return Moved(bio, sent, BIO_FLAGS_WRITE);
}

int BioRead(BIO* bio, char* to, int size) {
  const ssize_t received = ::recv(FdOf(bio), to, static_cast<size_t>(size), MSG_DONTWAIT);
  if (received == 0) BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
  return Moved(bio, received, BIO_FLAGS_READ);
}

long BioControl(BIO* bio, int command, long, void*) {
  if (command == BIO_CTRL_EOF) return BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0 ? 1 : 0;
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

// Made once and never freed: streams of any thread use it until the process ends.
BIO_METHOD* SocketMethod() {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "persia socket");
    BIO_meth_set_write(made, &BioWrite);
    BIO_meth_set_read(made, &BioRead);
    BIO_meth_set_ctrl(made, &BioControl);
    BIO_meth_set_create(made, [](BIO* bio) {
      BIO_set_init(bio, 1);
      return 1;
    });
    return made;
  }();
  return method;
}

}  // namespace

TlsFiles::TlsFiles(std::string certificate, std::string key, std::string ca, Use use)
    : paths_{std::move(certificate), std::move(key), std::move(ca)}, use_(use) {}

StatusOr<std::shared_ptr<TlsFiles>> TlsFiles::Load(std::string certificate, std::string key,
                                                   std::string ca, Use use) {
  std::shared_ptr<TlsFiles> files(
      new TlsFiles(std::move(certificate), std::move(key), std::move(ca), use));
  files->stamp_ = files->Changed();
  PERSIA_ASSIGN_OR_RETURN(files->context_, files->Read());
  return files;
}

// A new context for each set of files. OpenSSL counts references from its connections, so an old
// one lives as long as they do.
StatusOr<std::shared_ptr<SSL_CTX>> TlsFiles::Read() const {
  std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  if (context == nullptr) return Internal("tls: ", TakeError());
  const bool is_http2 = use_ == Use::kHttp2;
  SSL_CTX_set_min_proto_version(context.get(), is_http2 ? TLS1_2_VERSION : TLS1_3_VERSION);
  if (!is_http2 || !std::get<2>(paths_).empty()) {
    SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  }
  if (is_http2) {
    SSL_CTX_set_cipher_list(context.get(), kHttp2Ciphers);
    SSL_CTX_set_alpn_select_cb(context.get(), &SelectHttp2, nullptr);
  }
  // Frames are gathered again after a blocked write, at another address.
  SSL_CTX_set_mode(context.get(),
                   SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_ciphersuites(context.get(), kCiphers);
  // Frames have their lengths: an end of the stream that is cut off is noticed.
  SSL_CTX_set_options(context.get(), SSL_OP_IGNORE_UNEXPECTED_EOF);
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
  if (!ca.empty() && SSL_CTX_load_verify_file(context.get(), ca.c_str()) != 1) {
    return CannotUse("ca", ca);
  }
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

// Three stat() calls for a connection, which costs far more itself. No thread that watches is
// needed.
std::shared_ptr<SSL_CTX> TlsFiles::Context() {
  const std::lock_guard lock(mutex_);
  const Stamp stamp = Changed();
  const auto is = [&](const Stamp& other) {
    return std::memcmp(&stamp, &other, sizeof(stamp)) == 0;
  };
  if (is(stamp_)) {
    warned_.reset();
    return context_;
  }
  if (auto fresh = Read(); fresh.ok()) {
    context_ = std::move(*fresh);
    stamp_ = stamp;
    warned_.reset();
  } else if (!(warned_.has_value() && is(*warned_)) &&
             WarnOperator(fresh.status().message() + "; the certificate read before is used")) {
    warned_ = stamp;
  }
  return context_;
}

// ---- a stream

TlsStream::TlsStream(std::shared_ptr<SSL_CTX> context, int fd, Side side)
    : fd_(fd), ssl_(SSL_new(context.get()), &SSL_free) {
  BIO* socket = BIO_new(SocketMethod());
  BIO_set_data(socket, reinterpret_cast<void*>(static_cast<intptr_t>(fd)));
  // The chain is TLS - buffer - socket: records are gathered below TLS, so that several leave by
  // one system call (ADR 38).
  BIO* buffer = BIO_push(BIO_new(BIO_f_buffer()), socket);
  BIO_set_read_buffer_size(buffer, kBufferBytes);
  BIO_set_write_buffer_size(buffer, kBufferBytes);
  SSL_set_bio(ssl_.get(), buffer, buffer);
  if (side == Side::kServer) {
    SSL_set_accept_state(ssl_.get());
  } else {
    SSL_set_connect_state(ssl_.get());
  }
}

ssize_t TlsStream::Read(std::byte* to, size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  if (BeginsPlain()) return -1;
  ERR_clear_error();
  const int size = static_cast<int>(std::min<size_t>(size_bytes, INT_MAX));
  const ssize_t received = Result(SSL_read(ssl_.get(), to, size));
  if (received > 0) has_read_ = true;
  read_blocked_ = received < 0 && errno == EAGAIN;
  return received;
}

ssize_t TlsStream::Write(const std::byte* from, size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  ERR_clear_error();
  const int size = static_cast<int>(std::min<size_t>(size_bytes, INT_MAX));
  return Result(SSL_write(ssl_.get(), from, size));
}

ssize_t TlsStream::Flush() {
  const std::lock_guard lock(mutex_);
  BIO* bio = SSL_get_wbio(ssl_.get());
  if (BIO_flush(bio) > 0) return 1;
  if (BIO_should_retry(bio)) errno = EAGAIN;
  return -1;
}

ssize_t TlsStream::Handshake() {
  const std::lock_guard lock(mutex_);
  ERR_clear_error();
  return Result(SSL_do_handshake(ssl_.get()));
}

// With mutex_ held. A client without TLS is told so in a frame that it can read.
// Peeks at the first bytes, which TLS then reads: once is enough, as a stream does not change its
// kind.
bool TlsStream::BeginsPlain() {
  if (checked_begin_) return false;
  uint32_t begin = 0;
  const ssize_t peeked = ::recv(fd_, &begin, sizeof(begin), MSG_PEEK | MSG_DONTWAIT);
  checked_begin_ = peeked > 0;
  if (peeked != sizeof(begin) || begin != kMagic) return false;
  peer_is_plain_ = true;
  error_ = "it does not use TLS";
  errno = EPROTO;
  return true;
}

// With mutex_ held.
ssize_t TlsStream::Result(int done) {
  if (done > 0) return done;
  switch (SSL_get_error(ssl_.get(), done)) {
    case SSL_ERROR_ZERO_RETURN: return 0;
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE: errno = EAGAIN; return -1;
    case SSL_ERROR_SYSCALL: return -1;  // errno is the socket's
    default:
      // The certificate's fault says more than "certificate verify failed".
      const long verified = SSL_get_verify_result(ssl_.get());
      error_ = TakeError();
      if (verified != X509_V_OK) {
        error_ += std::string(": ") + X509_verify_cert_error_string(verified);
      }
      errno = EPROTO;
      return -1;
  }
}

bool TlsStream::HasPending() {
  const std::lock_guard lock(mutex_);
  if (read_blocked_) return false;
  return SSL_pending(ssl_.get()) > 0 || BIO_pending(SSL_get_rbio(ssl_.get())) > 0;
}

bool TlsStream::HasRead() {
  const std::lock_guard lock(mutex_);
  return has_read_;
}

bool TlsStream::PeerIsPlain() {
  const std::lock_guard lock(mutex_);
  return peer_is_plain_;
}

std::string TlsStream::Error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

// Derived from the secrets of this handshake: both ends compute it, and nothing of it is sent.
ChannelBinding TlsStream::Binding() {
  constexpr std::string_view kLabel = "EXPORTER-Channel-Binding";  // RFC 9266
  const std::lock_guard lock(mutex_);
  ChannelBinding binding = {};
  SSL_export_keying_material(ssl_.get(), reinterpret_cast<unsigned char*>(binding.data()),
                             binding.size(), kLabel.data(), kLabel.size(), nullptr, 0, 0);
  return binding;
}

}  // namespace persia::net
