#include "store/row_policy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace persia::store {
namespace {

// With beta2 = 0.999 the corrections are 1 in float from step 17,000 on.
constexpr uint32_t kTabulatedSteps = 1 << 14;

// SplitMix64's finaliser: every input bit reaches every output bit.
uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The thread's; of the last call alone.
// Only ever grows, to the widest row of the thread.
float* Scratch(size_t num_floats) {
  thread_local std::vector<float> scratch;
  if (scratch.size() < num_floats) scratch.resize(num_floats);
  return scratch.data();
}

// The standard normal distribution's area below `x`, by bisection of the kernels' own quantile:
// libm's erfc may differ between machines, and with it the initial values.
double NormalArea(double x, double (*quantile)(double)) {
  double low = 0.0, high = 1.0;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    // Near 0 and 1 the middle is rounded to them, where there is no quantile.
    if (middle <= 0.0 || middle >= 1.0) return middle;
    (quantile(middle) < x ? low : high) = middle;
  }
  return low;
}

simd::NormalRule NormalRuleOf(const Initializer& init, double (*quantile)(double)) {
  simd::NormalRule rule = {.mean = init.mean,
                           .stddev = init.stddev,
                           .lower = init.lower,
                           .upper = init.upper,
                           .first = 0.0,
                           .span = 1.0};
  if (init.kind != InitializerKind::kNormal) return rule;
  const auto area = [&](float bound, double infinite) {
    return std::isinf(bound) ? infinite
                             : NormalArea((double{bound} - rule.mean) / rule.stddev, quantile);
  };
  rule.first = area(init.lower, 0.0);
  rule.span = area(init.upper, 1.0) - rule.first;
  return rule;
}

// The first such field that differs, or nothing.
std::string OptimizerFieldThatDiffers(const OptimizerConfig& a, const OptimizerConfig& b,
                                      bool is_fixed) {
  for (const OptimizerField& field : OptimizerFields()) {
    if (field.is_fixed == is_fixed && a.*field.member != b.*field.member) {
      return "optimizer." + std::string(field.name);
    }
  }
  return {};
}

std::string FixedFieldThatDiffers(const RowConfig& a, const RowConfig& b) {
  if (a.initializer != b.initializer) return "initializer";
  if (a.optimizer.kind != b.optimizer.kind) return "optimizer.kind";
  return OptimizerFieldThatDiffers(a.optimizer, b.optimizer, /*is_fixed=*/true);
}

std::string ReplaceableFieldThatDiffers(const RowConfig& a, const RowConfig& b) {
  const std::string field = OptimizerFieldThatDiffers(a.optimizer, b.optimizer, false);
  if (!field.empty()) return field;
  if (a.weight_bound != b.weight_bound) return "weight_bound";
  if (a.admit_after != b.admit_after) return "admit_after";
  if (a.time_to_live_sec != b.time_to_live_sec) return "time_to_live_sec";
  if (a.min_norm != b.min_norm) return "min_norm";
  if (a.capacity != b.capacity) return "capacity";
  return a.admit_probability != b.admit_probability ? "admit_probability" : "";
}

// `where` begins the message: the feature group, or nothing for the common config.
Status CheckRows(const std::string& where, const RowConfig& old_rows, const RowConfig& new_rows,
                 bool replace) {
  if (const auto field = FixedFieldThatDiffers(old_rows, new_rows); !field.empty()) {
    return FailedPrecondition(where, field,
                              " differs from the configuration that the existing rows were made "
                              "with; clear the rows first, or use the same");
  }
  const auto field = ReplaceableFieldThatDiffers(old_rows, new_rows);
  if (replace || field.empty()) return Status::Ok();
  return FailedPrecondition(where, field,
                            " differs from the configuration in use; ask for a replacement to "
                            "change it while there are rows, or use the same");
}

}  // namespace

// A map of weak pointers: a table lives as long as a policy that uses it, also across a change of
// config.
std::shared_ptr<const BiasCorrections> BiasCorrections::For(float beta1, float beta2) {
  static std::mutex mutex;
  static std::map<std::pair<float, float>, std::weak_ptr<const BiasCorrections>> tables;
  const std::lock_guard lock(mutex);
  // Entries of tables that are no longer used.
  std::erase_if(tables, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const BiasCorrections>& known = tables[{beta1, beta2}];
  std::shared_ptr<const BiasCorrections> table = known.lock();
  if (table == nullptr) known = table = std::make_shared<const BiasCorrections>(beta1, beta2);
  return table;
}

BiasCorrections::BiasCorrections(float beta1, float beta2) : beta1_(beta1), beta2_(beta2) {
  table_.reserve(kTabulatedSteps);
  for (uint32_t step = 1; step <= kTabulatedSteps; ++step) table_.push_back(Compute(step));
}

// In double: 1 - beta2^t of a float would have lost half of its digits at the first steps.
BiasCorrections::Correction BiasCorrections::Compute(uint32_t step) const {
  return {.first = 1.0 - std::pow(beta1_, step),
          .second_scale = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2_, step)))};
}

