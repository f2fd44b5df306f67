// TLS 1.3 on RPC connections, by OpenSSL: the files of a process, and one stream over one socket.
//
// Both ends show a certificate that the job's CA has signed. Host names are not compared: peers are
// named by addresses that change, and the CA signs for one job alone.
#pragma once

#include <openssl/ssl.h>

#include <array>
#include <cstddef>
#include <ctime>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/status.h"

namespace persia::net {

// Certificate, private key and CA, as PEM files. Thread-safe.
class TlsFiles {
 public:
  // kInvalidArgument names the file that cannot be read, or whose key is another's.
  static StatusOr<std::shared_ptr<TlsFiles>> Load(std::string certificate, std::string key,
                                                  std::string ca);
  // For a new connection: the files are read again when one of them has changed. Where the new ones
  // cannot be used, for instance half of them are written, the old ones stay.
  std::shared_ptr<SSL_CTX> Context();

 private:
  using Stamp = std::array<timespec, 3>;  // when each file was changed

  TlsFiles(std::string certificate, std::string key, std::string ca);
  StatusOr<std::shared_ptr<SSL_CTX>> Read() const;
  Stamp Changed() const;

  const std::array<std::string, 3> paths_;  // certificate, key, CA
  std::mutex mutex_;                        // guards what follows
  std::shared_ptr<SSL_CTX> context_;
  Stamp stamp_;
};

}  // namespace persia::net
