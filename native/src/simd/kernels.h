// Kernels: the arithmetic on embedding rows, chosen once for the processor at hand.
//
// Contracts
//  * Every variant gives the same bits as the scalar one, for any length and alignment.
//  * Pointers need only float's alignment; n may be 0; distinct arguments must not overlap.
//  * Stateless and thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace persia::simd {

// w: weights, g: gradient, n: elements. Weight decay
// is L2: g + weight_decay * w stands for g below.

struct SgdRule {
  float lr, weight_decay, momentum;
};
struct AdagradRule {
  float lr, weight_decay, g_square_momentum, eps;
};
// Already corrected for the row's step t (counted from 1):
// step_size = lr / (1 - beta1^t), second_scale = 1 / sqrt(1 - beta2^t).
struct AdamRule {
  float step_size, second_scale, weight_decay, eps;
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
};

struct Kernels {
  const char* name;

  void (*add)(float* dst, const float* src, size_t n);                       // dst += src
  void (*add_scaled)(float* dst, const float* src, float factor, size_t n);  // dst += factor * src
  void (*scale)(float* dst, float factor, size_t n);                         // dst *= factor
  void (*clamp)(float* dst, float bound, size_t n);  // to [-bound, bound]; NaN stays
  bool (*all_finite)(const float* values, size_t n);
  // Uniform in [lower, upper), or all `lower` where the two are equal. Element i depends on
  // (stream, i, lower, upper) alone.
  void (*uniform)(float* out, uint64_t stream, float lower, float upper, size_t n);

  // w -= lr * g
  void (*sgd)(const SgdRule& rule, float* w, const float* g, size_t n);
  // velocity = momentum * velocity + g; w -= lr * velocity.
  // Zero velocity makes the first step torch's.
  void (*sgd_momentum)(const SgdRule& rule, float* w, float* velocity, const float* g, size_t n);
  // sum = sum * g_square_momentum + g^2; w -= lr * g / (sqrt(sum) + eps)
  void (*adagrad)(const AdagradRule& rule, float* w, float* sum, const float* g, size_t n);
  // The same with one sum a row, of the mean of g^2.
  void (*rowwise_adagrad)(const AdagradRule& rule, float* w, float* sum, const float* g, size_t n);
  // m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g^2;
  // w -= step_size * m / (sqrt(v) * second_scale + eps)
  void (*adam)(const AdamRule& rule, float* w, float* m, float* v, const float* g, size_t n);
};

enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kNeon };

// The variant for one instruction set; null when it was not compiled in or the processor lacks it.
const Kernels* KernelsFor(Isa isa);

// The fastest variant that this processor has.
const Kernels& ActiveKernels();

}  // namespace persia::simd
