#include "base/metrics.h"

#include <bit>
#include <cmath>

#include "base/hash.h"

namespace persia {

// For tests and status code; exporters walk the list.
uint64_t Metrics::operator[](std::string_view key) const {
  for (const Metric& metric : list_) {
    if (metric.info.key == key) return metric.value;
  }
  return 0;
}

void CounterList::AddTo(Metrics* metrics) const {
  for (const Counter* counter : counters_) metrics->Add(counter->info(), counter->value());
}

void Cardinality::Add(std::span<const uint64_t> numbers) {
  for (const uint64_t number : numbers) {
    // IDs are not random, and the estimate needs bits that are.
    const uint64_t hash = SignHash(number);
    std::atomic<uint8_t>& reg = registers_[hash >> (64 - kBits)];
    // The bit below the hash's own ends the run.
    const uint64_t rest = hash << kBits | uint64_t{1} << (kBits - 1);
    const auto rank = static_cast<uint8_t>(std::countl_zero(rest) + 1);
    uint8_t seen = reg.load(std::memory_order_relaxed);
    while (seen < rank && !reg.compare_exchange_weak(seen, rank, std::memory_order_relaxed)) {
    }
  }
}

double Cardinality::Estimate() const {
  const auto size = static_cast<double>(registers_.size());
  double sum = 0;
  int num_empty = 0;
  for (const auto& reg : registers_) {
    const int rank = reg.load(std::memory_order_relaxed);
    sum += std::ldexp(1.0, -rank);
    num_empty += rank == 0 ? 1 : 0;
  }
  const double estimate = 0.7213 / (1 + 1.079 / size) * size * size / sum;
  // The paper's bound: below it registers are empty often enough that counting those is more exact.
  if (estimate > 2.5 * size || num_empty == 0) return estimate;
  return size * std::log(size / num_empty);
}

}  // namespace persia
