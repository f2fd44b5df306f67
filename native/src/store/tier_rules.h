// The rules that a tier's rows were made by: a file beside the pool, for the store that finds the
// rows again. Rules may be larger than a pool's header has room for.
#pragma once

#include <optional>
#include <string>

#include "base/status.h"
#include "base/train_config.h"

namespace persia::store {

// In the place of the rules of before, in one step; durable when it returns.
Status SaveRules(const std::string& directory, const TrainConfig& config);
// Nothing: there are none. kCorruption: the file is damaged.
StatusOr<std::optional<TrainConfig>> LoadRules(const std::string& directory);

}  // namespace persia::store
