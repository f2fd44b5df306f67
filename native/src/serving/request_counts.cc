#include "serving/request_counts.h"

#include <algorithm>
#include <chrono>

namespace persia::serving {

void RequestCounts::Add(TimePoint begin, GrpcCode code) {
  using std::chrono::duration_cast;
  const TimePoint end = std::chrono::steady_clock::now();
  durations_.Record(begin, end);
  const auto took = std::max(end - begin, TimePoint::duration::zero());
  const auto took_ns = duration_cast<std::chrono::nanoseconds>(took).count();
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  const std::lock_guard lock(mutex_);
  ++counts_.by_code[std::min(static_cast<uint32_t>(code), kNumGrpcCodes - 1)];
  (code == GrpcCode::kOk ? counts_.ok_ns : counts_.failed_ns) += static_cast<uint64_t>(took_ns);
  counts_.last_ms = duration_cast<std::chrono::milliseconds>(since_1970).count();
}

RequestCounts::Snapshot RequestCounts::snapshot() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace persia::serving
