// What a class with a store tells and does about its tier: the pool beneath its rows.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "pool/row_pool.h"
#include "store/embedding_store.h"

namespace persia::bindings {

// Raises InvalidArgumentError for anything but "file" and "pmem".
pool::PoolKind PoolKindOf(const std::string& kind);

// All of them raise, and release the GIL.
pybind11::object TierStats(const store::EmbeddingStore& store);
uint64_t RequestCheckpoint(store::EmbeddingStore& store);
pybind11::object PreparedCheckpoint(const store::EmbeddingStore& store, uint64_t number);
void CommitCheckpoint(store::EmbeddingStore& store, uint64_t number);
void DropCheckpoint(store::EmbeddingStore& store, uint64_t number);

// `store_of(self)` returns the EmbeddingStore of an object of the class.
template <typename Class, typename StoreOf>
void DefineTier(Class& bound, StoreOf store_of) {
  namespace py = pybind11;
  using Self = typename Class::type;
  bound.def("tier_stats", [store_of](Self& self) { return TierStats(store_of(self)); })
      .def("request_checkpoint",
           [store_of](Self& self) { return RequestCheckpoint(store_of(self)); })
      .def(
          "prepared_checkpoint",
          [store_of](Self& self, uint64_t number) {
            return PreparedCheckpoint(store_of(self), number);
          },
          py::arg("number"))
      .def(
          "commit_checkpoint",
          [store_of](Self& self, uint64_t number) { CommitCheckpoint(store_of(self), number); },
          py::arg("number"))
      .def(
          "drop_checkpoint",
          [store_of](Self& self, uint64_t number) { DropCheckpoint(store_of(self), number); },
          py::arg("number"));
}

}  // namespace persia::bindings
