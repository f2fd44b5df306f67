// Kernels: the arithmetic on embedding rows, chosen once for the processor at hand.
//
// Contracts
//  * Every variant gives the same bits as the scalar one, for any length and alignment.
//  * Pointers need only float's alignment; n may be 0; distinct arguments must not overlap.
//  * Stateless and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/optimizer_config.h"

namespace persia::simd {

// A normal distribution restricted to [lower, upper]. `first` and `span` are the parts of its area
// that lie below `lower` and between the two; 0 and 1 where the bounds are infinite.
struct NormalRule {
  double mean, stddev;
  float lower, upper;
  double first, span;
};
// One row to be updated.
struct RowStep {
  float* w;          // n weights
  float* state;      // the optimizer's, array after array of n
  const float* g;    // n gradients
  uint32_t* scalar;  // row-wise Adagrad: its sum, as a float's bits; SGD: whether it has stepped
  // Adam and its kin, corrected for the row's step t (counted from 1): step_size = lr / (1 -
  // beta1^t), second_scale = 1 / sqrt(1 - beta2^t).
  float step_size, second_scale;
};
// Updates `count` rows of n elements with the optimizer that was chosen for `config`, then clamps
// their weights to [-bound, bound] unless `bound` is 0. A row with a NaN or an infinity in its
// gradient is left as it is; returns how many were.
using UpdateRows = size_t (*)(const OptimizerConfig& config, const RowStep* rows, size_t count,
                              size_t n, float bound);

// A column block of a matrix, of n elements: row i of it is rows[numbers[i]].
struct ColumnSource {
  const float* const* rows;
  const uint32_t* numbers;
  size_t n;
};
// Row i is added to row numbers[i] of `sums`, whose rows lie n apart.
struct ColumnSums {
  float* sums;
  const uint32_t* numbers;
  size_t n;
};

// Reads batches of rows, of n elements each; what it writes is float32. A row number is an index
// into `rows`, which point to embeddings of one format; the rows must stay apart from `out`.
struct Pooling {
  // out[i * stride ..] = rows[numbers[i]]
  void (*copy_rows)(float* out, size_t stride, const float* const* rows, const uint32_t* numbers,
                    size_t count, size_t n);
  // Several column blocks side by side, filled row by row: where they are narrow, `out` is written
  // from front to back. `out` begins at the first block.
  void (*copy_columns)(float* out, size_t stride, const ColumnSource* sources, size_t num_sources,
                       size_t count);
  // Bag b, at out + b * stride, becomes the sum of rows[numbers[i]] for i from offsets[b] to
  // offsets[b + 1] times rows_per_offset, in order; of one row it is that row, of none it is zeros.
  // Without `offsets` each bag has rows_per_offset rows, without `numbers` row i is rows[i].
  void (*sum_bags)(float* out, size_t stride, const float* const* rows, const uint32_t* numbers,
                   const uint32_t* offsets, size_t rows_per_offset, size_t num_bags, size_t n);
  // out = the sum of factors[i] * rows[i], in order; without `factors` they are 1
  void (*sum_scaled)(float* out, const float* const* rows, const float* factors, size_t count,
                     size_t n);
};

// Embeddings of 16 bits an element. A row begins where a float could; rows come as `const float*`
// where those of float32 do.
struct NarrowRows {
  // Exact. A signalling NaN, which `write` never makes, may become a quiet one.
  void (*read)(float* out, const uint16_t* row, size_t n);
  // To nearest, ties to even. Here and below what is beyond the greatest number becomes that one;
  // a NaN stays one.
  void (*write)(uint16_t* row, const float* values, size_t n);
  // Stochastic rounding: up with a probability of the distance from the number below, so that the
  // error is 0 on average. The choice depends on the bits of the value, those of its gradient and
  // its place in the row alone (ADR 20). A value that the type represents is kept.
  void (*write_stochastic)(uint16_t* row, const float* values, const float* gradient, size_t n);
  Pooling pooling;
};

struct Kernels {
  const char* name;

  void (*add)(float* dst, const float* src, size_t n);                       // dst += src
  void (*add_scaled)(float* dst, const float* src, float factor, size_t n);  // dst += factor * src
  void (*scale)(float* dst, float factor, size_t n);                         // dst *= factor
  bool (*all_finite)(const float* values, size_t n);
  // The greatest magnitude, 0 of none; NaN or infinite where an element is.
  float (*max_magnitude)(const float* values, size_t n);

  Pooling pooling;  // of float32 rows
  // The way back of Pooling::copy_columns: `values` is read from front to back.
  void (*add_columns)(const float* values, size_t stride, const ColumnSums* sums, size_t num_sums,
                      size_t count);

  // IEEE float16 and bfloat16, as their bits. Narrowing rounds to nearest, ties to even, beyond the
  // range to infinity; a NaN stays one, quiet, with its sign and the high bits of its payload.
  // Widening is exact.
  void (*float_to_half)(uint16_t* out, const float* values, size_t n);
  void (*half_to_float)(float* out, const uint16_t* values, size_t n);
  void (*float_to_bfloat16)(uint16_t* out, const float* values, size_t n);
  void (*bfloat16_to_float)(float* out, const uint16_t* values, size_t n);

  NarrowRows float16_rows;
  NarrowRows bfloat16_rows;

  // Uniform in [lower, upper), or all `lower` where the two are equal. Element i depends on
  // (stream, i, lower, upper) alone.
  void (*uniform)(float* out, uint64_t stream, float lower, float upper, size_t n);

  // Element i is the quantile of the restricted normal distribution at a number in (0, 1) that
  // depends on (stream, i) alone. Its own arithmetic: libm's differs between machines.
  void (*normal)(float* out, uint64_t stream, const NormalRule& rule, size_t n);
  // The standard normal distribution's quantile of p in (0, 1), to seven digits.
  double (*normal_quantile)(double p);

  // store::SignKey and worker::FoldId plus a prefix, of many: a lookup has both for each ID.
  void (*make_keys)(uint64_t* keys, const uint64_t* signs, size_t n);
  void (*fold_ids)(uint64_t* signs, const uint64_t* ids, uint32_t id_bits, uint64_t prefix,
                   size_t n);

  // The kernel of a validated config; optimizers.inc has the formulas.
  UpdateRows (*optimizer)(const OptimizerConfig& config);

  // The way back of Pooling::sum_bags: bag b's n values, at values + b * stride, are added to row
  // numbers[i] of `sums`, whose rows lie n apart, for each i that sum_bags would read.
  void (*add_bags)(float* sums, const float* values, size_t stride, const uint32_t* numbers,
                   const uint32_t* offsets, size_t rows_per_offset, size_t num_bags, size_t n);
};

enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kNeon };

// The variant for one instruction set; null when it was not compiled in or the processor lacks it.
const Kernels* KernelsFor(Isa isa);

// The variant of that name; the fastest one that this processor has where `wanted` is null, or,
// with a line on the standard error, where the processor lacks it.
const Kernels& ChooseKernels(const char* wanted);

// The variant that the environment variable PERSIA_SIMD names, else the fastest one. Chosen once.
const Kernels& ActiveKernels();

}  // namespace persia::simd
