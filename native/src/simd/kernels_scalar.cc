// The kernels for one instruction set; its compiler flags are in CMakeLists.txt.
#define PERSIA_SIMD_NAME "scalar"
#define PERSIA_SIMD_TABLE kScalarKernels
#include "simd/kernels.inc"
