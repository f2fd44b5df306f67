#include "server/inherited_updates.h"

#include <algorithm>
#include <unordered_map>

#include "base/hash.h"

namespace persia::server {
namespace {

// Of one worker: as many as an UpdateDeduplicator remembers.
constexpr uint64_t kKeptReferences = UpdateDeduplicator::Limits{}.keys_per_worker;

}  // namespace

// A part says that server `index` of `num_servers` has applied the update: with its signs' hashes
// that tells which rows have it. After several resizes an update may have parts of different
// numbers of servers.
void InheritedUpdates::Add(std::span<const AppliedPart> parts) {
  for (const AppliedPart& part : parts) {
    places_[Id(part.key)].insert({part.index, std::max(part.num_servers, 1u)});
  }
}

// A worker that routes a repeated update anew sends it to servers that have rows of several
// predecessors. Of these some had applied it and some had not, so the signs are told apart one by
// one.
RemainingUpdate InheritedUpdates::Remaining(const UpdateRowsRequest& request) const {
  const std::set<Place>& places = places_.at(Id(request.key));
  const auto was_applied = [&](uint64_t sign) {
    const uint64_t hash = SignHash(sign);
    return std::any_of(places.begin(), places.end(), [&](const Place& place) {
      return ServerOf(hash, place.second) == place.first;
    });
  };
  RemainingUpdate remaining;
  const uint64_t* sign = request.blocks.signs.data();
  const float* gradient = request.gradients.data();
  for (const SignBlock& block : request.blocks.blocks) {
    SignBlock kept{block.dim, 0};
    for (uint32_t i = 0; i < block.num_signs; ++i, ++sign, gradient += block.dim) {
      if (was_applied(*sign)) continue;
      remaining.signs.push_back(*sign);
      remaining.gradients.insert(remaining.gradients.end(), gradient, gradient + block.dim);
      ++kept.num_signs;
    }
    if (kept.num_signs > 0) remaining.blocks.push_back(kept);
  }
  return remaining;
}

// What the servers after this one must know: its own updates, and those it inherited itself. The
// latter are dropped once the worker has sent so many newer ones that no repetition can come.
std::vector<AppliedPart> InheritedUpdates::ForNext(std::span<const AppliedUpdate> updates,
                                                   uint32_t index, uint32_t num_servers) const {
  std::vector<AppliedPart> parts;
  std::unordered_map<uint64_t, uint64_t> newest;  // reference, by worker
  for (const AppliedUpdate& update : updates) {
    parts.push_back({update.key, index, num_servers});
    uint64_t& reference = newest[update.key.worker_incarnation];
    reference = std::max(reference, update.key.reference);
  }
  for (const auto& [key, places] : places_) {
    const auto of_worker = newest.find(key.first);
    if (of_worker != newest.end() && key.second + kKeptReferences < of_worker->second) continue;
    for (const Place& place : places) {
      parts.push_back({{key.first, key.second}, place.first, place.second});
    }
  }
  return parts;
}

}  // namespace persia::server
