// persia._core: registration only. The Python side of the contract is persia/_core.pyi.
#include "bindings/module.h"

#include "simd/kernels.h"

PYBIND11_MODULE(_core, module) {
  using namespace persia::bindings;  // NOLINT: the functions of module.h
  module.doc() = "The native engine of persia; import persia._native instead.";
  // The package compares it with its own, and so finds a module of another build.
  module.attr("__version__") = PERSIA_VERSION;
  module.attr("simd_level") = persia::simd::ActiveKernels().name;
  BindSlotConfig(module);
  BindTrainConfig(module);
  BindCheckpoint(module);
  BindIdFeatures(module);
  BindSamples(module);
  BindLookupResult(module);
  BindPool(module);
  BindStore(module);
  BindParameterServer(module);
  BindEmbeddingWorker(module);
  BindClient(module);
  BindEmbeddingBags(module);
  BindMetrics(module);
  BindSecurity(module);
  BindServing(module);
}
