// RPC over TLS, with certificates that are made here.
#include "net/tls.h"

#include <gtest/gtest.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "net/channel.h"
#include "net/poller.h"
#include "net/test_support.h"

namespace persia::net {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

constexpr MethodId kTlsEcho{1, "Echo", {Role::kWorker}};

struct Signer {
  std::shared_ptr<EVP_PKEY> key;
  std::shared_ptr<X509> certificate;
};

// Signed by `ca`, or by itself. Valid from now on for `seconds`, which may be in the past.
Signer Sign(const std::string& name, const Signer* ca, long seconds = 3600) {
  Signer made{{EVP_EC_gen("P-256"), EVP_PKEY_free}, {X509_new(), X509_free}};
  X509* x509 = made.certificate.get();
  static std::atomic<long> serial{1};
  X509_set_version(x509, X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(x509), serial++);
  X509_gmtime_adj(X509_getm_notBefore(x509), -7200);
  X509_gmtime_adj(X509_getm_notAfter(x509), seconds);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(x509), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_issuer_name(x509, X509_get_subject_name(ca != nullptr ? ca->certificate.get() : x509));
  X509_set_pubkey(x509, made.key.get());
  if (ca == nullptr) {
    const std::unique_ptr<X509_EXTENSION, decltype(&X509_EXTENSION_free)> is_ca(
        X509V3_EXT_conf_nid(nullptr, nullptr, NID_basic_constraints, "critical,CA:TRUE"),
        &X509_EXTENSION_free);
    X509_add_ext(x509, is_ca.get(), -1);
  }
  EXPECT_GT(X509_sign(x509, ca != nullptr ? ca->key.get() : made.key.get(), EVP_sha256()), 0);
  return made;
}

// Certificates in files, as a process has them.
class Directory {
 public:
  Directory() {
    std::string pattern = std::filesystem::temp_directory_path() / "persia-tls-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  Directory(const Directory&) = delete;

  void Write(const Signer& ca, const Signer& own) const {
    WriteFile("ca.pem", [&](FILE* file) { PEM_write_X509(file, ca.certificate.get()); });
    WriteFile("own.pem", [&](FILE* file) { PEM_write_X509(file, own.certificate.get()); });
    WriteFile("own.key", [&](FILE* file) {
      PEM_write_PrivateKey(file, own.key.get(), nullptr, nullptr, 0, nullptr, nullptr);
    });
  }
  std::string Path(const char* name) const { return path_ + "/" + name; }
  StatusOr<std::shared_ptr<TlsFiles>> Load() const {
    return TlsFiles::Load(Path("own.pem"), Path("own.key"), Path("ca.pem"));
  }

 private:
  template <typename Function>
  void WriteFile(const char* name, Function write) const {
    FILE* file = std::fopen(Path(name).c_str(), "w");
    write(file);
    std::fclose(file);
  }
  std::string path_;
};

class TlsTest : public ::testing::Test {
 protected:
  void SetUp() override { certificates_.Write(ca_, Sign("worker", &ca_)); }

  static Security With(const Directory& directory, bool has_identity = true) {
    auto files = directory.Load();
    EXPECT_TRUE(files.ok()) << files.status().ToString();
    Identity identity{.role = Role::kWorker};
    identity.accepted[Role::kWorker] = identity.key;
    return {.identity = has_identity ? std::make_shared<const Identity>(identity) : nullptr,
            .tls = *files};
  }
  void StartServer(Security security) {
    server_ = std::make_unique<Server>(
        Server::Options{.num_io_threads = 2, .security = std::move(security)});
    server_->Handle(kTlsEcho, Echo);
    auto port = server_->Start();
    ASSERT_TRUE(port.ok()) << port.status().ToString();
    port_ = *port;
  }
  std::unique_ptr<Channel> Connect(Security security) const {
    auto channel = std::make_unique<Channel>(
        Channel::Options{.peer = "echo", .security = std::move(security)});
    channel->SetAddress(Loopback(port_));
    return channel;
  }
  static Status CallEcho(Channel& channel, size_t size_bytes = 1000) {
    const auto body = Pattern(size_bytes, static_cast<uint32_t>(size_bytes));
    const auto reply = channel.Call(kTlsEcho, SegmentsOf(body), Soon());
    if (!reply.ok()) return reply.status();
    return SameBytes(reply.value(), body) ? Status::Ok() : Internal("another body");
  }
  void ExpectRefused(Security security, const std::string& why) {
    const auto begin = Clock::now();
    const Status status = CallEcho(*Connect(std::move(security)));
    EXPECT_EQ(status.code(), StatusCode::kPermissionDenied) << status.ToString();
    EXPECT_NE(status.message().find(why), std::string::npos) << status.message();
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(60)) << "it waited for the deadline";
  }

