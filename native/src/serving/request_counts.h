// RequestCounts: what became of the requests for predictions. Thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>

#include "base/duration_stats.h"

namespace persia::serving {

// Status codes of gRPC that this layer gives.
enum class GrpcCode : uint32_t {
  kOk = 0,
  kCancelled = 1,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kResourceExhausted = 8,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};
inline constexpr uint32_t kNumGrpcCodes = 17;

class RequestCounts {
 public:
  using TimePoint = DurationStats::TimePoint;

  struct Snapshot {
    std::array<uint64_t, kNumGrpcCodes> by_code{};
    uint64_t ok_ns = 0;
    uint64_t failed_ns = 0;
    int64_t last_ms = 0;  // since 1970; 0: none
  };

  explicit RequestCounts(std::string name) : durations_(std::move(name)) {}

  // A request that arrived at `begin` has its answer now. `code` is one of gRPC's.
  void Add(TimePoint begin, GrpcCode code);
  // All numbers are of one moment.
  Snapshot snapshot() const;
  const DurationStats& durations() const { return durations_; }

 private:
  DurationStats durations_;
  mutable std::mutex mutex_;
  Snapshot counts_;
};

}  // namespace persia::serving
