// The parts that module.cc puts together. Classes that appear in signatures of others are
// registered before them.
#pragma once

#include <pybind11/pybind11.h>

namespace persia::bindings {

void BindSlotConfig(pybind11::module_& module);
void BindTrainConfig(pybind11::module_& module);
void BindCheckpoint(pybind11::module_& module);
void BindIdFeatures(pybind11::module_& module);
void BindSamples(pybind11::module_& module);
void BindLookupResult(pybind11::module_& module);
void BindPool(pybind11::module_& module);
void BindStore(pybind11::module_& module);
void BindParameterServer(pybind11::module_& module);
void BindEmbeddingWorker(pybind11::module_& module);
void BindClient(pybind11::module_& module);
void BindEmbeddingBags(pybind11::module_& module);
void BindMetrics(pybind11::module_& module);
void BindSecurity(pybind11::module_& module);
void BindServing(pybind11::module_& module);

}  // namespace persia::bindings
