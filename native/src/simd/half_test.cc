// float16 and bfloat16, on the wire and as rows, against their definitions: widening by the formula
// of the format for all 65,536 patterns, narrowing against the nearest pattern, and every variant
// against the scalar one.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "simd/kernels.h"

namespace persia::simd {
namespace {

constexpr Isa kIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon};
constexpr uint32_t kNumPatterns = 1u << 16;

struct Format {
  int exponent_bits, mantissa_bits;
  void (*const Kernels::*narrow)(uint16_t*, const float*, size_t);
  void (*const Kernels::*widen)(float*, const uint16_t*, size_t);
  const NarrowRows Kernels::* rows;
};
const Format kFormats[] = {
    {5, 10, &Kernels::float_to_half, &Kernels::half_to_float, &Kernels::float16_rows},
    {8, 7, &Kernels::float_to_bfloat16, &Kernels::bfloat16_to_float, &Kernels::bfloat16_rows},
};

// The value of a pattern, by the definition of IEEE binary formats.
double ValueOf(const Format& format, uint32_t pattern) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const double sign = (pattern & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>((pattern & 0x7fffu) >> format.mantissa_bits);
  const double fraction = std::ldexp(
      static_cast<double>(pattern & ((1u << format.mantissa_bits) - 1)), -format.mantissa_bits);
  if (exponent == (1 << format.exponent_bits) - 1) {
    return fraction == 0.0 ? sign * std::numeric_limits<double>::infinity()
                           : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1.0 + fraction, exponent - bias);
}

std::vector<float> Widened(const Format& format, const Kernels& kernels) {
  std::vector<uint16_t> patterns(kNumPatterns);
  for (uint32_t i = 0; i < kNumPatterns; ++i) patterns[i] = static_cast<uint16_t>(i);
  std::vector<float> values(kNumPatterns);
  (kernels.*format.widen)(values.data(), patterns.data(), kNumPatterns);
  return values;
}

uint16_t Narrowed(const Format& format, const Kernels& kernels, float value) {
  uint16_t pattern = 0;
  (kernels.*format.narrow)(&pattern, &value, 1);
  return pattern;
}

TEST(Half, WideningIsExact) {
  for (const Format& format : kFormats) {
    const std::vector<float> values = Widened(format, *KernelsFor(Isa::kScalar));
    for (uint32_t pattern = 0; pattern < kNumPatterns; ++pattern) {
      const double expected = ValueOf(format, pattern);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(values[pattern])) << pattern;
      } else {
        ASSERT_EQ(values[pattern], expected) << pattern;
        ASSERT_EQ(std::signbit(values[pattern]), (pattern & 0x8000u) != 0) << pattern;
      }
    }
  }
}

TEST(Half, NarrowingWhatWasWidenedGivesThePatternBack) {
  for (const Format& format : kFormats) {
    const Kernels& kernels = *KernelsFor(Isa::kScalar);
    const std::vector<float> values = Widened(format, kernels);
    for (uint32_t pattern = 0; pattern < kNumPatterns; ++pattern) {
      const uint16_t again = Narrowed(format, kernels, values[pattern]);
      if (std::isnan(values[pattern])) {  // quiet, with its sign and payload
        ASSERT_EQ(again, pattern | (1u << (format.mantissa_bits - 1))) << pattern;
      } else {
        ASSERT_EQ(again, pattern);
      }
    }
  }
}

