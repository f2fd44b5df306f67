// The traffic that the benchmarks of this folder share: Criteo Kaggle's vocabularies under a
// bounded Zipf(1.1) law, as benchmarks/workload.py has it.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "base/hash.h"

namespace persia::bench {

inline constexpr std::array<uint64_t, 26> kCriteoKaggle = {
    1460, 583,   10131227, 2202608, 305,  24,   12517, 633,     3,  93145, 5683,   8351593, 3194,
    27,   14992, 5461306,  10,      5652, 2173, 4,     7046547, 18, 15,    286181, 105,     142572};

// By inverting the integral of the law's density; rank 0 is the most frequent. Not for 1.
inline uint64_t ZipfRank(double uniform, uint64_t num_ranks, double exponent = 1.1) {
  const double power = 1 - exponent;
  const double mass = std::pow(static_cast<double>(num_ranks) + 1, power) - 1;
  const double rank = std::pow(1 + uniform * mass, 1 / power) - 1;
  return std::min(static_cast<uint64_t>(rank), num_ranks - 1);
}

// Neither the size nor the order of an ID tells its rank.
inline uint64_t IdOf(uint64_t slot, uint64_t rank) { return SignHash(slot << 40 | rank); }

// All IDs of a slot in the order in which independent draws of the law bring them for the first
// time: frequent ones get neighbouring rows, as in a table that has grown with its traffic. An ID
// of probability p first comes after a time that is exponential with rate p, so sorting such times
// is exact.
inline std::vector<uint64_t> IdsByArrival(uint64_t slot, uint64_t num_ranks) {
  std::mt19937_64 random(2 + slot);
  std::exponential_distribution<double> exponential;
  std::vector<std::pair<double, uint64_t>> arrivals(num_ranks);
  for (uint64_t rank = 0; rank < num_ranks; ++rank) {
    const auto begin = static_cast<double>(rank + 1);
    const double probability = std::pow(begin, 1 - 1.1) - std::pow(begin + 1, 1 - 1.1);
    arrivals[rank] = {exponential(random) / probability, IdOf(slot, rank)};
  }
  std::sort(arrivals.begin(), arrivals.end());
  std::vector<uint64_t> ids(num_ranks);
  for (uint64_t i = 0; i < num_ranks; ++i) ids[i] = arrivals[i].second;
  return ids;
}

struct Batch {
  std::vector<uint64_t> values;  // slot after slot
  std::vector<int64_t> lengths;  // [slots, batch_size]
};

// `mean_ids` of 0: exactly one ID a sample, else a Poisson law. `is_bounded`: IDs are taken modulo
// the vocabulary's size, so some are the same.
inline std::vector<Batch> MakeBatches(const std::vector<uint64_t>& vocabularies, size_t batch_size,
                                      size_t count, double mean_ids, uint64_t seed = 1,
                                      bool is_bounded = false) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::poisson_distribution<int64_t> poisson(std::max(mean_ids, 1e-9));
  std::vector<Batch> batches(count);
  for (Batch& batch : batches) {
    for (size_t slot = 0; slot < vocabularies.size(); ++slot) {
      for (size_t sample = 0; sample < batch_size; ++sample) {
        const int64_t length = mean_ids == 0 ? 1 : poisson(random);
        batch.lengths.push_back(length);
        for (int64_t i = 0; i < length; ++i) {
          const uint64_t id = IdOf(slot, ZipfRank(uniform(random), vocabularies[slot]));
          batch.values.push_back(is_bounded ? id % vocabularies[slot] : id);
        }
      }
    }
  }
  return batches;
}

}  // namespace persia::bench
