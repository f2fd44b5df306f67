// What the train config means for rows: their shape, admission, first values and optimizer steps.
// RowPolicy is that of one feature group, RowPolicies those of all groups, RowSteps applies them to
// many rows at a time.
//
// Policies are immutable. A store that is configured anew makes new ones and exchanges the pointer
// in each shard, with all calls kept out: whoever holds a shard's mutex may use its policies.
//
// Whatever a policy decides about a row, it decides by the sign and the config alone, so that every
// server, every thread and every run decides alike.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/train_config.h"
#include "simd/kernels.h"
#include "store/row_slabs.h"
#include "store/sign_index.h"
#include "store/types.h"

namespace persia::store {

// Adam's bias corrections by a row's step count (Kingma and Ba, 2015, algorithm 1, where t is the
// row's own). They are tabulated: two powers a row would cost more than the row.
//
// Policies with equal betas share a table: a learning-rate schedule, which makes new policies again
// and again, must not compute it anew. Immutable, hence thread-safe.
class BiasCorrections {
 public:
  struct Correction {
    double first;        // 1 - beta1^step
    float second_scale;  // 1 / sqrt(1 - beta2^step)
  };

  // The table of these betas, which lives as long as a policy uses it. Thread-safe.
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

// The policy of one feature group. Immutable, hence thread-safe: a change of configuration makes a
// new one.
class RowPolicy {
 public:
  explicit RowPolicy(const RowConfig& config, RowDtype dtype = RowDtype::kFloat32);

  // What a row consists of, without what features keep behind it (RowTable::ShapeOf). The same for
  // all configs that CheckChange() allows while rows exist.
  RowShape ShapeFor(uint32_t dim) const;
  // Decided by (seed, sign), so every server and every run decides alike.
  bool Admits(uint64_t sign) const;
  // Training batches that must have an admitted sign before it gets a row.
  uint32_t admit_after() const { return config_.admit_after; }
  // Seconds; 0: for ever.
  double time_to_live_sec() const { return config_.time_to_live_sec; }
  // Rows of the group in the whole store; 0: no limit but the store's.
  uint64_t capacity() const { return config_.capacity; }
  // Rows with smaller embeddings are removed by RemoveSmallRows(); 0: none.
  float min_norm() const { return config_.min_norm; }
  // Fills a new row: values by (seed, sign), rounded to nearest where rows have 16 bits; state of
  // an optimizer that has not stepped.
  void Initialize(uint64_t sign, const RowView& row) const;
  // The state alone, for a row whose values are given.
  void InitializeState(const RowView& row) const;
  // One optimizer step for each of some rows of one dim, then the weight bound. A row whose
  // gradient is not finite is left as it is; returns how many were. The rest of `rows` is filled
  // here: w, state, g and scalar are given, w where the embedding lies. No row may be
  // named twice: rows of 16 bits are read for all steps before any is written.
  size_t ApplyGradients(std::span<simd::RowStep> rows, uint32_t dim) const;

 private:
  // The row's stream of random numbers, by (seed, sign).
  uint64_t StreamOf(uint64_t sign) const;
  void DrawValues(uint64_t sign, uint32_t dim, float* values) const;
  size_t Step(std::span<const simd::RowStep> rows, uint32_t dim) const;
  // The same where the embeddings of `rows` are of 16 bits: through float32 and back.
  size_t StepNarrow(std::span<const simd::RowStep> rows, uint32_t dim) const;
  // Counts the rows' steps and fills in what Adam's kin need of them.
  void CountSteps(std::span<simd::RowStep> rows, uint32_t dim) const;

  const RowConfig config_;
  const RowFormat format_;
  const float weight_bound_;  // 0: none
  const simd::Kernels& kernels_;
  const simd::NormalRule normal_;  // of initial values, unscaled
  const simd::UpdateRows update_;
  std::shared_ptr<const BiasCorrections> corrections_;  // Adam and its kin, else null
  std::vector<float> step_sizes_;                       // of the corrections' table
};

// The policies of all feature groups of a train config.
//
// A row's policy follows from its sign, whose top bits are its group's number: nothing is kept in
// the row (ADR 8). Immutable, hence thread-safe.
class RowPolicies {
 public:
  // `dtype` is that of the rows; policies that are only checked need none.
  explicit RowPolicies(const TrainConfig& config, RowDtype dtype = RowDtype::kFloat32);

  // The policy of the sign's group. For every row of a batch: two loads where groups have policies
  // of their own, else none.
  const RowPolicy& Of(uint64_t sign) const {
    if (by_group_.empty()) return policies_[0];
    const uint64_t group = sign >> sign_shift_;
    return group < by_group_.size() ? *by_group_[group] : policies_[0];
  }
  const RowPolicy& OfKey(uint64_t key) const {
    return by_group_.empty() ? policies_[0] : Of(SignOfKey(key));
  }
  uint32_t GroupOfKey(uint64_t key) const {
    return by_group_.empty() ? 0 : static_cast<uint32_t>(SignOfKey(key) >> sign_shift_);
  }
  // Groups with a capacity of their own, by rising number.
  std::vector<std::pair<uint32_t, uint64_t>> capacities() const;
  // Whether any group counts how often it sees a sign.
  bool CountsSightings() const;
  // Seconds, of any group; 0: all rows stay.
  double ShortestTimeToLive() const;

 private:
  std::deque<RowPolicy> policies_;          // the common ones first
  std::vector<const RowPolicy*> by_group_;  // empty where all rows have the common ones
  uint32_t sign_shift_ = 0;
};

// Whether a store with rows may change from one train config to another. Whatever shapes a row or
// gives its state a meaning is fixed: kFailedPrecondition names the field, and the feature group
// where it has a config of its own. What only steers the next step may change where `replace` asks
// for it.
Status CheckChange(const TrainConfig& old_config, const TrainConfig& new_config, bool replace);

// Collects rows of one dim and steps them some at a time, so that a row does not pay for a call of
// the optimizer's kernel. Rows must stay where they are until Flush(), and the policies must live
// as long. A row may be added once.
class RowSteps {
 public:
  // Counts into *report. Flush() before the end.
  RowSteps(uint32_t dim, UpdateReport* report) : dim_(dim), report_(report) {}

  // `gradient` is read by Flush() at the latest, and must stay until then.
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
