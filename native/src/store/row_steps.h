// RowSteps: collects rows of one dim to be updated and has them updated some at a time, so that a
// row does not pay for a call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "store/embedding_store.h"
#include "store/row_policy.h"

namespace persia::store {

class RowSteps {
 public:
  // Counts into *report. Flush() before the end.
  RowSteps(uint32_t dim, UpdateReport* report) : dim_(dim), report_(report) {}

  void Add(const RowPolicy& policy, const RowView& row, const float* gradient) {
    if (policy_ != &policy) {
      Flush();
      policy_ = &policy;
    }
    steps_[count_++] = {row.values, row.state, gradient, row.scalar, 0.0f, 0.0f};
    if (count_ == steps_.size()) Flush();
  }
  void Flush() {
    if (count_ == 0) return;
    const size_t num_left = policy_->ApplyGradients(std::span(steps_).first(count_), dim_);
    report_->num_updated += count_ - num_left;
    report_->num_nonfinite += num_left;
    count_ = 0;
  }

 private:
  const RowPolicy* policy_ = nullptr;  // of the rows that wait
  const uint32_t dim_;
  UpdateReport* report_;
  size_t count_ = 0;
  std::array<simd::RowStep, 32> steps_;
};

}  // namespace persia::store
