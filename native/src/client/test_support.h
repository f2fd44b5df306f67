// What the tests of the client layer share: slots, batches, a step of training, and a cluster of
// real parameter servers and embedding workers in this process, on free ports.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/id_features.h"
#include "client/embedded_client.h"
#include "client/remote_client.h"
#include "server/parameter_server.h"
#include "worker/row_service.h"
#include "worker/worker_service.h"

namespace persia::client::testing {

// Long enough for a loaded machine; nothing waits for it unless a test fails.
inline Deadline Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(30); }
inline std::string Loopback(uint16_t port) { return "127.0.0.1:" + std::to_string(port); }

template <typename T>
T Must(StatusOr<T> result) {
  if (result.ok()) return std::move(result).value();
  ADD_FAILURE() << result.status().ToString();
  std::abort();  // a test cannot go on without it
}

// Pooled, scaled, raw and hashed, so that every way from a row to an embedding is taken.
inline worker::WorkerOptions Slots() {
  worker::WorkerOptions options;
  options.slots = {
      {.name = "age", .dim = 4, .group = 0},
      {.name = "tags", .dim = 3, .sqrt_scaling = true, .group = 1},
      {.name = "items", .dim = 5, .embedding_summation = false, .sample_fixed_size = 3, .group = 2},
      {.name = "urls", .dim = 2, .hash_stack_rounds = 2, .hash_stack_size = 50, .group = 3},
  };
  return options;
}

inline store::EmbeddingStore::Options StoreOptions() {
  return {.capacity = 100'000, .num_internal_shards = 4};
}

// Adam, whose result depends on every step before.
inline TrainConfig Adam() {
  TrainConfig config;
  config.initializer.seed = 7;
  config.optimizer.kind = OptimizerKind::kAdam;
  config.optimizer.lr = 0.05f;
  config.optimizer.eps = 1e-8f;
  return config;
}

// Batch number `step`: a function of the number alone. Samples have 0 to 4 IDs, some of them twice,
// and the batches share IDs.
inline std::vector<std::byte> Batch(uint32_t step, uint32_t batch_size = 16) {
  const std::vector<std::string> names = {"age", "tags", "items", "urls"};
  std::vector<std::vector<uint32_t>> offsets(names.size(), {0});
  std::vector<std::vector<uint64_t>> ids(names.size());
  uint64_t state = step + 1;
  for (size_t f = 0; f < names.size(); ++f) {
    for (uint32_t sample = 0; sample < batch_size; ++sample) {
      const uint32_t num_ids = (sample + step + static_cast<uint32_t>(f)) % 5;
      for (uint32_t i = 0; i < num_ids; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids[f].push_back((state >> 33) % 40);
      }
      offsets[f].push_back(static_cast<uint32_t>(ids[f].size()));
    }
  }
  IdFeatures batch{batch_size, {}};
  for (size_t f = 0; f < names.size(); ++f)
    batch.features.push_back({names[f], offsets[f], ids[f]});
  return Must(EncodeIdFeatures(batch));
}

// Every byte of the slots that a model would see.
struct Snapshot {
  std::map<std::string, std::vector<float>> rows;
  std::map<std::string, std::vector<int64_t>> index;
  std::map<std::string, std::vector<uint32_t>> sample_num_ids;
  bool operator==(const Snapshot&) const = default;
};

inline Snapshot Take(const LookupResult& result) {
  Snapshot snapshot;
  for (const worker::SlotEmbedding& slot : result.slots) {
    snapshot.rows[slot.name] = {slot.rows, slot.rows + size_t{slot.num_rows} * slot.dim};
    if (!slot.raw) continue;
    const size_t num_index = size_t{result.batch_size} * slot.sample_fixed_size;
    snapshot.index[slot.name] = {slot.index, slot.index + num_index};
    snapshot.sample_num_ids[slot.name] = {slot.sample_num_ids,
                                          slot.sample_num_ids + result.batch_size};
  }
  return snapshot;
}

// A gradient that depends on the embeddings, so that a difference in a step grows in the next.
struct Gradients {
  explicit Gradients(const LookupResult& result) {
    for (const worker::SlotEmbedding& slot : result.slots) {
      auto& values = rows.emplace_back(slot.rows, slot.rows + size_t{slot.num_rows} * slot.dim);
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = 3.0f * values[i] + 0.01f * static_cast<float>(i % 7);
      }
      slots.push_back(
          {.slot = slot.name, .num_rows = slot.num_rows, .dim = slot.dim, .rows = values.data()});
    }
  }
  Gradients(const Gradients&) = delete;

  std::vector<std::vector<float>> rows;
  std::vector<SlotGradient> slots;
};

