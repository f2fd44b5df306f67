// One batch through embedding worker and two parameter servers, beside the same batch in process.
//
// The bytes that a batch moves between the processes are printed first, counted by their channels.
//
// Each round of a side draws new batches of the same law, as exact mode holds the rows of batches
// that it has seen. Exact mode has a cluster of its own, since another trainer of its rows would be
// a mistake.
//
// The embedded side is EmbeddingBags. The cluster side is an EmbeddingWorker over RemoteRows and
// two ParameterServers, over TCP on the loopback, all in this process; once with the worker called
// directly, and once with RemoteClient and WorkerService between, so that embeddings and
// gradients cross a socket too. Both sides look a batch up for training and update its rows. The
// bare sockets carry the messages of the latter, and nothing else is done.
//
// A program of its own rather than Google Benchmark, because the sides take turns: rounds of
// batches alternate, so that a noisy machine disturbs all alike, and medians of rounds are
// compared.
// CPU time stands beside it: what a batch costs when other programs take the cores away.
//
// With SIDE, the number of a line of the table, only that one runs and is printed, for a profiler.
//
// With CERTIFICATE and KEY, one certificate that signs itself (security_bench.cc says how to make
// it), a second cluster whose connections use TLS takes its turns beside the first.
//
//   cluster_bench [ROUNDS [MOST_ROWS_A_SLOT [DIM [SIDE [CERTIFICATE KEY]]]]]
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/id_features.h"
#include "bench/bare_sockets.h"
#include "bench/workload.h"
#include "client/embedded_client.h"
#include "client/embedding_bags.h"
#include "client/remote_client.h"
#include "net/security.h"
#include "server/parameter_server.h"
#include "worker/row_service.h"
#include "worker/worker_service.h"

namespace persia::client {
namespace {

constexpr uint32_t kBatchSize = 4096;
constexpr size_t kBatches = 48;
constexpr uint32_t kServers = 2;

using Clock = std::chrono::steady_clock;

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

template <typename T>
T Must(StatusOr<T> result) {
  Require(result.ok() ? Status::Ok() : result.status());
  return std::move(result).value();
}

Deadline Soon() { return Clock::now() + std::chrono::seconds(60); }

struct Workload {
  std::vector<uint64_t> vocabularies;
  std::vector<worker::SlotConfig> slots;
  std::vector<bench::Batch> batches;
  std::vector<std::vector<std::byte>> messages;  // the batches, as a loader sends them
  std::vector<float> gradients;                  // of any slot, or of all side by side
};

std::vector<std::byte> ToMessage(const bench::Batch& batch, const Workload& workload) {
  std::vector<uint32_t> offsets(kBatchSize + 1);
  for (uint32_t i = 0; i < offsets.size(); ++i) offsets[i] = i;
  IdFeatures features{kBatchSize, {}};
  for (size_t slot = 0; slot < workload.slots.size(); ++slot) {
    const auto ids = std::span(batch.values).subspan(slot * kBatchSize, kBatchSize);
    features.features.push_back({workload.slots[slot].name, offsets, ids});
  }
  return Must(EncodeIdFeatures(features));
}

// Others than before.
void DrawBatches(Workload* workload) {
  static uint64_t seed = 0;
  workload->batches = bench::MakeBatches(workload->vocabularies, kBatchSize, kBatches, 0, ++seed);
  workload->messages.clear();
  for (const bench::Batch& batch : workload->batches) {
    workload->messages.push_back(ToMessage(batch, *workload));
  }
}

Workload MakeWorkload(uint64_t most_rows, uint32_t dim) {
  Workload workload;
  for (const uint64_t size : bench::kCriteoKaggle) {
    const auto slot = static_cast<uint32_t>(workload.slots.size());
    const std::string name = std::string("f").append(std::to_string(slot));
    workload.vocabularies.push_back(std::min(size, most_rows));
    workload.slots.push_back({.name = name, .dim = dim, .group = slot});
  }
  DrawBatches(&workload);
  workload.gradients.assign(kBatchSize * dim * workload.slots.size(), 1e-3f);
  return workload;
}

TrainConfig Adagrad() {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdagrad;
  return config;
}

// Calls insert(slot, ids) for all IDs of the workload, some at a time, in an order that says
// nothing of how often they are used.
void ForAllIds(const Workload& workload,
               const std::function<void(size_t, std::span<const uint64_t>)>& insert) {
  constexpr uint64_t kChunk = 1 << 16;
  std::mt19937_64 random(2);
  for (size_t slot = 0; slot < workload.slots.size(); ++slot) {
    std::vector<uint64_t> ids(workload.vocabularies[slot]);
    for (uint64_t rank = 0; rank < ids.size(); ++rank) ids[rank] = bench::IdOf(slot, rank);
    std::shuffle(ids.begin(), ids.end(), random);
    for (uint64_t begin = 0; begin < ids.size(); begin += kChunk) {
      insert(slot, std::span(ids).subspan(begin, std::min(kChunk, ids.size() - begin)));
    }
  }
}

class Embedded {
 public:
  Embedded(const Workload& workload, uint32_t num_threads) : workload_(workload) {
    EmbeddingBagsOptions options;
    options.slots = workload.slots;
    options.num_threads = num_threads;
    bags_ = Must(EmbeddingBags::Create(std::move(options)));
    Require(bags_->Configure(Adagrad(), false));
    ForAllIds(workload, [this](size_t slot, std::span<const uint64_t> ids) {
      std::vector<int64_t> lengths(workload_.slots.size(), 0);
      lengths[slot] = static_cast<int64_t>(ids.size());
      Must(bags_->Lookup(ids, lengths, store::LookupMode::kTrain));
    });
  }
  void Train(size_t number) {
    const bench::Batch& batch = workload_.batches[number % kBatches];
    auto pooled = Must(bags_->Lookup(batch.values, batch.lengths, store::LookupMode::kTrain));
    Must(bags_->Update(*pooled.batch, workload_.gradients));
  }

