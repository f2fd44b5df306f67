// The C interface of the simulation, for benchmarks/simulation: real parameter servers, embedding
// workers and clients, each in a process of the World.
//
// What may wait is begun on a fiber and gets a number; Run() tells which have ended. Objects of
// processes that end are never freed: the caller ends after few seeds.
#include "cluster.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "base/id_features.h"
#include "client/remote_client.h"
#include "server/parameter_server.h"
#include "wire.h"
#include "worker/row_service.h"
#include "worker/worker_service.h"

namespace persia::simulation {

void Reset(uint64_t seed);

namespace {

using client::LookupResult;
using client::RemoteClient;
using server::OperationLog;
using server::ParameterServer;
using server::StandbyLink;

struct WorkerRole {
  std::shared_ptr<worker::RemoteRows> rows;
  std::shared_ptr<worker::EmbeddingWorker> engine;
  std::unique_ptr<worker::WorkerService> service;
};

// A batch at its rank: what was looked up, and the gradients that follow from it.
struct Batch {
  LookupResult result;
  std::vector<std::vector<float>> rows;
  std::vector<worker::SlotGradient> gradients;
};

struct Ended {
  int64_t call = 0;
  int32_t code = 0;
  int64_t number = 0;
  std::string text;
};

std::deque<Ended> ended;
int64_t num_calls = 0;

worker::Deadline In(double seconds) {
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                std::chrono::duration<double>(seconds));
}

// Pooled, raw and hashed.
worker::WorkerOptions Slots(uint64_t max_waiting) {
  worker::WorkerOptions options;
  options.slots = {
      {.name = "age", .dim = 4, .group = 0},
      {.name = "items", .dim = 3, .embedding_summation = false, .sample_fixed_size = 3, .group = 1},
      {.name = "urls", .dim = 2, .hash_stack_rounds = 2, .hash_stack_size = 20, .group = 2},
  };
  options.forward_buffer_size = max_waiting;
  return options;
}

// Adam, whose result depends on every step before and on their order.
TrainConfig Adam() {
  TrainConfig config;
  config.initializer.seed = 7;
  config.optimizer.kind = OptimizerKind::kAdam;
  config.optimizer.lr = 0.05f;
  return config;
}

constexpr uint64_t kNumIds = 40;

// Gradients depend on the embeddings, so that a difference in a step grows in the next.
std::unique_ptr<Batch> MakeBatch(LookupResult result) {
  auto batch = std::make_unique<Batch>(Batch{std::move(result), {}, {}});
  for (const worker::SlotEmbedding& slot : batch->result.slots) {
    auto& values =
        batch->rows.emplace_back(slot.rows, slot.rows + size_t{slot.num_rows} * slot.dim);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = 3.0f * values[i] + 0.01f * static_cast<float>(i % 7);
    }
  }
  for (size_t i = 0; i < batch->rows.size(); ++i) {
    const worker::SlotEmbedding& slot = batch->result.slots[i];
    batch->gradients.push_back({.slot = slot.name,
                                .num_rows = slot.num_rows,
                                .dim = slot.dim,
                                .rows = batch->rows[i].data()});
  }
  return batch;
}

uint64_t Mix(uint64_t hash, const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < num_bytes; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

}  // namespace

int64_t Begin(int process, std::function<StatusOr<int64_t>()> run) {
  const int64_t call = ++num_calls;
  World::Get().Spawn(process, [call, run = std::move(run)] {
    const StatusOr<int64_t> result = run();
    ended.push_back({call, static_cast<int32_t>(result.code()), result.ok() ? result.value() : 0,
                     result.ok() ? "" : std::string(result.status().message())});
  });
  return call;
}

}  // namespace persia::simulation

using namespace persia;
using namespace persia::simulation;

API void sim_reset(uint64_t seed) {
  ended.clear();
  num_calls = 0;
  Reset(seed);
  ResetWire();
}

// Where the time is, to be read and advanced there: until the next reset.
API int64_t* sim_clock() { return World::Get().clock(); }
// Before this time, sim_run() has nothing to do.
API int64_t* sim_next() { return World::Get().next(); }

// Runs until a call has ended or nothing happens before `limit`; returns how many have ended. -1:
// there were `max_steps` in all, since the reset.
API int64_t sim_run(int64_t limit, uint64_t max_steps) {
  World& world = World::Get();
  while (ended.empty() && world.NextTime() <= limit) {
    if (world.num_steps() >= max_steps) return -1;
    world.Step();
  }
  world.NoteNext();
  return static_cast<int64_t>(ended.size());
}

