// Draw: whether a request is of a share. Thread-safe.
#pragma once

#include <atomic>
#include <string>
#include <string_view>
#include <utility>

namespace persia::serving {

// Servers agree about equal IDs, and a larger share contains a smaller one. Draws for different
// purposes are independent of each other.
class Draw {
 public:
  Draw(std::string purpose, double share) : purpose_(std::move(purpose)), share_(share) {}
  Draw(const Draw&) = delete;

  // From 0 to 1.
  double share() const { return share_.load(std::memory_order_relaxed); }
  void set_share(double share) { share_.store(share, std::memory_order_relaxed); }
  // `id`: of the request; without one it is left to chance.
  bool Takes(std::string_view id) const;

 private:
  const std::string purpose_;
  std::atomic<double> share_;
};

// For draws of one request without an ID that are to agree.
std::string RandomId();

}  // namespace persia::serving
