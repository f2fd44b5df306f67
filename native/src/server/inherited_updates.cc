#include "server/inherited_updates.h"

#include <algorithm>
#include <unordered_map>

#include "base/bytes.h"
#include "base/hash.h"

namespace persia::server {
namespace {

// Of one worker: as many as an UpdateDeduplicator remembers.
constexpr uint64_t kKeptReferences = UpdateDeduplicator::Limits{}.keys_per_worker;

void PutPart(const ShardSet& shards, std::span<const BatchKey> keys, ByteWriter* writer) {
  if (keys.empty()) return;
  writer->Put(shards);
  writer->Put(uint64_t{keys.size()});
  writer->PutArray(keys);
}

}  // namespace

// A part: virtual shards, the number of keys, and the keys of updates that were applied to them.
// After several changes of the servers an update may have parts of different generations.
Status InheritedUpdates::Add(std::span<const std::byte> parts) {
  for (ByteReader reader(parts); reader.remaining() > 0;) {
    const auto shards = reader.Get<ShardSet>();
    const auto keys = reader.GetArray<BatchKey>(reader.Get<uint64_t>());
    if (!reader.ok()) return Corruption("updates of another length");
    const auto known = std::find(sets_.begin(), sets_.end(), shards);
    const auto index = static_cast<size_t>(known - sets_.begin());
    if (known == sets_.end()) sets_.push_back(shards);
    for (const BatchKey& key : keys) parts_[Id(key)].insert(index);
  }
  return Status::Ok();
}

// A worker that routes a repeated update anew sends it to servers that have rows of several
// predecessors. Of these some had applied it and some had not, so the signs are told apart one by
// one.
RemainingUpdate InheritedUpdates::Remaining(const UpdateRowsRequest& request) const {
  ShardSet applied;
  for (const size_t part : parts_.at(Id(request.key))) applied |= sets_[part];
  const auto was_applied = [&](uint64_t sign) {
    return applied.test(VirtualShard(SignHash(sign)));
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
std::vector<std::byte> InheritedUpdates::ForNext(std::span<const AppliedUpdate> updates,
                                                 const ShardSet& own) const {
  std::vector<BatchKey> own_keys;
  std::unordered_map<uint64_t, uint64_t> newest;  // reference, by worker
  for (const AppliedUpdate& update : updates) {
    own_keys.push_back(update.key);
    uint64_t& reference = newest[update.key.worker_incarnation];
    reference = std::max(reference, update.key.reference);
  }
  std::vector<std::vector<BatchKey>> inherited(sets_.size());
  for (const auto& [key, parts] : parts_) {
    const auto of_worker = newest.find(key.first);
    if (of_worker != newest.end() && key.second + kKeptReferences < of_worker->second) continue;
    for (const size_t part : parts) inherited[part].push_back({key.first, key.second});
  }
  ByteWriter writer;
  PutPart(own, own_keys, &writer);
  for (size_t i = 0; i < sets_.size(); ++i) PutPart(sets_[i], inherited[i], &writer);
  return writer.Release();
}

}  // namespace persia::server
