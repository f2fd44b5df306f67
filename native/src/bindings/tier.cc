#include "bindings/tier.h"

#include <string>

#include "bindings/errors.h"
#include "bindings/module.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using store::EmbeddingStore;
using store::TierOptions;

TierOptions MakeTierOptions(const std::string& directory, const std::string& kind,
                            uint64_t size_bytes, uint64_t cache_rows, uint64_t cache_bytes,
                            bool syncs, uint32_t num_threads) {
  TierOptions options;
  options.directory = directory;
  options.pool.kind = PoolKindOf(kind);
  options.pool.size_bytes = size_bytes;
  options.pool.syncs = syncs;
  options.pool.num_threads = num_threads;
  options.cache_rows = cache_rows;
  options.cache_bytes = cache_bytes;
  return options;
}

py::dict DictOf(const pool::PreparedCheckpoint& checkpoint) {
  py::dict dict;
  dict["batch"] = checkpoint.batch;
  dict["num_rows"] = checkpoint.num_rows;
  dict["pool_id"] = checkpoint.pool_id;
  dict["sequence"] = checkpoint.sequence;
  return dict;
}

}  // namespace

pool::PoolKind PoolKindOf(const std::string& kind) {
  if (kind == "file") return pool::PoolKind::kFile;
  if (kind != "pmem") {
    RaiseIfError(InvalidArgument("kind is '" + kind + "'; give 'file' or 'pmem'"));
  }
  return pool::PoolKind::kPmem;
}

py::object TierStats(const EmbeddingStore& store) {
  const auto stats = WithoutGil([&] { return store.tier_stats(); });
  if (!stats) return py::none();
  py::dict dict;
  dict["num_rows"] = stats->num_rows;
  dict["num_hot"] = stats->num_hot;
  dict["memory_bytes"] = stats->memory_bytes;
  dict["num_hits"] = stats->num_hits;
  dict["num_misses"] = stats->num_misses;
  dict["num_promoted"] = stats->num_promoted;
  dict["num_demoted"] = stats->num_demoted;
  dict["num_written"] = stats->num_written;
  dict["batch"] = stats->batch;
  dict["pool_bytes"] = stats->pool.size_bytes;
  dict["pool_max_bytes"] = stats->pool.max_bytes;
  dict["pool_used_bytes"] = stats->pool.used_bytes;
  dict["num_kept"] = stats->pool.num_kept;
  dict["committed"] = stats->pool.committed;
  dict["num_pending"] = stats->pool.num_pending;
  dict["num_prefetched"] = stats->num_prefetched;
  dict["num_unheeded"] = stats->num_unheeded;
  return dict;
}

uint64_t RequestCheckpoint(EmbeddingStore& store) {
  return ValueOrRaise(WithoutGil([&] { return store.RequestCheckpoint(/*held=*/true); }));
}

py::object PreparedCheckpoint(const EmbeddingStore& store, uint64_t number) {
  const auto prepared = ValueOrRaise(WithoutGil([&] { return store.PreparedCheckpoint(number); }));
  return prepared ? py::object(DictOf(*prepared)) : py::object(py::none());
}

void CommitCheckpoint(EmbeddingStore& store, uint64_t number) {
  RaiseIfError(WithoutGil([&] { return store.CommitCheckpoint(number); }));
}

void DropCheckpoint(EmbeddingStore& store, uint64_t number) {
  RaiseIfError(WithoutGil([&] { return store.DropCheckpoint(number); }));
}

void BindTier(py::module_& module) {
  py::class_<TierOptions>(module, "TierOptions")
      .def(py::init(&MakeTierOptions), py::kw_only(), py::arg("directory"), py::arg("kind"),
           py::arg("size_bytes"), py::arg("cache_rows") = 0, py::arg("cache_bytes") = 0,
           py::arg("syncs") = true, py::arg("num_threads") = 1);
}

}  // namespace persia::bindings
