// Kernels that go between rows and the matrices and bags of a batch, in every variant.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "simd/kernels.h"

namespace persia::simd {
namespace {

// Small, and so large that it is written past the cache; aligned and not.
TEST(ColumnsTest, CopyAndAddGoBetweenRowsAndTheColumnsOfAMatrix) {
  std::mt19937 random(4);
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon}) {
    const Kernels* k = KernelsFor(isa);
    if (k == nullptr) continue;
    for (const size_t n : {5, 8, 16, 32, 64, 128}) {
      for (const size_t count : {size_t{3}, (size_t{20} << 20) / (2 * n * sizeof(float))}) {
        for (const size_t offset : {0, 1}) {
          SCOPED_TRACE(testing::Message()
                       << k->name << " " << n << " x " << count << "+" << offset);
          constexpr size_t kRows = 7;
          std::vector<float> memory(2 * n * count + 32), rows(kRows * n);
          auto* aligned =
              reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
          float* out = aligned + offset;
          for (float& value : rows) value = static_cast<float>(random() % 16);
          std::vector<const float*> pointers;
          for (size_t i = 0; i < kRows; ++i) pointers.push_back(&rows[i * n]);
          std::vector<uint32_t> numbers[2];
          for (auto& list : numbers) {
            for (size_t i = 0; i < count; ++i) list.push_back(random() % kRows);
          }
          const ColumnSource sources[2] = {{pointers.data(), numbers[0].data(), n},
                                           {pointers.data(), numbers[1].data(), n}};
          k->pooling.copy_columns(out, 2 * n, sources, 2, count);
          std::vector<float> expected(2 * kRows * n), sums(2 * kRows * n);
          for (size_t i = 0; i < count; ++i) {
            for (size_t s = 0; s < 2; ++s) {
              const float* row = pointers[numbers[s][i]];
              ASSERT_EQ(std::memcmp(out + (2 * i + s) * n, row, n * sizeof(float)), 0);
              for (size_t j = 0; j < n; ++j)
                expected[(s * kRows + numbers[s][i]) * n + j] += row[j];
            }
          }
          const ColumnSums columns[2] = {{sums.data(), numbers[0].data(), n},
                                         {sums.data() + kRows * n, numbers[1].data(), n}};
          k->add_columns(out, 2 * n, columns, 2, count);
          ASSERT_EQ(sums, expected);  // of small whole numbers: exact
        }
      }
    }
  }
}

// Bags of none, one and many rows, which repeat. Sums of such floats have other bits in another
// order, and those of -0.0 if they begin with 0.0.
TEST(ColumnsTest, AddBagsAddsEachBagToItsRows) {
  constexpr uint32_t kSumRows = 7;
  const std::vector<uint32_t> offsets = {0, 1, 1, 5, 40, 40, 41};
  const size_t num_bags = offsets.size() - 1;
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon}) {
    const Kernels* k = KernelsFor(isa);
    if (k == nullptr) continue;
    for (const size_t n : {1, 3, 5, 8, 16, 17, 32, 33, 40, 64, 128, 200}) {
      for (const size_t rounds : {1, 2}) {
        for (const bool has_offsets : {true, false}) {
          SCOPED_TRACE(testing::Message() << k->name << " " << n << " " << rounds << has_offsets);
          const size_t stride = n + 3;
          std::vector<float> values(num_bags * stride);
          for (float& value : values) value = random() % 8 == 0 ? -0.0f : normal(random);
          std::vector<uint32_t> numbers(offsets.back() * rounds);
          for (uint32_t& number : numbers) number = random() % kSumRows;
          std::vector<float> sums(kSumRows * n, -0.0f), expected = sums;
          for (size_t bag = 0; bag < num_bags; ++bag) {
            const size_t begin = (has_offsets ? offsets[bag] : bag) * rounds;
            const size_t end = (has_offsets ? offsets[bag + 1] : bag + 1) * rounds;
            for (size_t i = begin; i < end; ++i) {
              for (size_t j = 0; j < n; ++j)
                expected[numbers[i] * n + j] += values[bag * stride + j];
            }
          }
          k->add_bags(sums.data(), values.data(), stride, numbers.data(),
                      has_offsets ? offsets.data() : nullptr, rounds, num_bags, n);
          ASSERT_EQ(std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(float)), 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace persia::simd
