// TLS 1.3 on RPC connections, and TLS of the port for predictions, by OpenSSL: the files of a
// process, and one stream over one socket.
//
// Both ends show a certificate that the job's CA has signed. Host names are not compared: peers are
// named by addresses that change, and the CA signs for one job alone.
#pragma once

#include <openssl/ssl.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <ctime>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/status.h"

namespace persia::net {

// Certificate, private key and CA, as PEM files. Thread-safe.
class TlsFiles {
 public:
  enum class Use {
    kRpc,    // among processes of a job, which all show certificates
    kHttp2,  // a port for others' clients, from TLS 1.2 on: without a CA they show none
  };

  // kInvalidArgument names the file that cannot be read, or whose key is another's.
  static StatusOr<std::shared_ptr<TlsFiles>> Load(std::string certificate, std::string key,
                                                  std::string ca, Use use = Use::kRpc);
  // For a new connection: the files are read again when one of them has changed. Where the new ones
  // cannot be used, for instance half of them are written, the old ones stay.
  // Certificates are renewed by replacing files (cert-manager, Kubernetes secrets): nothing tells
  // the process, and a restart would lose its rows. Connections keep the context that they began
  // with, so a renewal interrupts none.
  std::shared_ptr<SSL_CTX> Context();

 private:
  using Stamp = std::array<timespec, 3>;  // when each file was changed

  TlsFiles(std::string certificate, std::string key, std::string ca, Use use);
  StatusOr<std::shared_ptr<SSL_CTX>> Read() const;
  Stamp Changed() const;

  const std::array<std::string, 3> paths_;  // certificate, key, CA
  const Use use_;
  std::mutex mutex_;  // guards what follows
  std::shared_ptr<SSL_CTX> context_;
  Stamp stamp_;
  std::optional<Stamp> warned_;  // of unusable files, since the last good ones
};

// A value that both ends of a TLS connection know, and no other connection has; zeros without TLS.
using ChannelBinding = std::array<std::byte, 32>;

// TLS over one socket that does not block. Read and Write are like recv and send: the bytes moved,
// 0 at the end of the stream, or -1 with errno, EAGAIN when the socket is to be waited for. The
// handshake takes place within them.
//
// Thread-safe: one thread may read while another writes.
class TlsStream {
 public:
  enum class Side { kClient, kServer };

  // `fd` must stay open as long as the stream.
  TlsStream(std::shared_ptr<SSL_CTX> context, int fd, Side side);

  ssize_t Read(std::byte* to, size_t size_bytes);
  // A blocked write is repeated with the same bytes, at any address. What was written is gathered,
  // and may be sent no earlier than by Flush().
  ssize_t Write(const std::byte* from, size_t size_bytes);
  // Sends what was written: 1 when all is sent, else as above.
  ssize_t Flush();
  // The client's, before its first write: 1 when it is done, else as above.
  ssize_t Handshake();
  // Bytes have left the socket and were not read here: the socket will not tell of them. False
  // where the last Read found them to be less than a record.
  bool HasPending();
  // Both ends have shown what they have to, and bytes have come.
  // In TLS 1.3 the client finishes before the server has judged its certificate. Only the first
  // bytes from the server say that it was accepted; until then an error is reported as a refusal.
  bool HasRead();
  // The other end has begun with a frame instead of TLS.
  bool PeerIsPlain();
  // What OpenSSL says has gone wrong; empty where it was the socket.
  std::string Error();
  // The handshake of roles signs it (handshake.h): a proof that was made for one connection is
  // worthless on any other, so an attacker in the middle cannot pass it on.
  ChannelBinding Binding();

 private:
  bool BeginsPlain();
  ssize_t Result(int done);

  const int fd_;
  std::mutex mutex_;  // guards what follows
  const std::unique_ptr<SSL, decltype(&SSL_free)> ssl_;
  std::string error_;
  bool checked_begin_ = false;  // for a frame instead of TLS
  bool peer_is_plain_ = false;
  bool has_read_ = false;
  bool read_blocked_ = false;  // the last Read, for want of bytes
};

}  // namespace persia::net
