// float16 and bfloat16 against their definitions: widening by the formula of the format for all
// 65,536 patterns, narrowing against the nearest pattern, and every variant against the scalar one.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
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
};
const Format kFormats[] = {
    {5, 10, &Kernels::float_to_half, &Kernels::half_to_float},
    {8, 7, &Kernels::float_to_bfloat16, &Kernels::bfloat16_to_float},
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

}  // namespace
}  // namespace persia::simd