// Between each two neighbours: just below the middle, the middle (to the even one), just above.
TEST(Half, NarrowingRoundsToNearestTiesToEven) {
  for (const Format& format : kFormats) {
    const Kernels& kernels = *KernelsFor(Isa::kScalar);
    const uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
    for (uint32_t low = 0; low < infinity; ++low) {
      const uint32_t high = low + 1;
      // Infinity stands where the next power of two would.
      const double above = high == infinity ? std::ldexp(1.0, 1 << (format.exponent_bits - 1))
                                            : ValueOf(format, high);
      const double middle = (ValueOf(format, low) + above) / 2;
      const auto tie = static_cast<float>(middle);
      if (static_cast<double>(tie) != middle) continue;  // below float32's own resolution
      const uint32_t even = low % 2 == 0 ? low : high;
      ASSERT_EQ(Narrowed(format, kernels, tie), even) << low;
      ASSERT_EQ(Narrowed(format, kernels, std::nextafterf(tie, 0.0f)), low) << low;
      ASSERT_EQ(Narrowed(format, kernels, std::nextafterf(tie, INFINITY)), high) << low;
      ASSERT_EQ(Narrowed(format, kernels, -tie), even | 0x8000u) << low;
    }
    ASSERT_EQ(Narrowed(format, kernels, std::numeric_limits<float>::infinity()), infinity);
    ASSERT_EQ(Narrowed(format, kernels, std::numeric_limits<float>::max()), infinity);
    ASSERT_EQ(Narrowed(format, kernels, std::numeric_limits<float>::denorm_min()), 0);
  }
}

// Random patterns have every exponent, NaNs and denormals among them.
TEST(Half, AllVariantsGiveTheSameBits) {
  std::mt19937 random(7);
  std::vector<float> values(100003);
  for (float& value : values) value = std::bit_cast<float>(static_cast<uint32_t>(random()));
  for (const Format& format : kFormats) {
    std::vector<uint16_t> expected(values.size());
    (KernelsFor(Isa::kScalar)->*format.narrow)(expected.data(), values.data(), values.size());
    const std::vector<float> widened = Widened(format, *KernelsFor(Isa::kScalar));
    for (const Isa isa : kIsas) {
      const Kernels* kernels = KernelsFor(isa);
      if (kernels == nullptr) continue;
      for (const size_t n : {size_t{0}, size_t{1}, size_t{17}, size_t{1000}, values.size() - 3}) {
        std::vector<uint16_t> found(n + 1, 0xabcd);
        (kernels->*format.narrow)(found.data(), values.data() + 3, n);
        ASSERT_EQ(std::memcmp(found.data(), expected.data() + 3, n * sizeof(uint16_t)), 0)
            << kernels->name << " " << n;
        ASSERT_EQ(found[n], 0xabcd);  // not one too many
      }
      const std::vector<float> wide = Widened(format, *kernels);
      ASSERT_EQ(std::memcmp(wide.data(), widened.data(), wide.size() * sizeof(float)), 0)
          << kernels->name;
    }
  }
}

// Both ways to write; gradients are all alike here, but for their own test.
std::vector<uint16_t> Written(const NarrowRows& rows, bool by_chance,
                              const std::vector<float>& values) {
  std::vector<uint16_t> written(values.size());
  const std::vector<float> gradient(values.size(), 0.25f);
  if (by_chance) {
    rows.write_stochastic(written.data(), values.data(), gradient.data(), values.size());
  } else {
    rows.write(written.data(), values.data(), values.size());
  }
  return written;
}

// What rows can have stays as it is, in every place of a row.
TEST(NarrowRows, WhatTheTypeHasIsWrittenAsItIs) {
  for (const Format& format : kFormats) {
    const Kernels& kernels = *KernelsFor(Isa::kScalar);
    const NarrowRows& rows = kernels.*format.rows;
    const std::vector<float> values = Widened(format, kernels);
    for (const bool by_chance : {false, true}) {
      const auto written = Written(rows, by_chance, values);
      for (uint32_t pattern = 0; pattern < kNumPatterns; ++pattern) {
        if (std::isnan(values[pattern])) {
          float value;
          rows.read(&value, &written[pattern], 1);
          ASSERT_TRUE(std::isnan(value)) << pattern;
        } else if (std::isinf(values[pattern])) {
          ASSERT_EQ(written[pattern], pattern - 1) << "the greatest number";
        } else {
          ASSERT_EQ(written[pattern], pattern);
        }
      }
    }
  }
}

