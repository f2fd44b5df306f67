// Bags: what rows each output row of a slot is the sum of, and the two things done with them.
//
// A bag is what rows are summed for: a sample of a pooled slot, a distinct ID of a raw slot.
// Pooling goes from rows to bags; the gradient sums go back from bags to rows. Sums run over a
// bag's rows in their order, duplicates included, and over a row's bags in theirs, so that results
// depend neither on where rows lie nor on threads. All in float32, nothing fused or reordered.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "simd/kernels.h"
#include "worker/slot_config.h"

namespace persia::worker {

// Views of memory that the batch's plan owns. A plain value, made again for each use.
struct Bags {
  uint32_t dim = 0;
  uint32_t num_bags = 0;
  // Bag b has numbers[offsets[b] * rows_per_offset .. offsets[b + 1] * rows_per_offset); without
  // offsets each has rows_per_offset numbers.
  std::span<const uint32_t> offsets = {};
  // The number of the hash stack's rounds: offsets count IDs, and each has so many rows, one after
  // the other.
  uint32_t rows_per_offset = 1;
  // Empty where the rows come one by one, in the order of the bags: for PoolBags() of bags with
  // offsets alone.
  std::span<const uint32_t> numbers = {};
  // What an ID's rows are multiplied by: one an ID, in their order; empty: all 1.
  std::span<const float> weights = {};
  Scaling scaling = Scaling::kNone;

  size_t Begin(size_t bag) const {
    return (offsets.empty() ? bag : offsets[bag]) * rows_per_offset;
  }
  size_t End(size_t bag) const { return Begin(bag + 1); }
  // Whether each bag is one row as it is. So it is with any scaling, whose factor is 1 then.
  // Such bags are copied instead of summed, and their gradients added in place: the common case of
  // a slot with one ID a sample.
  bool IsPlain() const { return offsets.empty() && rows_per_offset == 1 && weights.empty(); }
  // What the sum of a bag's rows, and its gradient, are multiplied by. 0 where the weights that it
  // would be divided by add up to 0.
  float Factor(size_t bag) const { return scaling == Scaling::kNone ? 1.0f : ScalingFactor(bag); }
  // What the row at position `i` of the numbers is multiplied by.
  float Weight(size_t i) const { return weights.empty() ? 1.0f : weights[i / rows_per_offset]; }
  float ScalingFactor(size_t bag) const;  // Factor() where there is a scaling
};

// out + b * stride becomes the sum of bag b's rows; `rows[n]` is the row of number n, in the format
// that `pooling` reads.
void PoolBags(const Bags& bags, const float* const* rows, float* out, size_t stride,
              const simd::Pooling& pooling = simd::ActiveKernels().pooling);

// Where the gradients of a slot's bags lie.
struct BagGradients {
  const float* begin = nullptr;  // null: the slot contributes nothing
  size_t stride = 0;             // floats from one bag's to the next
};

// Adds each bag's gradient, times `scale`, to the sum of its row: of plain bags alone. `sums[n]` is
// the sum of row number n. The gradients are read once, from front to back, and the sums are as
// many as a group has signs and so near at hand.
void AddInPlace(const Bags& bags, const BagGradients& gradients, float scale,
                std::span<float* const> sums);

// By row number: the sum of the gradients of the bags it is in. Keeps its memory from batch to
// batch. Not thread-safe.
class GradientSums {
 public:
  // Of several slots that share the numbers 0 .. num_rows, slot after slot. `scale` multiplies all.
  // What the gradients point to must stay until the last Sum(). `slots` and `gradients` have one
  // entry for each slot; a slot whose gradient is null is passed over.
  void Build(std::span<const Bags> slots, std::span<const BagGradients> gradients, float scale,
             uint32_t num_rows);

  uint32_t Count(uint32_t number) const { return begins_[number + 1] - begins_[number]; }
  // `sum` has as many elements as the slots have dims.
  void Sum(uint32_t number, size_t dim, float* sum) const {
    const uint32_t begin = begins_[number];
    kernels_.pooling.sum_scaled(sum, parts_.data() + begin,
                                factors_.empty() ? nullptr : &factors_[begin], Count(number), dim);
  }
  // Asks for the memory that Sum(number) will read.
  void Prefetch(uint32_t number, size_t dim) const;

 private:
  void AddSlot(const Bags& bags, const BagGradients& gradients, float scale);

  const simd::Kernels& kernels_ = simd::ActiveKernels();
  // parts_[begins_[n] .. begins_[n + 1]) are the gradients of number n, with their factors; no
  // factors where all are 1.
  std::vector<uint32_t> begins_;
  std::vector<const float*> parts_;
  std::vector<float> factors_;
};

}  // namespace persia::worker