RowPolicy::RowPolicy(const RowConfig& config, RowDtype dtype)
    : config_(config),
      format_(dtype),
      weight_bound_(format_.Bound(config.weight_bound)),
      kernels_(simd::ActiveKernels()),
      normal_(NormalRuleOf(config.initializer, kernels_.normal_quantile)),
      update_(kernels_.optimizer(config.optimizer)) {
  const OptimizerConfig& c = config_.optimizer;
  if (c.traits().scalar != RowScalar::kSteps) return;
  corrections_ = BiasCorrections::For(c.beta1, c.beta2);
  step_sizes_.reserve(corrections_->table().size());
  for (const auto& correction : corrections_->table()) {
    step_sizes_.push_back(static_cast<float>(double{c.lr} / correction.first));
  }
}

RowShape RowPolicy::ShapeFor(uint32_t dim) const {
  const OptimizerConfig& c = config_.optimizer;
  const bool is_in_scalar = c.traits().scalar == RowScalar::kAccumulator;
  return {.dim = dim,
          .state_floats = is_in_scalar ? 0 : c.StateFloats(dim),
          .has_scalar = c.HasScalar(),
          .dtype = format_.dtype()};
}

uint64_t RowPolicy::StreamOf(uint64_t sign) const {
  return Mix(Mix(config_.initializer.seed + 0x9e3779b97f4a7c15u) + sign);
}

// A number of 53 bits in [0, 1) by the sign, compared with the probability.
bool RowPolicy::Admits(uint64_t sign) const {
  if (config_.admit_probability >= 1.0f) return true;
  constexpr uint64_t kAdmission = 0xd1b54a32d192ed03u;  // apart from the initial values
  const uint64_t bits = Mix(StreamOf(sign) ^ kAdmission) >> 11;
  return static_cast<double>(bits) * 0x1p-53 < double{config_.admit_probability};
}

void RowPolicy::Initialize(uint64_t sign, const RowView& row) const {
  if (format_.narrow() == nullptr) {
    DrawValues(sign, row.dim, row.values);
  } else {
    float* values = Scratch(row.dim);
    DrawValues(sign, row.dim, values);
    format_.Write(row.values, values, row.dim);
  }
  InitializeState(row);
}

// The bounds are scaled like the distribution, so that a wider row has the same shape of values.
void RowPolicy::DrawValues(uint64_t sign, uint32_t dim, float* values) const {
  const Initializer& init = config_.initializer;
  const double scale = init.scaled_by_dim ? 1.0 / std::sqrt(static_cast<double>(dim)) : 1.0;
  const auto lower = static_cast<float>(scale * double{init.lower});
  const auto upper = static_cast<float>(scale * double{init.upper});
  if (init.kind == InitializerKind::kUniform) {
    kernels_.uniform(values, StreamOf(sign), lower, upper, dim);
  } else {
    simd::NormalRule rule = normal_;
    rule.mean *= scale;
    rule.stddev *= scale;
    rule.lower = lower;
    rule.upper = upper;
    kernels_.normal(values, StreamOf(sign), rule, dim);
  }
}

void RowPolicy::InitializeState(const RowView& row) const {
  const OptimizerConfig& optimizer = config_.optimizer;
  const float initial = optimizer.initial_accumulator_value;  // 0 unless Adagrad or FTRL
  const RowShape shape = ShapeFor(row.dim);
  std::fill_n(row.state, shape.state_floats, initial);
  std::fill_n(row.state, optimizer.traits().accumulator * row.dim, 0.0f);
  // Row-wise Adagrad's sum, or a count of steps, which is 0 like the bits of 0.0f.
  if (shape.has_scalar) *row.scalar = std::bit_cast<uint32_t>(initial);
}

size_t RowPolicy::ApplyGradients(std::span<simd::RowStep> rows, uint32_t dim) const {
  if (corrections_ != nullptr) CountSteps(rows, dim);
  return format_.narrow() == nullptr ? Step(rows, dim) : StepNarrow(rows, dim);
}

