// EmbeddingStore as Python sees it: one class for the rows of a parameter server, an embedded
// client and embedding bags, which show it as `store`.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>

#include "checkpoint/snapshot.h"
#include "store/embedding_store.h"

namespace persia::bindings {

// A store and its place in the cluster, which a server may learn only with its rows. The object
// that owns the store must outlive it, which DefineStore sees to.
struct BoundStore {
  store::EmbeddingStore& store;
  std::function<checkpoint::Replica()> replica = [] { return checkpoint::Replica(); };
};

// Adds the property `store` to a class; `store_of(self)` returns its BoundStore.
template <typename Class, typename StoreOf>
void DefineStore(Class& bound, StoreOf store_of) {
  namespace py = pybind11;
  bound.def_property_readonly("store", py::cpp_function(store_of, py::keep_alive<0, 1>()));
}

}  // namespace persia::bindings
