#include "base/train_config.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>

#include "base/bytes.h"

namespace persia {
namespace {

constexpr uint32_t kVersion = 3;
constexpr uint32_t kOldestVersion = 2;  // of checkpoints that can be read
constexpr size_t kHeadBytes = 16;

// Version 2 has no eviction but by the store's capacity.
// Each version of the format has one size of rows, so the length of a message tells whether it is
// whole.
constexpr size_t RowBytes(uint32_t version) { return version == 2 ? 112 : 128; }

constexpr std::string_view kSameVersion = ": use the same persia version everywhere";

Status Malformed(const auto&... what) { return Corruption("train config ", what..., kSameVersion); }

// Also refuses NaN, which every comparison lets through in one direction.
Status CheckRange(std::string_view field, float value, bool in_range, std::string_view range) {
  if (std::isfinite(value) && in_range) return Status::Ok();
  return InvalidArgument(field, " is ", value, "; give a value ", range);
}

// The order is the format of the wire and of checkpoints (docs/wire_format.md). Fields are
// appended, with a new version.
void PutRows(const RowConfig& config, ByteWriter* writer) {
  writer->Put(static_cast<uint32_t>(config.optimizer.kind));
  for (const OptimizerField& field : OptimizerFields()) {
    writer->Put(config.optimizer.*field.member);
  }
  const Initializer& init = config.initializer;
  writer->Put(static_cast<uint32_t>(init.kind) | (init.scaled_by_dim ? 0x100u : 0u));
  for (const float value : {init.lower, init.upper, init.mean, init.stddev}) writer->Put(value);
  writer->Put(config.admit_probability);
  writer->Put(config.admit_after);
  writer->Put(config.weight_bound);
  writer->Put(config.time_to_live_sec);
  writer->Put(init.seed);
  writer->Put(config.capacity);
  writer->Put(config.min_norm);
  writer->Put(uint32_t{0});
}

// The mirror of PutRows(). Kinds are checked before they become enums: everything behind indexes
// tables by them. Values are checked by Validate(), once the whole config is there.
StatusOr<RowConfig> GetRows(uint32_t version, ByteReader* reader) {
  RowConfig config;
  const auto kind = reader->Get<uint32_t>();
  if (kind >= kNumOptimizerKinds) return Malformed("has optimizer kind ", kind);
  config.optimizer.kind = static_cast<OptimizerKind>(kind);
  for (const OptimizerField& field : OptimizerFields()) {
    config.optimizer.*field.member = reader->Get<float>();
  }
  Initializer& init = config.initializer;
  const auto init_kind = reader->Get<uint32_t>();
  if ((init_kind & 0xff) >= kNumInitializerKinds || (init_kind >> 8) > 1) {
    return Malformed("has initializer kind ", init_kind);
  }
  init.kind = static_cast<InitializerKind>(init_kind & 0xff);
  init.scaled_by_dim = (init_kind >> 8) == 1;
  for (float* value : {&init.lower, &init.upper, &init.mean, &init.stddev}) {
    *value = reader->Get<float>();
  }
  config.admit_probability = reader->Get<float>();
  config.admit_after = reader->Get<uint32_t>();
  config.weight_bound = reader->Get<float>();
  config.time_to_live_sec = reader->Get<float>();
  init.seed = reader->Get<uint64_t>();
  // What is missing keeps its default, which means no such limit.
  if (version == 2) return config;
  config.capacity = reader->Get<uint64_t>();
  config.min_norm = reader->Get<float>();
  if (reader->Get<uint32_t>() != 0) return Malformed("has a reserved field that is not 0");
  return config;
}

// Numbers that rise fit the prefix, and make a table of at most kMaxGroupNumber + 1 entries.
Status CheckGroups(const TrainConfig& config) {
  const uint32_t bits = config.feature_index_prefix_bit;
  if (config.groups.empty() ? bits != 0 : bits < 1 || bits > 32) {
    return InvalidArgument("feature_index_prefix_bit is ", bits, " for ", config.groups.size(),
                           " feature groups of their own; give 1 to 32, and 0 without groups");
  }
  const uint64_t limit = std::min<uint64_t>(kMaxGroupNumber, (uint64_t{1} << bits) - 1);
  uint64_t least = 0;
  for (const GroupConfig& group : config.groups) {
    if (group.group < least || group.group > limit) {
      return InvalidArgument("groups has the number ", group.group, "; give rising numbers up to ",
                             limit);
    }
    least = uint64_t{group.group} + 1;
    PERSIA_RETURN_IF_ERROR(group.rows.Validate());
  }
  return Status::Ok();
}

Status Refuse(std::string_view field, float value, std::string_view remedy) {
  return InvalidArgument("initializer.", field, " is ", value, "; give ", remedy);
}

// A constant is a uniform draw with equal bounds, so `upper` may equal `lower`.
Status CheckUniform(const Initializer& init) {
  if (!std::isfinite(init.lower)) return Refuse("lower", init.lower, "a finite value");
  if (!std::isfinite(init.upper) || init.upper < init.lower) {
    return Refuse("upper", init.upper, "a finite value not below initializer.lower");
  }
  if (!std::isfinite(init.upper - init.lower)) {
    return Refuse("upper - initializer.lower", init.upper - init.lower,
                  "bounds that are closer together");
  }
  if (init.mean != 0) return Refuse("mean", init.mean, "none: a uniform initializer has no mean");
  if (init.stddev == 0) return Status::Ok();
  return Refuse("std", init.stddev, "none: a uniform initializer has no standard deviation");
}

// Beyond so many standard deviations from the mean there is next to nothing to draw from.
constexpr float kFarthest = 4.0f;

// Values outside the bounds are drawn again, and bounds far from the mean would make that take for
// ever.
Status CheckNormal(const Initializer& init) {
  if (!std::isfinite(init.mean)) return Refuse("mean", init.mean, "a finite value");
  if (!std::isfinite(init.stddev) || init.stddev <= 0) {
    return Refuse("std", init.stddev, "a finite value above 0");
  }
  const float reach = kFarthest * init.stddev;
  if (!(init.lower <= init.mean + reach)) {
    return Refuse("lower", init.lower, "at most the mean plus 4 standard deviations");
  }
  if (!(init.upper >= init.mean - reach)) {
    return Refuse("upper", init.upper, "at least the mean minus 4 standard deviations");
  }
  if (init.upper > init.lower) return Status::Ok();
  return Refuse("upper", init.upper, "a value above initializer.lower");
}

}  // namespace

Status Initializer::Validate() const {
  switch (kind) {
    case InitializerKind::kUniform: return CheckUniform(*this);
    case InitializerKind::kNormal: return CheckNormal(*this);
  }
  return InvalidArgument("initializer kind is ", static_cast<int>(kind),
                         "; known are 0 (uniform) and 1 (normal)");
}

Status RowConfig::Validate() const {
  PERSIA_RETURN_IF_ERROR(optimizer.Validate());
  PERSIA_RETURN_IF_ERROR(initializer.Validate());
  PERSIA_RETURN_IF_ERROR(CheckRange("admit_probability", admit_probability,
                                    admit_probability >= 0 && admit_probability <= 1,
                                    "from 0 to 1"));
  if (admit_after < 1 || admit_after > kMaxAdmitAfter) {
    return InvalidArgument("admit_after is ", admit_after, "; give 1 to ", kMaxAdmitAfter);
  }
  PERSIA_RETURN_IF_ERROR(CheckRange("time_to_live_sec", time_to_live_sec, time_to_live_sec >= 0,
                                    "above 0, or 0 for rows that stay"));
  PERSIA_RETURN_IF_ERROR(
      CheckRange("min_norm", min_norm, min_norm >= 0, "above 0, or 0 to keep all rows"));
  return CheckRange("weight_bound", weight_bound, weight_bound >= 0, "above 0, or 0 for no bound");
}

RowConfig SlotRowConfig::Over(const RowConfig& job, float lr_factor) const {
  RowConfig rows = job;
  if (optimizer.has_value()) {
    rows.optimizer = *optimizer;
    // The slot's own rate follows the job's schedule by its factor, since the schedule knows the
    // job's rate alone.
    rows.optimizer.lr *= lr_factor;
  }
  if (initializer.has_value()) {
    rows.initializer = *initializer;
    // One seed for a job, so that a run is repeated by repeating one number.
    rows.initializer.seed = job.initializer.seed;
  }
  rows.admit_probability = admit_probability.value_or(job.admit_probability);
  rows.admit_after = admit_after.value_or(job.admit_after);
  rows.weight_bound = weight_bound.value_or(job.weight_bound);
  rows.time_to_live_sec = time_to_live_sec.value_or(job.time_to_live_sec);
  rows.min_norm = min_norm.value_or(job.min_norm);
  // Never inherited: a limit of the job's would apply to each group by itself.
  rows.capacity = capacity.value_or(0);
  return rows;
}

Status TrainConfig::Validate() const {
  PERSIA_RETURN_IF_ERROR(RowConfig::Validate());
  PERSIA_RETURN_IF_ERROR(CheckRange("lr_factor", lr_factor, lr_factor >= 0, "of at least 0"));
  return CheckGroups(*this);
}

const RowConfig& TrainConfig::Of(uint32_t group) const {
  const auto found = std::find_if(groups.begin(), groups.end(),
                                  [group](const GroupConfig& g) { return g.group == group; });
  return found == groups.end() ? static_cast<const RowConfig&>(*this) : found->rows;
}

bool TrainConfig::HasMinNorm() const {
  return min_norm > 0 || std::any_of(groups.begin(), groups.end(),
                                     [](const GroupConfig& g) { return g.rows.min_norm > 0; });
}

std::vector<std::byte> TrainConfig::Encode() const {
  ByteWriter writer;
  writer.Put(kVersion);
  writer.Put(feature_index_prefix_bit);
  writer.Put(static_cast<uint32_t>(groups.size()));
  writer.Put(lr_factor);
  PutRows(*this, &writer);
  for (const GroupConfig& group : groups) {
    writer.Put(group.group);
    writer.Put(uint32_t{0});
    PutRows(group.rows, &writer);
  }
  return writer.Release();
}

StatusOr<TrainConfig> TrainConfig::Decode(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  const auto version = reader.Get<uint32_t>();
  const auto prefix_bits = reader.Get<uint32_t>();
  const auto num_groups = reader.Get<uint32_t>();
  const auto lr_factor = reader.Get<float>();
  if (reader.ok() && (version < kOldestVersion || version > kVersion)) {
    return Malformed("version is ", version, "; expected ", kVersion);
  }
  const size_t row_bytes = RowBytes(version);
  // Also bounds num_groups, before memory is reserved for them.
  if (!reader.ok() || bytes.size() != kHeadBytes + row_bytes + num_groups * (8 + row_bytes)) {
    return Malformed("is ", bytes.size(), " bytes for ", num_groups, " groups");
  }
  auto rows = GetRows(version, &reader);
  PERSIA_RETURN_IF_ERROR(rows.status());
  TrainConfig config{*rows, lr_factor, prefix_bits, {}};
  config.groups.reserve(num_groups);
  for (uint32_t i = 0; i < num_groups; ++i) {
    const auto group = reader.Get<uint32_t>();
    // Refused, so that a later version may give the field a meaning that this one would miss.
    if (reader.Get<uint32_t>() != 0) return Malformed("has a reserved field that is not 0");
    auto group_rows = GetRows(version, &reader);
    PERSIA_RETURN_IF_ERROR(group_rows.status());
    config.groups.push_back({group, *group_rows});
  }
  PERSIA_RETURN_IF_ERROR(config.Validate());
  return config;
}

}  // namespace persia