 private:
  const Workload& workload_;
  std::unique_ptr<EmbeddingBags> bags_;
};

// An embeddings message begins with it.
BatchKey KeyOf(const Buffer& embeddings) {
  BatchKey key;
  std::memcpy(&key, embeddings.data(), sizeof(key));
  return key;
}

class Cluster {
 public:
  explicit Cluster(const Workload& workload) : workload_(workload) {
    rows_ = std::make_shared<worker::RemoteRows>(kServers);
    for (uint32_t i = 0; i < kServers; ++i) {
      server::ParameterServer::Options options;
      options.replica_index = i;
      options.replica_size = kServers;
      servers_.push_back(Must(server::ParameterServer::Create(options)));
      Require(rows_->SetServer(i, "127.0.0.1:" + std::to_string(Must(servers_[i]->Start()))));
    }
    worker::WorkerOptions options;
    options.slots = workload.slots;
    worker_ = Must(worker::EmbeddingWorker::Create(std::move(options), rows_));
    service_ = std::make_unique<worker::WorkerService>(worker_, net::Server::Options{});
    client_ = Must(RemoteClient::Create(1));
    const std::string address = "127.0.0.1:" + std::to_string(Must(service_->Start()));
    Require(client_->SetWorker(0, address));
    Require(client_->Configure(Adagrad(), false, Soon()));
    exact_ = Must(RemoteClient::Create(1));
    Require(exact_->SetWorker(0, address));
    Require(exact_->BeginExact(Must(ExactRows::Create(
        worker::WorkerOptions{}.feature_index_prefix_bit, workload.slots, worker::kAllSlots))));
    Require(exact_->Configure(Adagrad(), false, Soon()));
    for (const worker::SlotConfig& slot : workload.slots) {
      gradients_.push_back({.slot = slot.name,
                            .num_rows = kBatchSize,
                            .dim = slot.dim,
                            .rows = workload.gradients.data()});
    }
    Fill();
  }
  ~Cluster() {
    service_->Stop(std::chrono::seconds(5));
    rows_->Close();
    for (const auto& server : servers_) server->Stop(std::chrono::seconds(5));
  }

  void TrainInProcess(size_t number) {
    const auto& message = workload_.messages[number % kBatches];
    const Buffer embeddings = Must(worker_->LookupDirect(message, true, Soon()));
    Check(Must(worker_->ReturnGradients(KeyOf(embeddings), 1.0f, gradients_, Soon())));
  }
  // Of all channels, both ways, so far.
  uint64_t NumBytes() const {
    uint64_t num_bytes = 0;
    for (const auto& all :
         {client_->channel_stats(), exact_->channel_stats(), rows_->channel_stats()}) {
      for (const net::ChannelStats& channel : all) {
        num_bytes += channel.metrics["num_sent_bytes"] + channel.metrics["num_received_bytes"];
      }
    }
    return num_bytes;
  }
  void TrainRemotely(size_t number) {
    const auto& message = workload_.messages[number % kBatches];
    const LookupResult result = Must(client_->LookupDirect(0, message, true, Soon()));
    Check(Must(client_->ReturnGradients(result.reference, 1.0f, gradients_, Soon())));
  }
  // consistency="exact": the lock is the thread of the loop.
  void TrainExactly(size_t number) {
    const auto& message = workload_.messages[number % kBatches];
    const BatchReference batch = Must(exact_->LookupWhole({}, message, Soon())).reference;
    {
      const std::lock_guard lock(loop_);
      Must(exact_->PoolExact(batch));
      Require(exact_->ApplyExact(batch, 1.0f, gradients_));
    }
    Check(Must(exact_->ReturnGradients(batch, 1.0f, gradients_, Soon())));
  }

