// What a training job tells every parameter server once: how rows begin and how they are updated.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/optimizer_config.h"
#include "base/status.h"

namespace persia {

// The numbers are part of the wire format and of checkpoints.
enum class InitializerKind : uint8_t { kUniform = 0, kNormal = 1 };
inline constexpr uint32_t kNumInitializerKinds = 2;

// How the values of a new row are drawn: a function of (seed, sign, element), and of the dim with
// `scaled_by_dim`.
struct Initializer {
  // Uniform: in [lower, upper), or all `lower` where the two are equal: a constant.
  // Normal: restricted to [lower, upper], which may be infinite.
  float lower = -0.01f;
  float upper = 0.01f;
  uint64_t seed = 0;
  InitializerKind kind = InitializerKind::kUniform;
  float mean = 0.0f;    // normal
  float stddev = 0.0f;  // normal, above 0
  // Divides all values by sqrt(dim): Xavier's rule for rows of any dim.
  bool scaled_by_dim = false;
  bool operator==(const Initializer&) const = default;

  // kInvalidArgument names the field as "initializer.<field>".
  Status Validate() const;
};

// What holds for the rows of one feature group.
// Everything that decides the values of a row. Two stores with equal configs, fed the same batches,
// have equal rows to the last bit.
struct RowConfig {
  Initializer initializer;
  OptimizerConfig optimizer;
  // Of giving an unseen sign a row; decided by the sign, not by chance.
  float admit_probability = 1.0f;
  // An unseen sign gets a row in the training batch that has it for the admit_after-th time; 1 is
  // the first. Counted approximately, in bounded memory (store/admission_filter.h).
  uint32_t admit_after = 1;
  // Every element is clamped to [-bound, bound] after an update; 0: off.
  float weight_bound = 10.0f;
  // Seconds after the last training batch with a row at which it may go; 0: never.
  float time_to_live_sec = 0.0f;
  // Rows whose embedding has a smaller Euclidean norm go when a checkpoint begins; 0: none.
  float min_norm = 0.0f;
  // Rows of the group in each store, the least recently used of which make room for new ones; 0: no
  // limit but the store's. Of groups alone.
  uint64_t capacity = 0;
  bool operator==(const RowConfig&) const = default;

  Status Validate() const;
};

// What a slot has of its own; the rest is the job's.
// A field that is empty has the job's value. All slots of a feature group must have equal ones,
// because they share rows.
struct SlotRowConfig {
  std::optional<OptimizerConfig> optimizer;
  std::optional<Initializer> initializer;  // but for the seed, which is the job's
  std::optional<float> admit_probability;
  std::optional<uint32_t> admit_after;
  std::optional<float> weight_bound;
  std::optional<float> time_to_live_sec;
  std::optional<float> min_norm;
  std::optional<uint64_t> capacity;
  bool operator==(const SlotRowConfig&) const = default;

  bool IsEmpty() const { return *this == SlotRowConfig(); }
  // `lr_factor` is what the job's learning-rate schedule multiplies the slot's own rate by.
  // The capacity is not inherited: the job has none, only groups have.
  RowConfig Over(const RowConfig& job, float lr_factor) const;
};

// A feature group with a config of its own. Its number stands in the top bits of its rows' signs.
struct GroupConfig {
  uint32_t group = 0;
  RowConfig rows;
  bool operator==(const GroupConfig&) const = default;
};

// Servers find a row's policy in a table by group number, which this keeps small.
inline constexpr uint32_t kMaxGroupNumber = 65535;
// Appearances are counted in eight bits.
inline constexpr uint32_t kMaxAdmitAfter = 255;

// The RowConfig that it is holds for all rows but those of `groups`. A script's config has no
// groups: embedding workers add them, from the slots of the embedding config.
struct TrainConfig : RowConfig {
  float lr_factor = 1.0f;                 // see SlotRowConfig::Over
  uint32_t feature_index_prefix_bit = 0;  // of the numbers below; 0: there are none
  std::vector<GroupConfig> groups;        // by rising number
  bool operator==(const TrainConfig&) const = default;

  // Also of all groups.
  Status Validate() const;
  // Of a feature group: its own or the common one.
  // A search through the groups: for configs. The store makes a table of it (store/row_policy.h)
  // for rows.
  const RowConfig& Of(uint32_t group) const;
  const RowConfig& OfSign(uint64_t sign) const {
    if (groups.empty()) return *this;
    return Of(static_cast<uint32_t>(sign >> (64 - feature_index_prefix_bit)));
  }
  // Whether any rows have a least norm.
  // If not, a checkpoint need not look at the norms of all rows.
  bool HasMinNorm() const;
  // The wire form (docs/wire_format.md), versioned and length-checked.
  std::vector<std::byte> Encode() const;
  // Also reads version 2, which older checkpoints have. kCorruption: not the form, or of an unknown
  // version; kInvalidArgument: a value that is not permitted. What it returns is valid.
  static StatusOr<TrainConfig> Decode(std::span<const std::byte> bytes);
};

}  // namespace persia
