// Pooling and gradient sums of bags, against plain loops in double precision.
#include "worker/bags.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace persia::worker {
namespace {

constexpr Scaling kScalings[] = {Scaling::kNone, Scaling::kSqrt, Scaling::kMean};

// A slot with memory of its own. A bag has `lengths[b]` entries of `rows_per_offset` numbers.
struct TestBags {
  TestBags(std::mt19937& rng, uint32_t dim, std::vector<uint32_t> lengths, uint32_t rows_per_offset,
           uint32_t num_rows, bool with_offsets = true) {
    offsets = {0};
    for (const uint32_t length : lengths) offsets.push_back(offsets.back() + length);
    numbers.resize(size_t{offsets.back()} * rows_per_offset);
    for (uint32_t& number : numbers) number = static_cast<uint32_t>(rng() % num_rows);
    bags = {.dim = dim,
            .num_bags = static_cast<uint32_t>(lengths.size()),
            .offsets = with_offsets ? std::span<const uint32_t>(offsets) : std::span<uint32_t>(),
            .rows_per_offset = rows_per_offset,
            .numbers = numbers};
  }
  TestBags(const TestBags&) = delete;

  // In (-1, 2), so that a mean may divide by little, but not by nothing.
  void AddWeights(std::mt19937& rng) {
    std::uniform_real_distribution<float> uniform(-1, 2);
    weights.resize(offsets.back());
    for (float& weight : weights) weight = uniform(rng);
    bags.weights = weights;
  }
  // Of one of the bag's rows, its scaling included, in double precision.
  double Multiplier(size_t bag, size_t row) const {
    const auto weight = [this](size_t id) { return weights.empty() ? 1.0 : double{weights[id]}; };
    double sum = 0, squares = 0;
    for (size_t id = offsets[bag]; id < offsets[bag + 1]; ++id) {
      sum += weight(id);
      squares += weight(id) * weight(id) * bags.rows_per_offset;
    }
    double divisor = 1;
    if (bags.scaling == Scaling::kMean) divisor = sum;
    if (bags.scaling == Scaling::kSqrt) divisor = std::sqrt(squares);
    return weight(offsets[bag] + row / bags.rows_per_offset) / divisor;
  }

  std::vector<uint32_t> Numbers(size_t bag) const {
    const auto begin = numbers.begin();
    return {begin + static_cast<ptrdiff_t>(offsets[bag] * bags.rows_per_offset),
            begin + static_cast<ptrdiff_t>(offsets[bag + 1] * bags.rows_per_offset)};
  }

  std::vector<uint32_t> offsets, numbers;
  std::vector<float> weights;
  Bags bags;
};

std::vector<float> RandomFloats(std::mt19937& rng, size_t size) {
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& value : values) value = normal(rng);
  return values;
}

std::vector<uint32_t> RandomLengths(std::mt19937& rng, size_t num_bags) {
  std::vector<uint32_t> lengths(num_bags);
  for (uint32_t& length : lengths) length = static_cast<uint32_t>(rng() % 7);
  return lengths;
}

void ExpectPooled(const TestBags& slot, const std::vector<float>& table) {
  constexpr float kUntouched = 42.0f;
  const size_t dim = slot.bags.dim, stride = dim + 3;
  std::vector<const float*> rows;
  for (size_t at = 0; at < table.size(); at += dim) rows.push_back(table.data() + at);
  std::vector<float> out(slot.bags.num_bags * stride, kUntouched);
  PoolBags(slot.bags, rows.data(), out.data(), stride);
  for (size_t bag = 0; bag < slot.bags.num_bags; ++bag) {
    const std::vector<uint32_t> numbers = slot.Numbers(bag);
    for (size_t e = 0; e < dim; ++e) {
      double sum = 0, magnitude = 1;
      for (size_t i = 0; i < numbers.size(); ++i) {
        const double term = slot.Multiplier(bag, i) * table[numbers[i] * dim + e];
        sum += term;
        magnitude += std::abs(term);
      }
      ASSERT_NEAR(out[bag * stride + e], sum, 1e-5 * magnitude) << bag << ", " << e;
    }
    for (size_t e = dim; e < stride; ++e) ASSERT_EQ(out[bag * stride + e], kUntouched);
  }
}

TEST(BagsTest, PoolingAgreesWithPlainLoops) {
  constexpr uint32_t kNumRows = 12;
  std::mt19937 rng(1);
  for (const uint32_t dim : {1u, 3u, 15u, 16u, 17u, 64u, 100u, 200u}) {
    for (const uint32_t rows_per_offset : {1u, 3u}) {
      for (const Scaling scaling : kScalings) {
        SCOPED_TRACE(dim);
        const auto table = RandomFloats(rng, kNumRows * dim);
        TestBags multi(rng, dim, RandomLengths(rng, 40), rows_per_offset, kNumRows);
        multi.bags.scaling = scaling;
        ExpectPooled(multi, table);
        multi.AddWeights(rng);
        ExpectPooled(multi, table);
        TestBags single(rng, dim, std::vector<uint32_t>(40, 1), rows_per_offset, kNumRows, false);
        single.bags.scaling = scaling;
        ExpectPooled(single, table);
        single.AddWeights(rng);
        ExpectPooled(single, table);
      }
    }
  }
}