 private:
  static void Check(const ReturnReport& report) {
    if (report.update.num_updated > 0 && report.update.num_missing == 0) return;
    Require(Internal("a batch was not updated whole"));
  }
  // As batches of one sample.
  void Fill() {
    ForAllIds(workload_, [this](size_t slot, std::span<const uint64_t> ids) {
      const std::vector<uint32_t> offsets = {0, static_cast<uint32_t>(ids.size())};
      const IdFeatures features{1, {{workload_.slots[slot].name, offsets, ids}}};
      const auto embeddings =
          Must(worker_->LookupDirect(Must(EncodeIdFeatures(features)), true, Soon()));
      Require(worker_->Release(KeyOf(embeddings)));
    });
  }

  const Workload& workload_;
  std::vector<std::unique_ptr<server::ParameterServer>> servers_;
  std::shared_ptr<worker::RemoteRows> rows_;
  std::shared_ptr<worker::EmbeddingWorker> worker_;
  std::unique_ptr<worker::WorkerService> service_;
  std::shared_ptr<RemoteClient> client_;
  std::shared_ptr<RemoteClient> exact_;
  std::mutex loop_;
  std::vector<SlotGradient> gradients_;
};

// Of a batch, on the wire of the remote side, whose slots travel as distinct rows with numbers of 1
// or 2 bytes; how many signs are distinct is the first one's.
bench::BatchBytes BytesOf(const Workload& workload) {
  const bench::Batch& batch = workload.batches[0];
  const size_t dim = workload.slots[0].dim;
  const size_t distinct =
      std::unordered_set<uint64_t>(batch.values.begin(), batch.values.end()).size();
  const size_t a_server = distinct / kServers;
  const size_t floats = distinct * dim * sizeof(float);
  const size_t numbers = batch.values.size() * 3 / 2;
  return {workload.messages[0].size(), floats + numbers, floats, a_server * sizeof(uint64_t),
          a_server * dim * sizeof(float)};
}

// As many as there are batches in flight.
class BarePool {
 public:
  explicit BarePool(const bench::BatchBytes& bytes) : bytes_(bytes) {}
  void Train() {
    std::unique_ptr<bench::BareSockets> sockets = Take();
    sockets->Train();
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(sockets));
  }

 private:
  std::unique_ptr<bench::BareSockets> Take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<bench::BareSockets>(bytes_);
    std::unique_ptr<bench::BareSockets> sockets = std::move(free_.back());
    free_.pop_back();
    return sockets;
  }

  const bench::BatchBytes bytes_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<bench::BareSockets>> free_;
};

struct Side {
  std::string name;
  uint32_t in_flight = 1;
  std::function<void(size_t)> train;  // one batch, by number
  std::vector<double> wall_ms = {};   // a batch, by round
  std::vector<double> cpu_ms = {};
};

// Of all threads of this process.
double CpuMilliseconds() {
  timespec time;
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) * 1e-6;
}