  const Signer ca_ = Sign("job", nullptr);
  const Directory certificates_;
  std::unique_ptr<Server> server_;
  uint16_t port_ = 0;
};

TEST_F(TlsTest, BodiesOfAllSizes) {
  for (const bool has_identity : {true, false}) {
    StartServer(With(certificates_, has_identity));
    const auto channel = Connect(With(certificates_, has_identity));
    for (const size_t size : {0, 1, 64, 4096, 16352, 16384, 65537, 1 << 20, 8 << 20}) {
      const Status status = CallEcho(*channel, size);
      EXPECT_TRUE(status.ok()) << size << ": " << status.ToString();
    }
    EXPECT_EQ(channel->stats().metrics["num_connects"], 1u);
  }
}

// Frames that share records, and both directions at once.
TEST_F(TlsTest, ManyCallsAtOnce) {
  StartServer(With(certificates_));
  const auto channel = Connect(With(certificates_));
  std::vector<std::vector<std::byte>> bodies;
  std::vector<std::future<StatusOr<Buffer>>> replies;
  for (uint32_t i = 0; i < 600; ++i) bodies.push_back(Pattern(i % 50 == 0 ? 2'000'000 : i, i));
  for (const auto& body : bodies) {
    auto promise = std::make_shared<std::promise<StatusOr<Buffer>>>();
    replies.push_back(promise->get_future());
    channel->CallAsync(kTlsEcho, SegmentsOf(body), Soon(),
                       [promise](StatusOr<Buffer> reply) { promise->set_value(std::move(reply)); });
  }
  for (size_t i = 0; i < bodies.size(); ++i) {
    const auto reply = replies[i].get();
    ASSERT_TRUE(reply.ok()) << i << ": " << reply.status().ToString();
    EXPECT_TRUE(SameBytes(reply.value(), bodies[i])) << i;
  }
  EXPECT_EQ(channel->stats().metrics["num_connects"], 1u);
}

TEST_F(TlsTest, CertificatesOfAnotherJobAreRefusedByBothEnds) {
  StartServer(With(certificates_));
  const Signer other_ca = Sign("other job", nullptr);
  const Directory foreign;
  foreign.Write(other_ca, Sign("worker", &other_ca));
  ExpectRefused(With(foreign), "TLS: certificate verify failed");
  // It trusts the server's CA, and shows a certificate of another.
  const Directory mixed;
  mixed.Write(ca_, Sign("worker", &other_ca));
  ExpectRefused(With(mixed), "TLS: ");
}

TEST_F(TlsTest, AnExpiredCertificateIsRefused) {
  StartServer(With(certificates_));
  const Directory expired;
  expired.Write(ca_, Sign("worker", &ca_, -60));
  ExpectRefused(With(expired), "expired");
}

TEST_F(TlsTest, AClientWithoutTlsIsToldSo) {
  StartServer(With(certificates_));
  Security plain = With(certificates_);
  plain.tls = nullptr;
  ExpectRefused(plain, "set PERSIA_TLS_DIR");
}

TEST_F(TlsTest, AServerWithoutTlsIsNamed) {
  Security plain = With(certificates_);
  plain.tls = nullptr;
  StartServer(plain);
  const auto channel = Connect(With(certificates_));
  const auto call = [&](auto deadline) { return channel->Call(kTlsEcho, {}, deadline).status(); };
  const Status status = FailureOf(call, "does it use TLS?", 1000);
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_NE(status.message().find("does it use TLS?"), std::string::npos) << status.message();
}

// Both ends keep running; the connection that exists is not touched.
TEST_F(TlsTest, NewConnectionsReadChangedFiles) {
  const Directory of_server;
  of_server.Write(ca_, Sign("server", &ca_));
  StartServer(With(of_server));
  const auto before = Connect(With(certificates_));
  EXPECT_TRUE(CallEcho(*before).ok());
  const Signer new_ca = Sign("next year's job", nullptr);
  const Directory renewed;
  renewed.Write(new_ca, Sign("worker", &new_ca));
  ExpectRefused(With(renewed), "TLS: ");
  of_server.Write(new_ca, Sign("server", &new_ca));
  const Status status = CallEcho(*Connect(With(renewed)));
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_TRUE(CallEcho(*before).ok());
  EXPECT_EQ(before->stats().metrics["num_connects"], 1u);
  // Half written files are not used.
  std::ofstream(of_server.Path("own.pem")) << "-----BEGIN";
  EXPECT_TRUE(CallEcho(*Connect(With(renewed))).ok());
}

TEST_F(TlsTest, AFileThatCannotBeUsedIsNamed) {
  const auto missing =
      TlsFiles::Load("/no/such.pem", certificates_.Path("own.key"), certificates_.Path("ca.pem"));
  EXPECT_EQ(missing.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(missing.status().message().find("'/no/such.pem'"), std::string::npos);
  std::filesystem::copy_file(certificates_.Path("ca.pem"), certificates_.Path("own.key"),
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_NE(certificates_.Load().status().message().find("own.key"), std::string::npos);
}

// Of two connections.
void ExpectContext(TlsFiles& files, const std::shared_ptr<SSL_CTX>& expected) {
  for (int connection = 0; connection < 2; ++connection) {
    // At most one warning a second is written: the second connection's would be.
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    EXPECT_EQ(files.Context(), expected);
  }
}

size_t NumWarnings(const std::string& written) {
  const std::string text = "the certificate read before is used";
  size_t num = 0;
  for (size_t at = 0; (at = written.find(text, at)) != std::string::npos; ++at) ++num;
  return num;
}

// Not for each connection.
TEST_F(TlsTest, BrokenFilesAreWarnedOfOnce) {
  const auto files = certificates_.Load().value();
  const auto before = files->Context();
  ::testing::internal::CaptureStderr();
  for (int change = 0; change < 2; ++change) {
    std::ofstream(certificates_.Path("own.key")) << "half of a key";
    ExpectContext(*files, before);
  }
  EXPECT_EQ(NumWarnings(::testing::internal::GetCapturedStderr()), 2u);
}

// Also where they are removed again after others were used.
TEST_F(TlsTest, RemovedFilesAreWarnedOf) {
  const auto files = certificates_.Load().value();
  ::testing::internal::CaptureStderr();
  for (int removal = 0; removal < 2; ++removal) {
    const auto before = files->Context();
    std::map<std::string, std::string> contents;
    for (const char* name : {"own.pem", "own.key", "ca.pem"}) {
      std::stringstream content;
      content << std::ifstream(certificates_.Path(name)).rdbuf();
      contents[name] = content.str();
      std::filesystem::remove(certificates_.Path(name));
    }
    ExpectContext(*files, before);
    for (const auto& [name, content] : contents) {
      std::ofstream(certificates_.Path(name.c_str())) << content;
    }
    EXPECT_NE(files->Context(), before);
  }
  EXPECT_EQ(NumWarnings(::testing::internal::GetCapturedStderr()), 2u);
}

// ---- a stream alone

// Both ends of a connection whose handshake is done, and the server's socket.
struct Pair {
  explicit Pair(const Directory& directory) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    client_socket = UniqueFd(ends[0]);
    server_socket = UniqueFd(ends[1]);
    const auto context = directory.Load().value()->Context();
    client.emplace(context, ends[0], TlsStream::Side::kClient);
    server.emplace(context, ends[1], TlsStream::Side::kServer);
    std::byte none;
    while (client->Handshake() <= 0) EXPECT_EQ(server->Read(&none, 1), -1);
    EXPECT_EQ(server->Read(&none, 1), -1);
    EXPECT_EQ(errno, EAGAIN);
  }
  int UnreadBytes() const {
    int size = 0;
    EXPECT_EQ(::ioctl(server_socket.get(), FIONREAD, &size), 0);
    return size;
  }
  UniqueFd client_socket, server_socket;
  std::optional<TlsStream> client, server;
};

TEST_F(TlsTest, RecordsAreSentTogether) {
  Pair pair(certificates_);
  const auto record = Pattern(16384);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(pair.client->Write(record.data(), record.size()), 16384);
  EXPECT_EQ(pair.UnreadBytes(), 0);
  EXPECT_EQ(pair.client->Flush(), 1);
  EXPECT_GT(pair.UnreadBytes(), 3 * 16384);
  // They are also received together, and nothing is told of them twice.
  std::vector<std::byte> read(16384);
  ASSERT_EQ(pair.server->Read(read.data(), read.size()), 16384);
  EXPECT_EQ(read, record);
  EXPECT_EQ(pair.UnreadBytes(), 0);
  EXPECT_TRUE(pair.server->HasPending());
  for (int i = 0; i < 2; ++i) ASSERT_EQ(pair.server->Read(read.data(), read.size()), 16384);
  EXPECT_FALSE(pair.server->HasPending());
}

// Else the server would read the same half again and again until the rest comes.
TEST_F(TlsTest, HalfARecordIsNotPending) {
  Pair pair(certificates_);
  const auto record = Pattern(16384);
  ASSERT_EQ(pair.client->Write(record.data(), record.size()), 16384);
  ASSERT_EQ(pair.client->Flush(), 1);
  // The record, less its last byte.
  std::vector<std::byte> bytes(20'000);
  const auto size = ::recv(pair.server_socket.get(), bytes.data(), bytes.size(), 0);
  ASSERT_GT(size, 16384);
  ASSERT_EQ(::send(pair.client_socket.get(), bytes.data(), static_cast<size_t>(size) - 1, 0),
            size - 1);
  std::vector<std::byte> read(16384);
  EXPECT_EQ(pair.server->Read(read.data(), read.size()), -1);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_FALSE(pair.server->HasPending());
  ASSERT_EQ(::send(pair.client_socket.get(), &bytes[static_cast<size_t>(size) - 1], 1, 0), 1);
  EXPECT_EQ(pair.server->Read(read.data(), read.size()), 16384);
  EXPECT_EQ(read, record);
}

TEST_F(TlsTest, AFullSocketBlocksAndLosesNothing) {
  Pair pair(certificates_);
  std::vector<std::byte> sent, received, read(5000);
  const auto take = [&] {
    const ssize_t size = pair.server->Read(read.data(), read.size());
    if (size > 0) received.insert(received.end(), read.begin(), read.begin() + size);
    return size;
  };
  int num_blocked = 0;
  for (uint32_t i = 0; i < 500; ++i) {
    const auto record = Pattern(10'000, i);
    while (pair.client->Write(record.data(), record.size()) < 0) {
      ASSERT_EQ(errno, EAGAIN);
      ++num_blocked;
      take();
    }
    sent.insert(sent.end(), record.begin(), record.end());
  }
  while (pair.client->Flush() < 0) {
    ASSERT_EQ(errno, EAGAIN);
    ++num_blocked;
    take();
  }
  while (take() > 0) {
  }
  EXPECT_GT(num_blocked, 0);
  EXPECT_EQ(received, sent);
}

TEST_F(TlsTest, TheCheapestCipherComesFirst) {
  const auto context = certificates_.Load().value()->Context();
  const SSL_CIPHER* first = sk_SSL_CIPHER_value(SSL_CTX_get_ciphers(context.get()), 0);
  EXPECT_STREQ(SSL_CIPHER_get_name(first), "TLS_AES_128_GCM_SHA256");
}

}  // namespace
}  // namespace persia::net
