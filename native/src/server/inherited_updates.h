// InheritedUpdates: what a new server knows of the updates that the servers before it have applied
// (ADR 34).
//
// Such an update may have been applied by some of them only. A key therefore comes with the place
// of the server that has applied it: the signs that this server had are left out when the update is
// repeated.
//
// Filled before the server answers, by one thread at a time; constant from then on.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/row_protocol.h"
#include "server/update_deduplicator.h"

namespace persia::server {

// The update of this key was applied to the signs of server `index` of `num_servers`.
struct AppliedPart {
  BatchKey key;
  uint32_t index = 0;
  uint32_t num_servers = 1;
};
static_assert(sizeof(AppliedPart) == 24);

// The part of an update that has not been applied. Owns what an UpdateRowsRequest views.
struct RemainingUpdate {
  std::vector<SignBlock> blocks;
  std::vector<uint64_t> signs;
  std::vector<float> gradients;
};

class InheritedUpdates {
 public:
  // Keys that were added before stay.
  void Add(std::span<const AppliedPart> parts);
  bool Has(const BatchKey& key) const { return places_.contains(Id(key)); }
  RemainingUpdate Remaining(const UpdateRowsRequest& request) const;
  // What the servers of the next generation inherit from server `index` of `num_servers`, which has
  // applied `updates` itself. Keys that no worker can repeat any more are left out.
  std::vector<AppliedPart> ForNext(std::span<const AppliedUpdate> updates, uint32_t index,
                                   uint32_t num_servers) const;

 private:
  using Key = std::pair<uint64_t, uint64_t>;    // worker incarnation, reference
  using Place = std::pair<uint32_t, uint32_t>;  // index, number of servers

  static Key Id(const BatchKey& key) { return {key.worker_incarnation, key.reference}; }

  std::map<Key, std::set<Place>> places_;
};

}  // namespace persia::server
