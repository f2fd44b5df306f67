// What of a train config may change while there are rows.
#pragma once

#include "base/status.h"
#include "base/train_config.h"

namespace persia::store {

// For two configs that differ. Whatever shapes a row or gives its state a meaning is fixed:
// kFailedPrecondition names the field, and the feature group where it has a config of its own. What
// only steers the next step may change where `replace` asks for it.
Status CheckChange(const TrainConfig& old_config, const TrainConfig& new_config, bool replace);

}  // namespace persia::store