TEST(NarrowRows, WhatIsTooGreatBecomesTheGreatestNumber) {
  const std::vector<float> values = {65519.0f, 65521.0f, 1e30f, -1e30f, 3.4e38f, -3.4e38f};
  for (const Format& format : kFormats) {
    const NarrowRows& rows = KernelsFor(Isa::kScalar)->*format.rows;
    for (const bool by_chance : {false, true}) {
      const auto written = Written(rows, by_chance, values);
      std::vector<float> read(values.size());
      rows.read(read.data(), written.data(), read.size());
      for (const float value : read) EXPECT_TRUE(std::isfinite(value));
      if (format.exponent_bits == 5) {
        EXPECT_EQ(read, (std::vector<float>{65504, 65504, 65504, -65504, 65504, -65504}));
      }
    }
  }
}

// A value between two neighbours, written in many places: to one of them, and to the upper one as
// often as it is near to it.
TEST(NarrowRows, ChanceGivesTheValueOnAverage) {
  constexpr size_t kPlaces = 20'000;
  std::mt19937 random(3);
  for (const Format& format : kFormats) {
    const NarrowRows& rows = KernelsFor(Isa::kScalar)->*format.rows;
    // Denormals of float16, its smallest normal numbers, and ordinary ones.
    for (const uint32_t low :
         {0u, 5u, 0x3feu, 0x3ffu, 0x400u, 0x2e66u, 0x3bffu, 0x3c01u, 0x4000u}) {
      for (const double part : {0.02, 0.25, 0.5, 0.9}) {
        const double below = ValueOf(format, low), above = ValueOf(format, low + 1);
        const auto value = static_cast<float>(below + part * (above - below));
        if (std::abs(value) < std::numeric_limits<float>::min()) continue;
        const double expected = (static_cast<double>(value) - below) / (above - below);
        const bool is_negative = random() % 2 == 0;
        const uint32_t sign = is_negative ? 0x8000u : 0;
        const std::vector<float> values(kPlaces, is_negative ? -value : value);
        const auto written = Written(rows, /*by_chance=*/true, values);
        double num_up = 0;
        for (const uint16_t pattern : written) {
          ASSERT_TRUE(pattern == (low | sign) || pattern == ((low + 1) | sign)) << low;
          num_up += pattern == ((low + 1) | sign);
        }
        // Five standard deviations.
        const double sigma = std::sqrt(expected * (1 - expected) / kPlaces);
        EXPECT_NEAR(num_up / kPlaces, expected, 5 * sigma + 1e-4) << low << " " << part;
      }
    }
  }
}

// The same place; values that differ, or gradients alone: no place is luckier than another.
TEST(NarrowRows, ChanceDependsOnValueAndGradientToo) {
  constexpr size_t kValues = 20'000;
  for (const Format& format : kFormats) {
    const NarrowRows& rows = KernelsFor(Isa::kScalar)->*format.rows;
    const double unit = std::ldexp(1.0, -format.mantissa_bits);
    for (const bool of_gradient : {false, true}) {
      std::mt19937 random(4);
      std::uniform_real_distribution<float> uniform(1.0f, 2.0f);
      double error = 0;
      for (size_t i = 0; i < kValues; ++i) {
        const float drawn = uniform(random);
        const auto value = of_gradient ? static_cast<float>(1.0 + 0.4 * unit) : drawn;
        const float gradient = of_gradient ? drawn : 0.25f;
        uint16_t written;
        float read;
        rows.write_stochastic(&written, &value, &gradient, 1);
        rows.read(&read, &written, 1);
        error += double{read} - double{value};
      }
      EXPECT_LT(std::abs(error / kValues), 5 * 0.5 * unit / std::sqrt(double{kValues}));
    }
  }
}

