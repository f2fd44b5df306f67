// The kernels for one instruction set; its compiler flags are in CMakeLists.txt.
#define PERSIA_SIMD_NAME "neon"
#define PERSIA_SIMD_TABLE kNeonKernels
#include "simd/kernels.inc"
