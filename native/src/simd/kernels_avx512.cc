// The kernels for one instruction set; its compiler flags are in CMakeLists.txt.
#define PERSIA_SIMD_NAME "avx512"
#define PERSIA_SIMD_TABLE kAvx512Kernels
#include "simd/kernels.inc"
