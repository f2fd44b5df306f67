// The rules that a tier's rows were made by: a file beside the pool, which names the pool, for the
// store that finds the rows again. Rules may be larger than a pool's header has room for.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "base/train_config.h"

namespace persia::store {

struct SavedRules {
  uint64_t pool_id = 0;  // whose rows they are of
  TrainConfig config;
};

// In the place of the rules of before, in one step; durable when it returns.
Status SaveRules(const std::string& directory, const SavedRules& rules);
// Nothing: there are none. kCorruption: the file is damaged.
StatusOr<std::optional<SavedRules>> LoadRules(const std::string& directory);

}  // namespace persia::store