// Some rows at a time, as many as the first-level cache has room for beside their state.
size_t RowPolicy::StepNarrow(std::span<const simd::RowStep> rows, uint32_t dim) const {
  constexpr size_t kScratchFloats = 2048, kMaxRows = 32;
  const size_t rows_at_a_time = std::clamp<size_t>(kScratchFloats / dim, 1, kMaxRows);
  float* scratch = Scratch(rows_at_a_time * dim);
  std::array<simd::RowStep, kMaxRows> steps;
  size_t num_left = 0;
  while (!rows.empty()) {
    const auto block = rows.first(std::min(rows_at_a_time, rows.size()));
    for (size_t i = 0; i < block.size(); ++i) {
      steps[i] = block[i];
      steps[i].w = scratch + i * dim;
      format_.Read(steps[i].w, block[i].w, dim);
    }
    num_left += Step(std::span(steps).first(block.size()), dim);
    for (size_t i = 0; i < block.size(); ++i) {
      format_.narrow()->write_stochastic(reinterpret_cast<uint16_t*>(block[i].w), steps[i].w,
                                         block[i].g, dim);
    }
    rows = rows.subspan(block.size());
  }
  return num_left;
}

size_t RowPolicy::Step(std::span<const simd::RowStep> rows, uint32_t dim) const {
  return update_(config_.optimizer, rows.data(), rows.size(), dim, weight_bound_);
}

// A count that has reached its end stays there, where all corrections are 1 anyway.
void RowPolicy::CountSteps(std::span<simd::RowStep> rows, uint32_t dim) const {
  for (simd::RowStep& row : rows) {
    // A row that is left as it is makes no step.
    if (!kernels_.all_finite(row.g, dim)) continue;
    uint32_t& step = *row.scalar;
    if (step < UINT32_MAX) ++step;
    const BiasCorrections::Correction correction = corrections_->Of(step);
    row.second_scale = correction.second_scale;
    row.step_size = step <= step_sizes_.size()
                        ? step_sizes_[step - 1]
                        : static_cast<float>(double{config_.optimizer.lr} / correction.first);
  }
}

// A deque, whose elements never move: groups point to them.
RowPolicies::RowPolicies(const TrainConfig& config, RowDtype dtype) {
  policies_.emplace_back(config, dtype);
  if (config.groups.empty()) return;
  sign_shift_ = 64 - config.feature_index_prefix_bit;
  by_group_.assign(size_t{config.groups.back().group} + 1, &policies_[0]);
  for (const GroupConfig& group : config.groups) {
    by_group_[group.group] = &policies_.emplace_back(group.rows, dtype);
  }
}

bool RowPolicies::CountsSightings() const {
  return std::any_of(policies_.begin(), policies_.end(),
                     [](const RowPolicy& policies) { return policies.admit_after() > 1; });
}

std::vector<std::pair<uint32_t, uint64_t>> RowPolicies::capacities() const {
  std::vector<std::pair<uint32_t, uint64_t>> capacities;
  for (uint32_t group = 0; group < by_group_.size(); ++group) {
    const uint64_t capacity = by_group_[group]->capacity();
    if (capacity > 0) capacities.emplace_back(group, capacity);
  }
  return capacities;
}

double RowPolicies::ShortestTimeToLive() const {
  double shortest = 0;
  for (const RowPolicy& policies : policies_) {
    const double time_to_live = policies.time_to_live_sec();
    if (time_to_live > 0 && (shortest == 0 || time_to_live < shortest)) shortest = time_to_live;
  }
  return shortest;
}

Status CheckChange(const TrainConfig& old_config, const TrainConfig& new_config, bool replace) {
  const uint32_t old_bits = old_config.feature_index_prefix_bit;
  const uint32_t new_bits = new_config.feature_index_prefix_bit;
  if (old_bits != 0 && new_bits != 0 && old_bits != new_bits) {
    return FailedPrecondition("feature_index_prefix_bit was ", old_bits, " and is ", new_bits,
                              "; clear the rows first, or use the same");
  }
  PERSIA_RETURN_IF_ERROR(CheckRows("", old_config, new_config, replace));
  // Of both: a group that only one of them names is compared with the other's common config.
  std::set<uint32_t> groups;
  for (const TrainConfig* config : {&old_config, &new_config}) {
    for (const GroupConfig& group : config->groups) groups.insert(group.group);
  }
  for (const uint32_t group : groups) {
    const std::string where = "feature group " + std::to_string(group) + ": ";
    PERSIA_RETURN_IF_ERROR(CheckRows(where, old_config.Of(group), new_config.Of(group), replace));
  }
  return Status::Ok();
}

}  // namespace persia::store
