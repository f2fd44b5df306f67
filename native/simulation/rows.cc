// The C interface of the simulation to snapshots and loads of a server's rows, as src/bindings/ has
// it for Python.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "checkpoint/loader.h"
#include "checkpoint/snapshot.h"
#include "cluster.h"
#include "server/parameter_server.h"

using namespace persia;
using namespace persia::simulation;
using checkpoint::Loader;
using checkpoint::Snapshot;
using server::ParameterServer;

namespace {

// Their number, then they: of malloc.
int64_t CopyOf(const std::string& bytes) {
  const uint64_t size = bytes.size();
  auto* copy = static_cast<char*>(std::malloc(sizeof(size) + size));
  std::memcpy(copy, &size, sizeof(size));
  std::memcpy(copy + sizeof(size), bytes.data(), size);
  return reinterpret_cast<int64_t>(copy);
}

std::span<const std::byte> BytesOf(const std::string& bytes) {
  return std::as_bytes(std::span(bytes.data(), bytes.size()));
}

}  // namespace

API void sim_free(void* bytes) { std::free(bytes); }

API int64_t sim_snapshot(int32_t process, ParameterServer* server, uint32_t num_parts,
                         uint32_t index, uint32_t replicas) {
  return Begin(process, [=]() -> StatusOr<int64_t> {
    const Snapshot::Options options{.num_parts = num_parts, .replica = {index, replicas}};
    PERSIA_ASSIGN_OR_RETURN(auto snapshot, Snapshot::Begin(server->embedding_store(), options));
    return reinterpret_cast<int64_t>(snapshot.release());
  });
}
API uint64_t sim_snapshot_num_rows(Snapshot* snapshot) { return snapshot->num_rows(); }
API uint64_t sim_snapshot_step(Snapshot* snapshot) { return snapshot->step(); }
// Null: the store had none.
API int64_t sim_snapshot_config(Snapshot* snapshot) {
  if (!snapshot->config().has_value()) return 0;
  const std::vector<std::byte> config = snapshot->config()->Encode();
  return CopyOf({reinterpret_cast<const char*>(config.data()), config.size()});
}
API uint64_t sim_snapshot_part_rows(Snapshot* snapshot, uint32_t part) {
  return snapshot->part(part).value()->num_rows();
}
API int64_t sim_snapshot_read(int32_t process, Snapshot* snapshot, uint32_t part,
                              uint64_t max_bytes) {
  return Begin(process, [=]() -> StatusOr<int64_t> {
    std::string bytes;
    PERSIA_RETURN_IF_ERROR(snapshot->part(part).value()->Read(max_bytes, [&](size_t count) {
      bytes.resize(count);
      return reinterpret_cast<std::byte*>(bytes.data());
    }));
    return CopyOf(bytes);
  });
}
API int64_t sim_snapshot_close(int32_t process, Snapshot* snapshot) {
  return Begin(process, [snapshot] {
    snapshot->Close();
    return StatusOr<int64_t>(0);
  });
}

API int64_t sim_loader(int32_t process, ParameterServer* server, const char* config,
                       int64_t num_bytes, int32_t with_state, int32_t fresh_state, uint32_t index,
                       uint32_t replicas) {
  return Begin(
      process,
      [=, bytes = std::string(config, static_cast<size_t>(num_bytes))]() -> StatusOr<int64_t> {
        Loader::Options options{.with_state = with_state != 0,
                                .fresh_state = fresh_state != 0,
                                .replica = {index, replicas}};
        PERSIA_ASSIGN_OR_RETURN(options.config, TrainConfig::Decode(BytesOf(bytes)));
        PERSIA_ASSIGN_OR_RETURN(auto loader, Loader::Begin(server->embedding_store(), options));
        return reinterpret_cast<int64_t>(loader.release());
      });
}
API uint64_t sim_loader_num_rows(Loader* loader) { return loader->num_rows(); }
API uint64_t sim_loader_num_evicted(Loader* loader) { return loader->num_evicted(); }
API int64_t sim_loader_chunk(int32_t process, Loader* loader, const char* chunk, int64_t num_bytes,
                             int32_t is_added) {
  return Begin(
      process,
      [=, bytes = std::string(chunk, static_cast<size_t>(num_bytes))]() -> StatusOr<int64_t> {
        PERSIA_ASSIGN_OR_RETURN(const uint64_t count, is_added != 0
                                                          ? loader->Add(BytesOf(bytes))
                                                          : loader->Verify(BytesOf(bytes)));
        return static_cast<int64_t>(count);
      });
}
API int64_t sim_loader_replace(int32_t process, Loader* loader) {
  return Begin(process, [loader] { return Done(loader->Replace()); });
}
API int64_t sim_loader_commit(int32_t process, Loader* loader) {
  return Begin(process, [loader] {
    loader->Commit();
    return StatusOr<int64_t>(0);
  });
}
// Releases the store.
API int64_t sim_loader_end(int32_t process, Loader* loader) {
  return Begin(process, [loader] {
    delete loader;
    return StatusOr<int64_t>(0);
  });
}