using Register = std::function<BatchReference(std::span<const std::byte>)>;

// `num_steps` of training on registered batches; what each saw.
inline std::vector<Snapshot> Train(EmbeddingClient& client, const Register& add,
                                   uint32_t num_steps) {
  std::vector<Snapshot> history;
  for (uint32_t step = 0; step < num_steps; ++step) {
    const LookupResult result = Must(client.Lookup(add(Batch(step)), true, Soon()));
    history.push_back(Take(result));
    const Gradients gradients(result);
    Must(client.ReturnGradients(result.reference, 2.0f, gradients.slots, Soon()));
  }
  return history;
}

// Directories for pools.
class Pools {
 public:
  Pools() {
    std::string name = ::testing::TempDir() + "pools_XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~Pools() { std::filesystem::remove_all(path_); }
  Pools(const Pools&) = delete;

  store::TierOptions Tier(uint32_t index, uint64_t cache_rows) const {
    const std::string directory = path_ + "/" + std::to_string(index);
    std::filesystem::create_directory(directory);
    return {.directory = directory,
            .pool = {.size_bytes = uint64_t{16} << 20, .extent_bytes = 512 << 10, .syncs = false},
            .cache_rows = cache_rows};
  }

 private:
  std::string path_;
};

// Members are destroyed from the client down, so that none is called after its end. With
// `cache_rows` servers have pools.
class Cluster {
 public:
  explicit Cluster(const Placement& placement, uint32_t num_workers = 1, uint64_t cache_rows = 0)
      : cache_rows_(cache_rows),
        rows_(std::make_shared<worker::RemoteRows>(placement)),
        servers_(placement.num_servers()),
        workers_(num_workers),
        services_(num_workers),
        ports_(num_workers),
        client_(Must(RemoteClient::Create(num_workers))) {
    for (uint32_t i = 0; i < servers_.size(); ++i) StartServer(i);
    for (uint32_t i = 0; i < num_workers; ++i) StartWorker(i);
  }

  // New and empty, on another port, as after a crash.
  void StartServer(uint32_t index) {
    server::ParameterServer::Options options;
    options.replica_index = index;
    options.replica_size = static_cast<uint32_t>(servers_.size());
    options.store = StoreOptions();
    if (cache_rows_ != 0) options.tier = pools_.Tier(index, cache_rows_);
    servers_[index] = Must(server::ParameterServer::Create(options));
    const uint16_t port = Must(servers_[index]->Start());
    ASSERT_TRUE(rows_->SetServer(index, Loopback(port)).ok());
  }
  void StopServer(uint32_t index) { servers_[index].reset(); }
  void StartWorker(uint32_t index) {
    services_[index].reset();
    workers_[index] = Must(worker::EmbeddingWorker::Create(Slots(), rows_));
    services_[index] = std::make_unique<worker::WorkerService>(workers_[index], WorkerRpc());
    ports_[index] = Must(services_[index]->Start());
    ASSERT_TRUE(client_->SetWorker(index, Loopback(ports_[index])).ok());
  }

  // As many handlers as the role has.
  static net::ServerOptions WorkerRpc() {
    net::ServerOptions options;
    options.num_handler_threads = worker::kMaxOrderedReturns;
    return options;
  }

  RemoteClient& client() { return *client_; }
  worker::EmbeddingWorker& worker(uint32_t index) { return *workers_[index]; }
  server::ParameterServer& server(uint32_t index) { return *servers_[index]; }
  // Another rank, of the workers that are there.
  std::shared_ptr<RemoteClient> NewClient(
      worker::WireDtype dtype = worker::WireDtype::kFloat32) const {
    auto client = Must(RemoteClient::Create(static_cast<uint32_t>(ports_.size()), dtype));
    for (uint32_t i = 0; i < ports_.size(); ++i) {
      EXPECT_TRUE(client->SetWorker(i, Loopback(ports_[i])).ok());
    }
    return client;
  }
  // As a loader does it over NATS.
  BatchReference Register(std::span<const std::byte> batch, uint32_t worker_index = 0) {
    return {Must(workers_[worker_index]->Register(0, batch)), worker_index};
  }

 private:
  const Pools pools_;
  const uint64_t cache_rows_;
  std::shared_ptr<worker::RemoteRows> rows_;
  std::vector<std::unique_ptr<server::ParameterServer>> servers_;
  std::vector<std::shared_ptr<worker::EmbeddingWorker>> workers_;
  std::vector<std::unique_ptr<worker::WorkerService>> services_;
  std::vector<uint16_t> ports_;  // of the services
  std::shared_ptr<RemoteClient> client_;
};

}  // namespace persia::client::testing