TEST(NarrowRows, AllVariantsWriteTheSameBits) {
  std::mt19937 random(8);
  std::vector<float> values(50'003);
  for (float& value : values) {
    auto bits = static_cast<uint32_t>(random());
    // Every second one of a weight's size.
    if (random() % 2 == 0) bits = (bits & 0x87ffffffu) | 0x38000000u;
    value = std::bit_cast<float>(bits);
  }
  for (const Format& format : kFormats) {
    const NarrowRows& scalar = KernelsFor(Isa::kScalar)->*format.rows;
    for (const Isa isa : kIsas) {
      const Kernels* kernels = KernelsFor(isa);
      if (kernels == nullptr) continue;
      const NarrowRows& rows = kernels->*format.rows;
      for (const bool by_chance : {false, true}) {
        for (const size_t n : {size_t{0}, size_t{1}, size_t{16}, size_t{19}, values.size() - 3}) {
          const std::vector<float> part(values.begin() + 3,
                                        values.begin() + 3 + static_cast<ptrdiff_t>(n));
          ASSERT_EQ(Written(rows, by_chance, part), Written(scalar, by_chance, part))
              << kernels->name << " " << n;
        }
      }
    }
  }
}

// Rows of both kinds with the same values, at numbers drawn at random.
struct RowsOfBothKinds {
  static constexpr size_t kRows = 7, kCount = 40, kWidest = 128;

  RowsOfBothKinds(const Format& format, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& value : wide) value = normal(random);
    const NarrowRows& scalar = KernelsFor(Isa::kScalar)->*format.rows;
    auto* narrow = reinterpret_cast<uint16_t*>(memory.data());
    scalar.write(narrow, wide.data(), wide.size());
    // What rows can have beside ordinary numbers: a denormal of float16, the least, the greatest.
    for (const uint16_t pattern : {uint16_t{0x83ff}, uint16_t{1}, uint16_t{0x7bff}}) {
      narrow[random() % wide.size()] = pattern;
    }
    scalar.read(wide.data(), narrow, wide.size());
    for (size_t i = 0; i < kRows; ++i) {
      wide_rows.push_back(wide.data() + i * kWidest);
      narrow_rows.push_back(memory.data() + i * kWidest / 2);
    }
    for (uint32_t& number : numbers) number = static_cast<uint32_t>(random() % kRows);
    for (float& factor : factors) factor = normal(random);
  }

  std::vector<float> wide = std::vector<float>(kRows * kWidest);
  std::vector<float> memory = std::vector<float>(kRows * kWidest / 2);
  std::vector<const float*> wide_rows, narrow_rows;
  std::array<uint32_t, kCount> numbers;
  std::array<float, kRows> factors;
};

// pool(pooling, rows) with rows of 16 bits gives what it gives with rows of float32, in every
// variant.
template <typename Pool>
void ExpectAsWithFloat32(const Format& format, const RowsOfBothKinds& rows, Pool pool) {
  const std::vector<float> expected = pool(KernelsFor(Isa::kScalar)->pooling, rows.wide_rows);
  for (const Isa isa : kIsas) {
    const Kernels* kernels = KernelsFor(isa);
    if (kernels == nullptr) continue;
    ASSERT_EQ(pool((kernels->*format.rows).pooling, rows.narrow_rows), expected) << kernels->name;
  }
}

TEST(NarrowRows, AreReadAlikeByAllVariants) {
  for (const Format& format : kFormats) {
    const RowsOfBothKinds rows(format, 9);
    for (const Isa isa : kIsas) {
      const Kernels* kernels = KernelsFor(isa);
      if (kernels == nullptr) continue;
      for (const size_t n : {1, 7, 8, 16, 17, 33, 64, 128}) {
        for (size_t i = 0; i < rows.narrow_rows.size(); ++i) {
          std::vector<float> found(n);
          (kernels->*format.rows)
              .read(found.data(), reinterpret_cast<const uint16_t*>(rows.narrow_rows[i]), n);
          ASSERT_EQ(found, std::vector<float>(rows.wide_rows[i], rows.wide_rows[i] + n))
              << kernels->name << " " << n;
        }
      }
    }
  }
}

