#include "store/config_change.h"

#include <set>
#include <string>

namespace persia::store {
namespace {

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
    return FailedPrecondition(where + field +
                              " differs from the configuration that the existing rows were made "
                              "with; clear the rows first, or use the same");
  }
  const auto field = ReplaceableFieldThatDiffers(old_rows, new_rows);
  if (replace || field.empty()) return Status::Ok();
  return FailedPrecondition(where + field +
                            " differs from the configuration in use; ask for a replacement to "
                            "change it while there are rows, or use the same");
}

}  // namespace

Status CheckChange(const TrainConfig& old_config, const TrainConfig& new_config, bool replace) {
  const uint32_t old_bits = old_config.feature_index_prefix_bit;
  const uint32_t new_bits = new_config.feature_index_prefix_bit;
  if (old_bits != 0 && new_bits != 0 && old_bits != new_bits) {
    return FailedPrecondition("feature_index_prefix_bit was " + std::to_string(old_bits) +
                              " and is " + std::to_string(new_bits) +
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
