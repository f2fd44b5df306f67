// Pools of rows for Python: persia.pmem.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/errors.h"
#include "bindings/module.h"
#include "pool/pmem_backing.h"
#include "pool/pool_tools.h"
#include "pool/row_pool.h"
#include "store/embedding_store.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;
using pool::PoolInfo;
using pool::PoolKind;
using pool::PoolOptions;
using pool::RecoveredRow;
using pool::RowPool;
using store::TierOptions;

// Checked here and not in the engine, which has the enum.
PoolKind ParsePoolKind(const std::string& kind) {
  if (kind == "file") return PoolKind::kFile;
  if (kind != "pmem") {
    RaiseIfError(InvalidArgument("kind is '", kind, "'; give 'file' or 'pmem'"));
  }
  return PoolKind::kPmem;
}

// Exactly one of the two cache sizes is given; the store refuses anything else.
TierOptions MakeTierOptions(const std::string& directory, const std::string& kind,
                            uint64_t size_bytes, uint64_t cache_rows, uint64_t cache_bytes,
                            bool syncs, uint32_t num_threads) {
  return {.directory = directory,
          .pool = {.kind = ParsePoolKind(kind),
                   .size_bytes = size_bytes,
                   .syncs = syncs,
                   .num_threads = num_threads},
          .cache_rows = cache_rows,
          .cache_bytes = cache_bytes};
}

py::dict DictOf(const PoolInfo& info) {
  return py::dict("pool_id"_a = info.pool_id, "committed"_a = info.committed,
                  "num_rows"_a = info.num_rows, "file_bytes"_a = info.file_bytes,
                  "size_bytes"_a = info.size_bytes, "extent_bytes"_a = info.extent_bytes,
                  "schema"_a = info.schema);
}

// An open pool and where its rows are. Read-only: rows come in through a store.
class OpenPool {
 public:
  // Recovery visits every row, on two threads; none of them needs the GIL.
  static std::unique_ptr<OpenPool> Open(const std::string& directory, const std::string& kind) {
    const PoolOptions options{.kind = ParsePoolKind(kind), .num_threads = 2};
    auto open = std::make_unique<OpenPool>();
    open->pool_ = ValueOrRaise(
        WithoutGil([&] { return RowPool::Open(directory, options, open->Visitor()); }));
    return open;
  }

  uint64_t committed() const { return Get().committed(); }
  uint64_t num_rows() const { return rows_.size(); }

  // Sorted, so that two listings of a pool can be compared.
  py::array_t<uint64_t> Signs() const {
    std::vector<uint64_t> signs;
    signs.reserve(rows_.size());
    for (const auto& [sign, row] : rows_) signs.push_back(sign);
    std::sort(signs.begin(), signs.end());
    return py::array_t<uint64_t>(static_cast<py::ssize_t>(signs.size()), signs.data());
  }

  // Embedding and state as two views of one array. The row is read from the device now; rows_ knows
  // only where it is.
  py::tuple Row(uint64_t sign) const {
    const RowPool& pool = Get();
    const auto it = rows_.find(sign);
    if (it == rows_.end()) RaiseIfError(NotFound("no row of sign ", sign));
    const size_t dim = it->second.head.dim;
    py::array_t<float> values(static_cast<py::ssize_t>(it->second.head.num_floats()));
    pool::RowHead head;
    RaiseIfError(pool.Read(it->second.address, sign, &head,
                           std::span(values.mutable_data(), static_cast<size_t>(values.size()))));
    const auto end_of_embedding = static_cast<py::ssize_t>(dim);
    return py::make_tuple(values[py::slice(0, end_of_embedding, 1)],
                          values[py::slice(end_of_embedding, values.size(), 1)], head.scalar,
                          head.version);
  }

  void Close() { pool_.reset(); }

 private:
  // Called by several threads of the recovery at once.
  pool::VisitRows Visitor() {
    return [this](std::span<const RecoveredRow> rows) {
      std::lock_guard lock(mutex_);
      for (const RecoveredRow& row : rows) rows_[row.head.sign] = row;
    };
  }
  const RowPool& Get() const {
    if (pool_ == nullptr) RaiseIfError(FailedPrecondition("the pool is closed; open it again"));
    return *pool_;
  }

  std::mutex mutex_;
  std::unordered_map<uint64_t, RecoveredRow> rows_;
  std::unique_ptr<RowPool> pool_;
};

// Fails where there is a pool already: nothing is ever replaced here.
void CreatePool(const std::string& directory, uint64_t size_bytes, const std::string& kind,
                const std::string& schema, uint64_t extent_bytes) {
  const PoolOptions options{.kind = ParsePoolKind(kind),
                            .size_bytes = size_bytes,
                            .extent_bytes = extent_bytes,
                            .schema = schema};
  RaiseIfError(WithoutGil([&] { return RowPool::Create(directory, options).status(); }));
}

py::dict InspectPool(const std::string& directory) {
  return DictOf(ValueOrRaise(WithoutGil([&] { return pool::InspectPool(directory); })));
}

py::dict CheckPool(const std::string& directory) {
  const auto report = ValueOrRaise(WithoutGil([&] { return pool::CheckPool(directory); }));
  py::dict dict = DictOf(report.info);
  dict["num_living"] = report.num_living;
  dict["num_ended"] = report.num_ended;
  dict["num_free"] = report.num_free;
  dict["num_repeated"] = report.num_repeated;
  dict["num_unassigned_extents"] = report.num_unassigned_extents;
  return dict;
}

void GrowPool(const std::string& directory, uint64_t size_bytes) {
  RaiseIfError(WithoutGil([&] { return pool::GrowPool(directory, size_bytes); }));
}

// For `persia-launcher`, which puts a pool back to a checkpoint that its servers had only prepared.
void CommitPool(const std::string& directory, uint64_t batch, uint64_t num_rows, uint64_t pool_id,
                uint64_t sequence) {
  const pool::PreparedCheckpoint checkpoint{batch, num_rows, pool_id, sequence};
  RaiseIfError(WithoutGil([&] { return pool::CommitPool(directory, checkpoint); }));
}

}  // namespace

void BindPool(py::module_& module) {
  py::class_<TierOptions>(module, "TierOptions")
      .def(py::init(&MakeTierOptions), py::kw_only(), py::arg("directory"), py::arg("kind"),
           py::arg("size_bytes"), py::arg("cache_rows") = 0, py::arg("cache_bytes") = 0,
           py::arg("syncs") = true, py::arg("num_threads") = 1);
  module.attr("HAS_PMEM") = pool::HasPmem();
  module.def("create_pool", &CreatePool, py::arg("directory"), py::arg("size_bytes"),
             py::arg("kind"), py::arg("schema"), py::arg("extent_bytes"));
  module.def("inspect_pool", &InspectPool, py::arg("directory"));
  module.def("check_pool", &CheckPool, py::arg("directory"));
  module.def("grow_pool", &GrowPool, py::arg("directory"), py::arg("size_bytes"));
  module.def("commit_pool", &CommitPool, py::arg("directory"), py::kw_only(), py::arg("batch"),
             py::arg("num_rows"), py::arg("pool_id"), py::arg("sequence"));
  py::class_<OpenPool>(module, "OpenPool")
      .def(py::init(&OpenPool::Open), py::arg("directory"), py::arg("kind"))
      .def_property_readonly("committed", &OpenPool::committed)
      .def_property_readonly("num_rows", &OpenPool::num_rows)
      .def("signs", &OpenPool::Signs)
      .def("row", &OpenPool::Row, py::arg("sign"))
      .def("close", &OpenPool::Close);
}

}  // namespace persia::bindings