// The one NaN that rows have stays a NaN of the same bits in all variants.
TEST(NarrowRows, TheirNanIsReadAlikeByAllVariants) {
  for (const Format& format : kFormats) {
    const std::vector<float> nans(16, std::numeric_limits<float>::quiet_NaN());
    const auto written = Written(KernelsFor(Isa::kScalar)->*format.rows, false, nans);
    const auto bits_by = [&](const Kernels& kernels) {
      std::vector<float> read(nans.size());
      (kernels.*format.rows).read(read.data(), written.data(), read.size());
      std::vector<uint32_t> bits;
      for (const float value : read) bits.push_back(std::bit_cast<uint32_t>(value));
      return bits;
    };
    for (const Isa isa : kIsas) {
      const Kernels* kernels = KernelsFor(isa);
      if (kernels == nullptr) continue;
      ASSERT_EQ(bits_by(*kernels), bits_by(*KernelsFor(Isa::kScalar))) << kernels->name;
      EXPECT_TRUE(std::isnan(std::bit_cast<float>(bits_by(*kernels)[0])));
    }
  }
}

TEST(NarrowRows, ColumnsAreCopiedAsThoseOfFloat32) {
  for (const Format& format : kFormats) {
    const RowsOfBothKinds rows(format, 9);
    for (const auto& [first, second] : {std::pair<size_t, size_t>{8, 8},
                                        {16, 16},
                                        {32, 32},
                                        {64, 64},
                                        {128, 128},
                                        {5, 33},
                                        {1, 16}}) {
      // Copies: clang 14 does not capture structured bindings.
      const auto copy = [&, first = first, second = second](const Pooling& pooling,
                                                            const auto& pointers) {
        const std::array<ColumnSource, 2> sources = {
            {{pointers.data(), rows.numbers.data(), first},
             {pointers.data(), rows.numbers.data(), second}}};
        std::vector<float> out(rows.numbers.size() * (first + second));
        pooling.copy_columns(out.data(), first + second, sources.data(), 2, rows.numbers.size());
        return out;
      };
      ExpectAsWithFloat32(format, rows, copy);
    }
  }
}

// Large enough to be written past the cache, which aligned matrices of wide rows are.
TEST(NarrowRows, LargeMatricesAreCopiedAsThoseOfFloat32) {
  constexpr size_t kWidth = 128, kSamples = 40'000;
  for (const Format& format : kFormats) {
    const RowsOfBothKinds rows(format, 9);
    std::vector<uint32_t> numbers(kSamples);
    for (size_t i = 0; i < kSamples; ++i) numbers[i] = rows.numbers[i % rows.numbers.size()];
    ExpectAsWithFloat32(format, rows, [&](const Pooling& pooling, const auto& pointers) {
      const ColumnSource source = {pointers.data(), numbers.data(), kWidth};
      std::vector<float> memory(kSamples * kWidth + 16);
      float* out = memory.data() + 16 - reinterpret_cast<uintptr_t>(memory.data()) / 4 % 16;
      pooling.copy_columns(out, kWidth, &source, 1, kSamples);
      return std::vector<float>(out, out + kSamples * kWidth);
    });
  }
}

TEST(NarrowRows, BagsAreSummedAsThoseOfFloat32) {
  constexpr std::array<uint32_t, 6> kOffsets = {0, 1, 1, 20, 39, 40};
  for (const Format& format : kFormats) {
    const RowsOfBothKinds rows(format, 10);
    for (const size_t n : {1, 8, 16, 19, 32, 64, 100, 128}) {
      ExpectAsWithFloat32(format, rows, [&](const Pooling& pooling, const auto& pointers) {
        std::vector<float> out((kOffsets.size() - 1) * n);
        pooling.sum_bags(out.data(), n, pointers.data(), rows.numbers.data(), kOffsets.data(), 1,
                         kOffsets.size() - 1, n);
        return out;
      });
      ExpectAsWithFloat32(format, rows, [&](const Pooling& pooling, const auto& pointers) {
        std::vector<float> out(rows.numbers.size() * n);
        pooling.copy_rows(out.data(), n, pointers.data(), rows.numbers.data(), rows.numbers.size(),
                          n);
        return out;
      });
      for (const float* factors : {static_cast<const float*>(nullptr), rows.factors.data()}) {
        ExpectAsWithFloat32(format, rows, [&](const Pooling& pooling, const auto& pointers) {
          std::vector<float> out(n);
          pooling.sum_scaled(out.data(), pointers.data(), factors, pointers.size(), n);
          return out;
        });
      }
    }
  }
}

}  // namespace
}  // namespace persia::simd