API int64_t sim_take_ended(int32_t* code, int64_t* number, char* text, int64_t max_text) {
  const Ended one = std::move(ended.front());
  ended.pop_front();
  *code = one.code;
  *number = one.number;
  std::strncpy(text, one.text.c_str(), static_cast<size_t>(max_text) - 1);
  text[max_text - 1] = 0;
  return one.call;
}

API int32_t sim_process(int32_t host) { return World::Get().AddProcess(host); }
API void sim_freeze(int32_t process, int32_t is_frozen) {
  World::Get().Freeze(process, is_frozen != 0);
}
API void sim_kill(int32_t process) {
  World::Get().Kill(process);
  Wire::Get().OnKilled(process);
}
API void sim_cut(int32_t host, int32_t other, int32_t is_cut) {
  Wire::Get().Cut(host, other, is_cut != 0);
}
API int32_t sim_listens(const char* address) { return Wire::Get().listeners.contains(address); }
API void sim_weather(int64_t max_latency, double spikes, double breaks) {
  Weather& weather = Wire::Get().weather;
  weather.max_latency = max_latency;
  weather.spikes = spikes;
  weather.breaks = breaks;
}
API const char* sim_violation() { return Wire::Get().violation.c_str(); }

// ---- parameter servers

API ParameterServer* sim_server(int32_t process, uint32_t index, uint32_t replicas,
                                int64_t deadline_ms, int32_t is_standby) {
  World& world = World::Get();
  world.EnterProcess(process);
  ParameterServer::Options options;
  options.replica_index = index;
  options.replica_size = replicas;
  options.store.capacity = 100'000;
  options.store.num_internal_shards = 2;
  options.rpc.num_handler_threads = 8;
  options.standby_deadline = std::chrono::milliseconds(deadline_ms);
  options.is_standby = is_standby != 0;
  auto server = ParameterServer::Create(options);
  if (!server.ok()) return nullptr;
  ParameterServer* made = server.value().release();
  world.Watch(made, sizeof(*made));
  world.Watch(made->standby(), sizeof(*made->standby()));
  if (made->log() != nullptr) world.Watch(made->log(), sizeof(*made->log()));
  Wire::Get().servers[process] = {static_cast<int>(index), made->incarnation()};
  return made;
}
API uint64_t sim_server_incarnation(ParameterServer* server) { return server->incarnation(); }
API int32_t sim_server_state(ParameterServer* server) {
  return static_cast<int32_t>(server->standby()->state());
}
API int32_t sim_server_serves(ParameterServer* server) {
  return server->standby()->CheckServes().ok();
}
API int32_t sim_server_is_copying(ParameterServer* server) {
  return server->standby()->is_copying();
}
API int32_t sim_log_state(ParameterServer* server) {
  return server->log() == nullptr ? -1 : static_cast<int32_t>(server->log()->state());
}
API int32_t sim_log_has_copy(ParameterServer* server) { return server->log()->has_copy(); }
API double sim_log_silent_for(ParameterServer* server) {
  return server->log()->silent_for().count();
}
API uint64_t sim_server_count(ParameterServer* server, const char* name) {
  return server->metrics()[name];
}

API int64_t sim_server_start(int32_t process, ParameterServer* server, const char* host) {
  return Begin(process, [server, host = std::string(host)]() -> StatusOr<int64_t> {
    PERSIA_ASSIGN_OR_RETURN(const uint16_t port, server->Start(host));
    return int64_t{port};
  });
}
API int64_t sim_server_stop(int32_t process, ParameterServer* server) {
  return Begin(process, [server] {
    server->Stop(std::chrono::seconds(10));
    return StatusOr<int64_t>(0);
  });
}
API int64_t sim_server_attach(int32_t process, ParameterServer* server, const char* address,
                              uint64_t incarnation) {
  return Begin(process, [server, address = std::string(address), incarnation] {
    return Done(server->standby()->Attach(address, incarnation));
  });
}
API int64_t sim_server_release(int32_t process, ParameterServer* server) {
  return Begin(process, [server] {
    server->standby()->Release();
    return StatusOr<int64_t>(0);
  });
}
API int64_t sim_server_fence(int32_t process, ParameterServer* server, const char* reason) {
  return Begin(process, [server, reason = std::string(reason)] {
    server->standby()->Fence(reason);
    return StatusOr<int64_t>(0);
  });
}
API int64_t sim_log_follow(int32_t process, ParameterServer* server, uint64_t primary) {
  return Begin(process, [server, primary] {
    server->log()->Follow(primary);
    return StatusOr<int64_t>(0);
  });
}
API int64_t sim_log_take_over(int32_t process, ParameterServer* server, int32_t has_ended) {
  return Begin(process, [server, has_ended] { return Done(server->TakeOver(has_ended != 0)); });
}
API int64_t sim_log_renounce(int32_t process, ParameterServer* server) {
  return Begin(process, [server] { return StatusOr<int64_t>(server->log()->Renounce() ? 1 : 0); });
}