// `count` batches, `in_flight` at a time.
void Train(size_t count, const Side& side) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t number = next++; number < count; number = next++) side.train(number);
  };
  std::vector<std::thread> threads;
  for (uint32_t i = 1; i < side.in_flight; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

// What comes first finds the caches as another side left them, so it is not timed.
void RunRound(Workload* workload, Side* side) {
  DrawBatches(workload);
  Train(kBatches / 3, *side);
  DrawBatches(workload);
  const auto begin = Clock::now();
  const double cpu_begin = CpuMilliseconds();
  Train(kBatches, *side);
  const std::chrono::duration<double, std::milli> wall = Clock::now() - begin;
  side->wall_ms.push_back(wall.count() / kBatches);
  side->cpu_ms.push_back((CpuMilliseconds() - cpu_begin) / kBatches);
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Of kBatches new batches, after so many batches before.
void PrintBytes(Workload* workload, const Cluster& cluster, const Side& side, size_t num_before) {
  for (size_t i = 0; i < num_before; i += kBatches) {
    DrawBatches(workload);
    Train(kBatches, side);
  }
  DrawBatches(workload);
  const uint64_t before = cluster.NumBytes();
  Train(kBatches, side);
  std::printf(
      "MB/batch between client, worker and servers, %s, %u in flight, after %zu more batches: "
      "%.2f\n",
      side.name.c_str(), side.in_flight, num_before,
      static_cast<double>(cluster.NumBytes() - before) / kBatches * 1e-6);
}

// Worker called directly, over a client, and by exact mode, with 1, 2 and 4 batches in flight.
void AddSides(const std::string& prefix, Cluster& cluster, Cluster& exact,
              std::vector<Side>* sides) {
  for (const uint32_t in_flight : {1, 2, 4}) {
    sides->push_back({prefix + "worker", in_flight, [&](size_t n) { cluster.TrainInProcess(n); }});
  }
  for (const uint32_t in_flight : {1, 2, 4}) {
    sides->push_back(
        {prefix + "client, worker", in_flight, [&](size_t n) { cluster.TrainRemotely(n); }});
  }
  for (const uint32_t in_flight : {1, 2, 4}) {
    sides->push_back({prefix + "exact", in_flight, [&](size_t n) { exact.TrainExactly(n); }});
  }
}

// Servers and channels take the TLS files of the process when they are made.
std::unique_ptr<Cluster> MakeTlsCluster(const Workload& workload, const char* certificate,
                                        const char* key) {
  net::Security::SetTls(Must(net::TlsFiles::Load(certificate, key, certificate)));
  auto cluster = std::make_unique<Cluster>(workload);
  net::Security::Clear();
  return cluster;
}

// `only`: the one side to run, counted from 1; 0: all. `certificate` and `key`: null without TLS.
void Run(int rounds, Workload& workload, size_t only, const char* certificate, const char* key) {
  Embedded one(workload, 1);
  Embedded two(workload, 2);
  Cluster cluster(workload), exact(workload);
  std::vector<Side> sides = {{"embedded, 1 thread", 1, [&](size_t n) { one.Train(n); }},
                             {"embedded, 2 threads", 1, [&](size_t n) { two.Train(n); }}};
  AddSides("", cluster, exact, &sides);
  std::unique_ptr<Cluster> encrypted, encrypted_exact;
  if (key != nullptr) {
    encrypted = MakeTlsCluster(workload, certificate, key);
    encrypted_exact = MakeTlsCluster(workload, certificate, key);
    AddSides("TLS: ", *encrypted, *encrypted_exact, &sides);
  }
  PrintBytes(&workload, cluster, {"hybrid", 1, [&](size_t n) { cluster.TrainRemotely(n); }}, 0);
  for (const size_t num_before : {0, 48, 96, 192, 384}) {
    const Side side{"exact", 4, [&](size_t n) { exact.TrainExactly(n); }};
    PrintBytes(&workload, exact, side, num_before);
  }
  BarePool bare(BytesOf(workload));
  for (const uint32_t in_flight : {1, 2, 4}) {
    sides.push_back({"bare sockets", in_flight, [&](size_t) { bare.Train(); }});
  }
  if (only > 0 && only <= sides.size()) sides = {sides[only - 1]};
  for (int round = 0; round < rounds; ++round) {
    for (Side& side : sides) RunRound(&workload, &side);
  }
  const auto num_ids = static_cast<double>(workload.batches[0].values.size());
  const double one_thread_ms = only > 0 ? NAN : Median(sides[0].wall_ms);
  const double two_threads_ms = only > 0 ? NAN : Median(sides[1].wall_ms);
  std::printf("%-20s  %9s  %8s  %11s  %12s  %12s\n", "side", "in flight", "M IDs/s", "of 1 thread",
              "of 2 threads", "CPU ms/batch");
  for (const Side& side : sides) {
    const double ms = Median(side.wall_ms);
    std::printf("%-20s  %9u  %8.2f  %11.2f  %12.2f  %12.2f\n", side.name.c_str(), side.in_flight,
                num_ids / ms / 1e3, one_thread_ms / ms, two_threads_ms / ms, Median(side.cpu_ms));
  }
}

}  // namespace
}  // namespace persia::client

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  const uint64_t most_rows = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1'000'000;
  const auto dim = static_cast<uint32_t>(argc > 3 ? std::atoi(argv[3]) : 16);
  const size_t side = argc > 4 ? std::strtoul(argv[4], nullptr, 10) : 0;
  if (rounds < 1 || most_rows < 1 || dim < 1 || argc == 6) {
    std::fprintf(
        stderr,
        "usage: cluster_bench [ROUNDS [MOST_ROWS_A_SLOT [DIM [SIDE [CERTIFICATE KEY]]]]]\n");
    return 2;
  }
  auto workload = persia::client::MakeWorkload(most_rows, dim);
  persia::client::Run(rounds, workload, side, argc > 6 ? argv[5] : nullptr,
                      argc > 6 ? argv[6] : nullptr);
}