TEST(BagsTest, AnEmptyBagIsZerosAndOneOfOneRowIsThatRow) {
  std::mt19937 rng(2);
  const std::vector<float> table = {-0.0f, 1e-45f, 3.0f};
  const float* rows[] = {table.data()};
  TestBags slot(rng, 3, {0, 1}, 1, 1);
  slot.bags.scaling = Scaling::kSqrt;
  std::vector<float> out(6, 42.0f);
  PoolBags(slot.bags, rows, out.data(), 3);
  EXPECT_EQ(out, (std::vector<float>{0, 0, 0, -0.0f, 1e-45f, 3.0f}));
  EXPECT_TRUE(std::signbit(out[3]));
}

TEST(BagsTest, WeightsOfOneAreNoWeights) {
  std::mt19937 rng(8);
  const std::vector<float> table = RandomFloats(rng, 12 * 33);
  std::vector<const float*> rows;
  for (size_t at = 0; at < table.size(); at += 33) rows.push_back(table.data() + at);
  for (const Scaling scaling : kScalings) {
    TestBags slot(rng, 33, RandomLengths(rng, 40), 2, 12);
    slot.bags.scaling = scaling;
    std::vector<float> plain(40 * 33), weighted(40 * 33);
    PoolBags(slot.bags, rows.data(), plain.data(), 33);
    const std::vector<float> ones(slot.offsets.back(), 1.0f);
    slot.bags.weights = ones;
    PoolBags(slot.bags, rows.data(), weighted.data(), 33);
    EXPECT_EQ(plain, weighted);
  }
}

TEST(BagsTest, ABagWhoseWeightsAddUpToZeroIsZerosWhereItWouldBeDivided) {
  const std::vector<float> table = {1, 2, 3, 4}, weights = {1, -1};
  const float* rows[] = {table.data(), table.data() + 2};
  const std::vector<uint32_t> offsets = {0, 2}, numbers = {0, 1};
  Bags bags = {.dim = 2, .num_bags = 1, .offsets = offsets, .numbers = numbers, .weights = weights};
  std::vector<float> out(2, 42.0f);
  PoolBags(bags, rows, out.data(), 2);
  EXPECT_EQ(out, (std::vector<float>{-2, -2}));
  bags.scaling = Scaling::kMean;
  PoolBags(bags, rows, out.data(), 2);
  EXPECT_EQ(out, (std::vector<float>{0, 0}));
}

TEST(BagsTest, NoBagsWriteNothing) {
  std::mt19937 rng(3);
  const TestBags slot(rng, 8, {}, 1, 1);
  PoolBags(slot.bags, nullptr, nullptr, 8);
  GradientSums sums;
  const BagGradients gradient = {nullptr, 8};
  sums.Build({&slot.bags, 1}, {&gradient, 1}, 1.0f, 0);
}

// Two slots that share rows, the gradients of each in columns of one matrix.
struct TwoSlots {
  TwoSlots(std::mt19937& rng, uint32_t dim, uint32_t rows_per_offset, Scaling second_scaling)
      : first(rng, dim, RandomLengths(rng, kNumBags), 1, kNumRows),
        second(rng, dim, RandomLengths(rng, kNumBags), rows_per_offset, kNumRows),
        matrix(RandomFloats(rng, kNumBags * Stride())) {
    second.bags.scaling = second_scaling;
  }
  static constexpr uint32_t kNumRows = 17, kNumBags = 30;
  size_t Stride() const { return 2 * first.bags.dim + 1; }
  std::vector<BagGradients> Gradients() const {
    return {{matrix.data(), Stride()}, {matrix.data() + first.bags.dim + 1, Stride()}};
  }
  std::vector<Bags> Slots() const { return {first.bags, second.bags}; }

  TestBags first, second;
  std::vector<float> matrix;
};

void AddSums(const TestBags& slot, const BagGradients& gradients, double scale,
             std::vector<double>* sums, std::vector<uint32_t>* counts) {
  const size_t dim = slot.bags.dim;
  for (size_t bag = 0; bag < slot.bags.num_bags; ++bag) {
    const std::vector<uint32_t> numbers = slot.Numbers(bag);
    for (size_t i = 0; i < numbers.size(); ++i) {
      const uint32_t number = numbers[i];
      ++(*counts)[number];
      for (size_t e = 0; e < dim; ++e) {
        (*sums)[number * dim + e] +=
            gradients.begin[bag * gradients.stride + e] * scale * slot.Multiplier(bag, i);
      }
    }
  }
}

