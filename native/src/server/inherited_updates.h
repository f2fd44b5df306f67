// InheritedUpdates: what a new server knows of the updates that the servers before it have applied
// (ADR 34).
//
// Such an update may have been applied by some of them only. A key therefore comes with the virtual
// shards of the server that has applied it: their signs are left out when the update is repeated.
//
// Filled before the server answers, by one thread at a time; constant from then on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/placement.h"
#include "base/row_protocol.h"
#include "base/status.h"
#include "server/update_deduplicator.h"

namespace persia::server {

// The part of an update that has not been applied. Owns what an UpdateRowsRequest views.
struct RemainingUpdate {
  std::vector<SignBlock> blocks;
  std::vector<uint64_t> signs;
  std::vector<float> gradients;
};

class InheritedUpdates {
 public:
  // What ForNext() has made. Keys that were added before stay.
  Status Add(std::span<const std::byte> parts);
  bool Has(const BatchKey& key) const { return parts_.contains(Id(key)); }
  RemainingUpdate Remaining(const UpdateRowsRequest& request) const;
  // What the servers of the next generation inherit from this one, which has applied `updates` to
  // the virtual shards `own`. Keys that no worker can repeat any more are left out.
  std::vector<std::byte> ForNext(std::span<const AppliedUpdate> updates, const ShardSet& own) const;

 private:
  using Key = std::pair<uint64_t, uint64_t>;  // worker incarnation, reference

  static Key Id(const BatchKey& key) { return {key.worker_incarnation, key.reference}; }

  std::vector<ShardSet> sets_;             // of the servers that have applied updates
  std::map<Key, std::set<size_t>> parts_;  // indexes of the sets that an update was applied to
};

}  // namespace persia::server