// A digest of all rows of a server that is not changed meanwhile.
API int64_t sim_server_digest(int32_t process, ParameterServer* server) {
  return Begin(process, [server]() -> StatusOr<int64_t> {
    uint64_t hash = 0xcbf29ce484222325u;
    const std::vector<worker::SlotConfig> slots = Slots(1).slots;
    for (const worker::SlotConfig& slot : slots) {
      std::vector<uint64_t> signs(kNumIds + 1);
      for (uint64_t id = 0; id < signs.size(); ++id) {
        signs[id] = id + (uint64_t{slot.group + 1} << 56);
      }
      const std::vector<SignBlock> blocks = {{slot.dim, static_cast<uint32_t>(signs.size())}};
      PERSIA_ASSIGN_OR_RETURN(const ServerRows rows, server->Lookup({false, {blocks, signs}}));
      hash = Mix(hash, rows.rows.data(), rows.rows.size_bytes());
    }
    return static_cast<int64_t>(hash);
  });
}

// ---- embedding workers

API WorkerRole* sim_worker(int32_t process, uint32_t num_servers, uint64_t max_waiting) {
  World& world = World::Get();
  world.EnterProcess(process);
  auto* role = new WorkerRole;
  role->rows = std::make_shared<worker::RemoteRows>(num_servers);
  auto engine = worker::EmbeddingWorker::Create(Slots(max_waiting), role->rows);
  if (!engine.ok()) return nullptr;
  role->engine = std::move(engine).value();
  world.Watch(role->engine.get(), sizeof(*role->engine));
  role->service = std::make_unique<worker::WorkerService>(
      role->engine, net::ServerOptions{.num_handler_threads = 4});
  return role;
}
API uint64_t sim_worker_incarnation(WorkerRole* role) { return role->engine->incarnation(); }
API uint64_t sim_worker_count(WorkerRole* role, const char* name) {
  return role->engine->metrics()[name];
}
API void sim_worker_set_server(WorkerRole* role, uint32_t index, const char* address) {
  (void)role->rows->SetServer(index, address);
}
API int64_t sim_worker_start(int32_t process, WorkerRole* role, const char* host) {
  return Begin(process, [role, host = std::string(host)]() -> StatusOr<int64_t> {
    PERSIA_ASSIGN_OR_RETURN(const uint16_t port, role->service->Start(host));
    return int64_t{port};
  });
}
API int64_t sim_worker_register(int32_t process, WorkerRole* role, uint32_t loader, const char* ids,
                                int64_t num_bytes) {
  return Begin(process,
               [role, loader,
                bytes = std::string(ids, static_cast<size_t>(num_bytes))]() -> StatusOr<int64_t> {
                 const auto view = std::as_bytes(std::span(bytes.data(), bytes.size()));
                 PERSIA_ASSIGN_OR_RETURN(const BatchKey key, role->engine->Register(loader, view));
                 return static_cast<int64_t>(key.reference);
               });
}
API int64_t sim_worker_release_waiting(int32_t process, WorkerRole* role) {
  return Begin(process, [role] {
    return StatusOr<int64_t>(static_cast<int64_t>(role->engine->ReleaseWaiting()));
  });
}

// ---- clients