void ExpectSums(const GradientSums& sums, size_t dim, const std::vector<double>& expected,
                const std::vector<uint32_t>& counts) {
  std::vector<float> sum(dim);
  for (uint32_t number = 0; number < counts.size(); ++number) {
    ASSERT_EQ(sums.Count(number), counts[number]) << number;
    sums.Prefetch(number, dim);
    sums.Sum(number, dim, sum.data());
    for (size_t e = 0; e < dim; ++e) {
      const double exact = expected[number * dim + e];
      ASSERT_NEAR(sum[e], exact, 1e-5 * (1 + std::abs(exact))) << number << ", " << e;
    }
  }
}

TEST(BagsTest, GradientSumsAgreeWithPlainLoops) {
  std::mt19937 rng(4);
  GradientSums sums;  // one for all, as batches come one after the other
  for (const uint32_t dim : {1u, 3u, 16u, 33u, 64u, 128u, 200u}) {
    for (const uint32_t rows_per_offset : {1u, 2u}) {
      for (const float scale : {1.0f, 0.5f}) {
        SCOPED_TRACE(dim);
        TwoSlots slots(rng, dim, rows_per_offset, kScalings[rng() % 3]);
        if (rng() % 2 == 0) slots.second.AddWeights(rng);
        const auto gradients = slots.Gradients();
        sums.Build(slots.Slots(), gradients, scale, TwoSlots::kNumRows);
        std::vector<double> expected(TwoSlots::kNumRows * dim, 0.0);
        std::vector<uint32_t> counts(TwoSlots::kNumRows, 0);
        AddSums(slots.first, gradients[0], scale, &expected, &counts);
        AddSums(slots.second, gradients[1], scale, &expected, &counts);
        ExpectSums(sums, dim, expected, counts);
      }
    }
  }
}

TEST(BagsTest, ASlotWithoutGradientsContributesNothing) {
  std::mt19937 rng(5);
  const TwoSlots slots(rng, 8, 1, Scaling::kSqrt);
  auto gradients = slots.Gradients();
  gradients[1].begin = nullptr;
  GradientSums sums;
  sums.Build(slots.Slots(), gradients, 1.0f, TwoSlots::kNumRows);
  std::vector<double> expected(TwoSlots::kNumRows * 8, 0.0);
  std::vector<uint32_t> counts(TwoSlots::kNumRows, 0);
  AddSums(slots.first, gradients[0], 1.0, &expected, &counts);
  ExpectSums(sums, 8, expected, counts);
}

// The largest first: what a batch leaves in the memory must not be seen by the next.
TEST(BagsTest, SumsForgetTheBatchBefore) {
  std::mt19937 rng(6);
  GradientSums used;
  const TwoSlots large(rng, 64, 2, Scaling::kMean);
  used.Build(large.Slots(), large.Gradients(), 3.0f, TwoSlots::kNumRows);
  TestBags small(rng, 2, {1, 1, 1}, 1, 1, false);
  const std::vector<float> matrix = {1, 2, 3, 4, 5, 6};
  const BagGradients gradients = {matrix.data(), 2};
  used.Build({&small.bags, 1}, {&gradients, 1}, 1.0f, 1);
  std::vector<float> sum(2);
  used.Sum(0, 2, sum.data());
  EXPECT_EQ(used.Count(0), 3u);
  EXPECT_EQ(sum, (std::vector<float>{9, 12}));
}

// (1e8 + 1) - 1e8 is 0 in float32 and 1e8 - 1e8 + 1 is 1: the order is that of slots and bags.
TEST(BagsTest, SumsRunInTheOrderOfSlotsAndBags) {
  std::mt19937 rng(7);
  const TestBags two(rng, 1, {1, 1}, 1, 1), one(rng, 1, {1}, 1, 1);
  const std::vector<float> a = {1e8f, -1e8f}, b = {1.0f};
  const std::vector<BagGradients> gradients = {{a.data(), 1}, {b.data(), 1}};
  const std::vector<Bags> forward = {two.bags, one.bags}, backward = {one.bags, two.bags};
  GradientSums sums;
  float sum = 42;
  sums.Build(forward, gradients, 1.0f, 1);
  sums.Sum(0, 1, &sum);
  EXPECT_EQ(sum, 1.0f);
  sums.Build(backward, std::vector<BagGradients>{gradients[1], gradients[0]}, 1.0f, 1);
  sums.Sum(0, 1, &sum);
  EXPECT_EQ(sum, 0.0f);
}

}  // namespace
}  // namespace persia::worker
