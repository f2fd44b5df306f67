#include "worker/bags.h"

#include <algorithm>
#include <cmath>

namespace persia::worker {
namespace {

// Weights that add up to 0 make an embedding of 0, and a gradient of 0, instead of NaN.
float Inverse(float divisor) { return divisor == 0.0f ? 0.0f : 1.0f / divisor; }

// The rows and weights of one bag after the other are gathered, and summed in registers.
void PoolWeighted(const Bags& bags, const float* const* rows, float* out, size_t stride,
                  const simd::Pooling& pooling) {
  thread_local std::vector<const float*> parts;
  thread_local std::vector<float> weights;
  const simd::Kernels& kernels = simd::ActiveKernels();
  for (size_t bag = 0; bag < bags.num_bags; ++bag, out += stride) {
    parts.clear();
    weights.clear();
    for (size_t i = bags.Begin(bag); i < bags.End(bag); ++i) {
      parts.push_back(rows[bags.numbers.empty() ? i : bags.numbers[i]]);
      weights.push_back(bags.Weight(i));
    }
    pooling.sum_scaled(out, parts.data(), weights.data(), parts.size(), bags.dim);
    const float factor = bags.Factor(bag);
    if (factor != 1.0f) kernels.scale(out, factor, bags.dim);
  }
}

}  // namespace

float Bags::ScalingFactor(size_t bag) const {
  const size_t count = End(bag) - Begin(bag);
  if (weights.empty()) {
    if (count <= 1) return 1.0f;
    if (scaling == Scaling::kSqrt) return 1.0f / std::sqrt(static_cast<float>(count));
    return 1.0f / static_cast<float>(count / rows_per_offset);
  }
  // In float64, so that the rounding of many weights does not add up.
  double sum = 0.0;
  const size_t first = Begin(bag) / rows_per_offset;
  for (const float weight : weights.subspan(first, count / rows_per_offset)) {
    sum += scaling == Scaling::kSqrt ? static_cast<double>(weight) * weight : weight;
  }
  if (scaling == Scaling::kMean) return Inverse(static_cast<float>(sum));
  return Inverse(std::sqrt(static_cast<float>(sum * rows_per_offset)));
}

// Three ways, for what each costs: copies of rows, sums of rows, and weighted sums.
void PoolBags(const Bags& bags, const float* const* rows, float* out, size_t stride,
              const simd::Pooling& pooling) {
  const uint32_t* numbers = bags.numbers.empty() ? nullptr : bags.numbers.data();
  if (!bags.weights.empty()) return PoolWeighted(bags, rows, out, stride, pooling);
  if (bags.IsPlain()) {
    pooling.copy_rows(out, stride, rows, numbers, bags.num_bags, bags.dim);
    return;
  }
  pooling.sum_bags(out, stride, rows, numbers, bags.offsets.empty() ? nullptr : bags.offsets.data(),
                   bags.rows_per_offset, bags.num_bags, bags.dim);
  if (bags.scaling == Scaling::kNone) return;
  const simd::Kernels& kernels = simd::ActiveKernels();
  for (size_t bag = 0; bag < bags.num_bags; ++bag, out += stride) {
    const float factor = bags.Factor(bag);
    if (factor != 1.0f) kernels.scale(out, factor, bags.dim);
  }
}

void AddInPlace(const Bags& bags, const BagGradients& gradients, float scale,
                std::span<float* const> sums) {
  const simd::Kernels& kernels = simd::ActiveKernels();
  const float* gradient = gradients.begin;
  for (const uint32_t number : bags.numbers) {
    if (scale == 1.0f) {
      kernels.add(sums[number], gradient, bags.dim);
    } else {
      kernels.add_scaled(sums[number], gradient, scale, bags.dim);
    }
    gradient += gradients.stride;
  }
}

// A counting sort by row number, which keeps the order of the bags. Counted one place ahead: after
// the sums begins_[n + 1] is where number n begins, and filling moves it to where n ends.
void GradientSums::Build(std::span<const Bags> slots, std::span<const BagGradients> gradients,
                         float scale, uint32_t num_rows) {
  begins_.assign(num_rows + 2, 0);
  size_t num_parts = 0;
  bool has_factors = scale != 1.0f;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (gradients[i].begin == nullptr) continue;
    for (const uint32_t number : slots[i].numbers) ++begins_[number + 2];
    num_parts += slots[i].numbers.size();
    has_factors |= slots[i].scaling != Scaling::kNone || !slots[i].weights.empty();
  }
  for (uint32_t n = 2; n < begins_.size(); ++n) begins_[n] += begins_[n - 1];
  if (parts_.size() < num_parts) parts_.resize(num_parts);
  factors_.resize(has_factors ? num_parts : 0);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (gradients[i].begin != nullptr) AddSlot(slots[i], gradients[i], scale);
  }
}

void GradientSums::AddSlot(const Bags& bags, const BagGradients& gradients, float scale) {
  const float* gradient = gradients.begin;
  for (size_t bag = 0; bag < bags.num_bags; ++bag, gradient += gradients.stride) {
    const size_t begin = bags.Begin(bag), end = bags.End(bag);
    // Once a bag: the factor's square root or division is the costly part.
    const float factor = scale * bags.Factor(bag);
    for (size_t i = begin; i < end; ++i) {
      const uint32_t place = begins_[bags.numbers[i] + 1]++;
      parts_[place] = gradient;
      if (!factors_.empty()) factors_[place] = factor * bags.Weight(i);
    }
  }
}

void GradientSums::Prefetch(uint32_t number, size_t dim) const {
  // The first lines of the first rows: processors fetch on by themselves, and a sign with many
  // gradients hides the latency of the later ones.
  constexpr size_t kRows = 4, kFloats = 128, kLineFloats = 16;
  const uint32_t begin = begins_[number];
  const uint32_t end = begin + std::min<uint32_t>(Count(number), kRows);
  for (uint32_t i = begin; i < end; ++i) {
    for (size_t f = 0; f < std::min(dim, kFloats); f += kLineFloats) {
      __builtin_prefetch(parts_[i] + f);
    }
  }
}

}  // namespace persia::worker