// ID features of batch `number`: a function of the number alone. Returns their size.
API int64_t sim_id_features(uint32_t number, char* bytes, int64_t max_bytes) {
  const std::vector<std::string> names = {"age", "items", "urls"};
  constexpr uint32_t kSamples = 4;
  std::vector<std::vector<uint32_t>> offsets(names.size(), {0});
  std::vector<std::vector<uint64_t>> ids(names.size());
  uint64_t state = number + 1;
  for (size_t f = 0; f < names.size(); ++f) {
    for (uint32_t sample = 0; sample < kSamples; ++sample) {
      const uint32_t num_ids = (sample + number + static_cast<uint32_t>(f)) % 4;
      for (uint32_t i = 0; i < num_ids; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids[f].push_back((state >> 33) % kNumIds);
      }
      offsets[f].push_back(static_cast<uint32_t>(ids[f].size()));
    }
  }
  IdFeatures batch{kSamples, {}};
  for (size_t f = 0; f < names.size(); ++f) {
    batch.features.push_back({names[f], offsets[f], ids[f]});
  }
  auto encoded = EncodeIdFeatures(batch);
  if (!encoded.ok() || encoded->size() > static_cast<size_t>(max_bytes)) return -1;
  std::memcpy(bytes, encoded->data(), encoded->size());
  return static_cast<int64_t>(encoded->size());
}

API RemoteClient* sim_client(int32_t process, uint32_t num_workers) {
  World::Get().EnterProcess(process);
  auto client = RemoteClient::Create(num_workers);
  if (!client.ok()) return nullptr;
  return (new std::shared_ptr<RemoteClient>(std::move(client).value()))->get();
}
// `action`: 0 the worker's address, 1 it has left, 2 it has died.
API int64_t sim_client_worker(int32_t process, RemoteClient* client, uint32_t index, int32_t action,
                              const char* address) {
  return Begin(process, [client, index, action, address = std::string(address)] {
    if (action == 0) return Done(client->SetWorker(index, address));
    if (action == 1) client->RetireWorker(index);
    if (action == 2) client->DropWorker(index);
    return StatusOr<int64_t>(0);
  });
}
API int64_t sim_client_configure(int32_t process, RemoteClient* client, double timeout_s) {
  return Begin(process, [client, timeout_s] {
    return Done(client->Configure(Adam(), false, In(timeout_s)));
  });
}
API int64_t sim_client_lookup(int32_t process, RemoteClient* client, uint32_t worker,
                              uint64_t incarnation, uint64_t reference, double timeout_s) {
  return Begin(process, [=]() -> StatusOr<int64_t> {
    const client::BatchReference batch{{incarnation, reference}, worker};
    PERSIA_ASSIGN_OR_RETURN(LookupResult result, client->Lookup(batch, true, In(timeout_s)));
    return reinterpret_cast<int64_t>(MakeBatch(std::move(result)).release());
  });
}
API int64_t sim_client_lookup_direct(int32_t process, RemoteClient* client, uint32_t worker,
                                     const char* ids, int64_t num_bytes, uint32_t original_worker,
                                     uint64_t original_incarnation, uint64_t original,
                                     double timeout_s) {
  return Begin(
      process,
      [=, bytes = std::string(ids, static_cast<size_t>(num_bytes))]() -> StatusOr<int64_t> {
        const client::BatchReference first{{original_incarnation, original}, original_worker};
        const auto view = std::as_bytes(std::span(bytes.data(), bytes.size()));
        PERSIA_ASSIGN_OR_RETURN(
            LookupResult result,
            client->LookupDirect(worker, view, true, In(timeout_s), client::kAllSlots, first));
        return reinterpret_cast<int64_t>(MakeBatch(std::move(result)).release());
      });
}
API void sim_batch(Batch* batch, uint32_t* worker, uint64_t* incarnation, uint64_t* reference) {
  *worker = batch->result.reference.worker_index;
  *incarnation = batch->result.reference.worker_incarnation;
  *reference = batch->result.reference.reference;
}
API int64_t sim_client_return(int32_t process, RemoteClient* client, Batch* batch, uint32_t worker,
                              uint64_t incarnation, uint64_t reference, double timeout_s) {
  return Begin(process, [=] {
    const client::BatchReference at{{incarnation, reference}, worker};
    return Done(client->ReturnGradients(at, 1.0f, batch->gradients, In(timeout_s)).status());
  });
}
API int64_t sim_client_release(int32_t process, RemoteClient* client, uint32_t worker,
                               uint64_t incarnation, uint64_t reference, double timeout_s) {
  return Begin(process, [=] {
    return Done(client->Release({{incarnation, reference}, worker}, In(timeout_s)));
  });
}
// A read: how many rows the servers have.
API int64_t sim_client_count_rows(int32_t process, RemoteClient* client, double timeout_s) {
  return Begin(process, [=]() -> StatusOr<int64_t> {
    PERSIA_ASSIGN_OR_RETURN(const auto sizes, client->Sizes(In(timeout_s)));
    return static_cast<int64_t>(sizes.at(0));
  });
}
