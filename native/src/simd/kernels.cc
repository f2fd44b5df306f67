#include "simd/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace persia::simd {

extern const Kernels kScalarKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

#if defined(__x86_64__)
namespace {

// Clang 14 does not take "f16c" as an argument of __builtin_cpu_supports. That the
// operating system saves the registers is part of what is asked about AVX2.
bool HasF16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace
#endif

// Null: this processor, or this build, lacks it. Every set of kernels gives the same bits (ADR 3),
// so the choice is one of speed alone.
const Kernels* KernelsFor(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return &kScalarKernels;
#if defined(__x86_64__)
    case Isa::kAvx2: {
      return __builtin_cpu_supports("avx2") && HasF16c() ? &kAvx2Kernels : nullptr;
    }
    case Isa::kAvx512: {
      const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
      return has ? &kAvx512Kernels : nullptr;
    }
#elif defined(__aarch64__)
    case Isa::kNeon: return &kNeonKernels;
#endif
    default: return nullptr;
  }
}

const Kernels& ChooseKernels(const char* wanted) {
  const Kernels* fastest = nullptr;
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kNeon, Isa::kScalar}) {
    const Kernels* kernels = KernelsFor(isa);
    if (kernels == nullptr) continue;
    if (wanted != nullptr && std::strcmp(kernels->name, wanted) == 0) return *kernels;
    if (fastest == nullptr) fastest = kernels;
  }
  if (wanted != nullptr) {
    std::fprintf(stderr, "PERSIA_SIMD=%s: this processor has no such kernels; %s is used\n", wanted,
                 fastest->name);
  }
  return *fastest;
}

// Chosen once, before threads use it: a job whose choice changed midway could not be compared with
// another.
const Kernels& ActiveKernels() {
  static const Kernels& active = ChooseKernels(std::getenv("PERSIA_SIMD"));
  return active;
}

}  // namespace persia::simd
