// The kernels for one instruction set; its compiler flags are in CMakeLists.txt.
#define PERSIA_SIMD_NAME "avx2"
#define PERSIA_SIMD_TABLE kAvx2Kernels
#include "simd/kernels.inc"
