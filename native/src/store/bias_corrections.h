// BiasCorrections: Adam's corrections by a row's step count, tabulated, as two powers a row would
// cost more than the row.
//
// Rules with equal betas share a table: a learning-rate schedule, which makes new rules again and
// again, must not compute it anew. Immutable, hence thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace persia::store {

class BiasCorrections {
 public:
  struct Correction {
    double first;        // 1 - beta1^step
    float second_scale;  // 1 / sqrt(1 - beta2^step)
  };

  // Thread-safe.
  static std::shared_ptr<const BiasCorrections> For(float beta1, float beta2);
  BiasCorrections(float beta1, float beta2);

  // Of steps 1, 2, ...
  std::span<const Correction> table() const { return table_; }
  // step >= 1
  Correction Of(uint32_t step) const {
    return step <= table_.size() ? table_[step - 1] : Compute(step);
  }

 private:
  Correction Compute(uint32_t step) const;

  const double beta1_, beta2_;
  std::vector<Correction> table_;
};

}  // namespace persia::store
