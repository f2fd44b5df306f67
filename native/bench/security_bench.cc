// What authentication and TLS cost an RPC connection, over the loopback.
//
//   openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=bench
//     -keyout key.pem -out cert.pem
//   security_bench cert.pem key.pem
//
// The kinds of connection take turns in blocks of calls, so that a noisy machine disturbs all
// alike; the figures are medians of blocks. Processor time is that of both ends. An echoed byte is
// encrypted twice and decrypted twice.
//
// The floor of TLS takes its turns, too: the cipher alone in blocks of 16 KiB, as
// `openssl speed -evp aes-128-gcm -bytes 16384` measures it.
#include <openssl/evp.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "net/channel.h"
#include "net/server.h"

namespace persia::net {
namespace {

constexpr MethodId kEcho{1, "Echo", {Role::kWorker}};
constexpr int kRounds = 41;

double CpuSeconds() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) { return time.tv_sec + time.tv_usec * 1e-6; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Nanoseconds of processor time for each byte that AES-128-GCM encrypts.
double CipherNanoseconds() {
  constexpr int kBlockBytes = 16384;
  constexpr int kBlocks = 512;
  static std::vector<unsigned char> block(kBlockBytes + 16);
  const std::array<unsigned char, 16> key_and_iv = {};
  const std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)> context(
      EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free);
  EVP_EncryptInit_ex(context.get(), EVP_aes_128_gcm(), nullptr, key_and_iv.data(), nullptr);
  const double begin = CpuSeconds();
  for (int i = 0; i < kBlocks; ++i) {
    int size = 0;
    EVP_EncryptInit_ex(context.get(), nullptr, nullptr, nullptr, key_and_iv.data());
    EVP_EncryptUpdate(context.get(), block.data(), &size, block.data(), kBlockBytes);
    EVP_EncryptFinal_ex(context.get(), block.data() + size, &size);
  }
  return (CpuSeconds() - begin) * 1e9 / kBlocks / kBlockBytes;
}

Clock::time_point Soon() { return Clock::now() + std::chrono::seconds(60); }

// A server of one kind, and a channel to it.
struct Ends {
  Ends(const char* kind_name, Security both) : name(kind_name), security(std::move(both)) {
    server = std::make_unique<Server>(Server::Options{.security = security});
    server->Handle(kEcho, [](const Buffer& request, const CallContext&) {
      Buffer reply(request.size());
      std::memcpy(reply.data(), request.data(), request.size());
      Segments segments;
      segments.AddOwned(std::move(reply));
      return StatusOr<Segments>(std::move(segments));
    });
    port = server->Start().value();
    channel = Connect();
  }
  std::unique_ptr<Channel> Connect() const {
    auto made = std::make_unique<Channel>(Channel::Options{.peer = name, .security = security});
    made->SetAddress("127.0.0.1:" + std::to_string(port));
    return made;
  }
  static void Call(Channel& over, const std::vector<std::byte>& body) {
    Segments segments;
    segments.AddView(body);
    if (const auto reply = over.Call(kEcho, segments, Soon()); !reply.ok()) {
      std::fprintf(stderr, "%s\n", reply.status().ToString().c_str());
      std::exit(1);
    }
  }

  const char* name;
  const Security security;
  std::unique_ptr<Server> server;
  uint16_t port = 0;
  std::unique_ptr<Channel> channel;
  std::vector<double> wall_us = {};
  std::vector<double> cpu_us = {};
};

void Compare(std::vector<std::unique_ptr<Ends>>& all, size_t size_bytes, int calls) {
  const std::vector<std::byte> body(size_bytes, std::byte{42});
  for (auto& ends : all) ends->wall_us.clear(), ends->cpu_us.clear();
  std::vector<double> cipher_ns;
  for (int round = 0; round < kRounds; ++round) {
    cipher_ns.push_back(CipherNanoseconds());
    for (auto& ends : all) {
      const double cpu = CpuSeconds();
      const auto begin = Clock::now();
      for (int i = 0; i < calls; ++i) Ends::Call(*ends->channel, body);
      const std::chrono::duration<double, std::micro> wall = Clock::now() - begin;
      ends->wall_us.push_back(wall.count() / calls);
      ends->cpu_us.push_back((CpuSeconds() - cpu) * 1e6 / calls);
    }
  }
  const double plain = Median(all[0]->wall_us);
  const double plain_cpu = Median(all[0]->cpu_us);
  for (auto& ends : all) {
    const double wall = Median(ends->wall_us);
    const double cpu = Median(ends->cpu_us);
    const double ns_per_byte = (cpu - plain_cpu) * 1e3 / (4.0 * static_cast<double>(size_bytes));
    std::printf("%8zu  %-13s  %8.1f us  %5.2f of plain  %8.1f us processor  %6.3f ns a byte more\n",
                size_bytes, ends->name, wall, plain / wall, cpu, ns_per_byte);
  }
  std::printf("%8zu  %-13s  %6.3f ns a byte\n", size_bytes, "cipher alone", Median(cipher_ns));
}

void MeasureSetup(const Ends& ends) {
  std::vector<double> ms;
  for (int i = 0; i < kRounds; ++i) {
    const auto channel = ends.Connect();
    const auto begin = Clock::now();
    Ends::Call(*channel, {});
    ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  std::printf("   setup  %-13s  %8.2f ms until the first reply\n", ends.name, Median(ms));
}

}  // namespace
}  // namespace persia::net

int main(int argc, char** argv) {
  using namespace persia::net;  // NOLINT: a program of one file
  if (argc != 3) {
    std::fprintf(stderr, "usage: security_bench CERTIFICATE KEY (see the top of its source)\n");
    return 1;
  }
  auto tls = TlsFiles::Load(argv[1], argv[2], argv[1]);
  if (!tls.ok()) {
    std::fprintf(stderr, "%s\n", tls.status().message().c_str());
    return 1;
  }
  Identity worker{.role = persia::Role::kWorker};
  worker.accepted[worker.role] = worker.key;
  const auto identity = std::make_shared<const Identity>(worker);
  std::vector<std::unique_ptr<Ends>> all;
  all.push_back(std::make_unique<Ends>("plain", Security{}));
  all.push_back(std::make_unique<Ends>("authenticated", Security{.identity = identity}));
  all.push_back(std::make_unique<Ends>("TLS", Security{.identity = identity, .tls = *tls}));
  Compare(all, 64, 200);
  Compare(all, 65536, 50);
  Compare(all, 1 << 20, 10);
  for (const auto& ends : all) MeasureSetup(*ends);
}
