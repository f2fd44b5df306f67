#include "worker/slot_table.h"

#include <utility>

#include "base/duration_stats.h"
#include "base/hash.h"
#include "simd/kernels.h"

namespace persia::worker {
namespace {

// How many batches the estimate takes: see LookedUp().
constexpr uint64_t kAllBatches = 64;
constexpr uint64_t kOneBatchIn = 32;
// Numbers of IDs in a batch, and of places, have 31 bits (store/row_arrays.h).
constexpr uint64_t kMaxArrayIds = uint64_t{1} << 31;

Status SlotError(const SlotConfig& slot, const auto&... what) {
  return InvalidArgument("slot '", slot.name, "': ", what...);
}

// What concerns a slot by itself. Each message names the slot and the remedy: it reaches the author
// of a YAML file.
Status CheckSlot(const SlotConfig& slot, uint32_t id_bits) {
  if (slot.name.empty()) return InvalidArgument("a slot has an empty name: name every slot");
  if (slot.dim == 0 || slot.dim > kMaxDim) {
    return SlotError(slot, "dim is ", slot.dim, ", must be 1 to ", kMaxDim);
  }
  if (!slot.embedding_summation &&
      (slot.sample_fixed_size == 0 || slot.sample_fixed_size > 65535)) {
    return SlotError(slot, "sample_fixed_size is ", slot.sample_fixed_size,
                     ", must be 1 to 65535 for a raw slot");
  }
  if (slot.mean_scaling && slot.sqrt_scaling) {
    return SlotError(slot, "mean_scaling and sqrt_scaling are both set: keep one");
  }
  if (slot.mean_scaling && !slot.embedding_summation) {
    return SlotError(slot,
                     "mean_scaling is set for a raw slot, whose rows are not summed: set "
                     "embedding_summation, or average them in the model");
  }
  if (slot.num_array_ids > kMaxArrayIds) {
    return SlotError(slot, "cardinality is ", slot.num_array_ids,
                     ", and index: array takes at most ", kMaxArrayIds, ": leave index out");
  }
  if (slot.hash_stack_rounds == 0) return Status::Ok();
  if (slot.num_array_ids != 0) {
    return SlotError(slot, "index: array and a hash stack are both set: keep one");
  }
  if (slot.hash_stack_size == 0) {
    return SlotError(slot, "hash_stack_rounds is ", slot.hash_stack_rounds,
                     " but the hash stack's embedding_size is 0: give it a size");
  }
  const uint64_t num_ids = (uint64_t{1} << id_bits) - 1;  // IDs are taken modulo this
  if (slot.hash_stack_size > num_ids / slot.hash_stack_rounds) {
    return SlotError(slot, "a hash stack of ", slot.hash_stack_rounds, " x ", slot.hash_stack_size,
                     " buckets does not fit into the ", id_bits,
                     " bits that feature_index_prefix_bit leaves: make either smaller");
  }
  return Status::Ok();
}

// The prefix keeps the signs of groups apart; 0 as a prefix is never given, so that 0 can mean "not
// set" in a config.
// Groups count from 0, and the first prefix is 1.
Status SetPrefix(SlotConfig* slot, uint32_t id_bits) {
  const uint64_t num_prefixes = uint64_t{1} << (64 - id_bits);
  if (slot->index_prefix == 0) {
    if (slot->group + uint64_t{1} >= num_prefixes) {
      return SlotError(*slot, "group number ", slot->group, " does not fit into ", 64 - id_bits,
                       " bits: raise feature_index_prefix_bit");
    }
    slot->index_prefix = (slot->group + uint64_t{1}) << id_bits;
  }
  if ((slot->index_prefix & ((uint64_t{1} << id_bits) - 1)) != 0) {
    return SlotError(*slot, "index_prefix ", slot->index_prefix, " has bits below the top ",
                     64 - id_bits);
  }
  return Status::Ok();
}

// Servers keep a table of policies by group number, which a large number would make as large.
Status CheckNumber(const SlotConfig& slot, uint32_t id_bits) {
  const uint64_t number = slot.index_prefix >> id_bits;
  if (slot.rows.IsEmpty() || number <= kMaxGroupNumber) return Status::Ok();
  return SlotError(slot, "is in feature group ", number, ", and only the first ", kMaxGroupNumber,
                   " may have an optimizer, initializer, admission or weight bound of "
                   "their own: put it further to the front");
}

// Slots share rows exactly when they are in one group: equal groups need equal dims and prefixes,
// different groups different prefixes.
Status CheckGroups(const std::vector<SlotConfig>& slots) {
  std::map<uint32_t, const SlotConfig*> by_group;
  std::map<uint64_t, const SlotConfig*> by_prefix;
  for (const SlotConfig& slot : slots) {
    const SlotConfig& peer = *by_group.emplace(slot.group, &slot).first->second;
    if (peer.dim != slot.dim) {
      return SlotError(slot, "dim is ", slot.dim, " but slot '", peer.name,
                       "' of the same feature group has ", peer.dim,
                       ": slots of one group share rows");
    }
    if (peer.index_prefix != slot.index_prefix) {
      return SlotError(slot, "index_prefix differs from that of slot '", peer.name,
                       "' of the same feature group");
    }
    if (peer.num_array_ids != slot.num_array_ids) {
      return SlotError(slot, "index: array has ", slot.num_array_ids, " IDs but slot '", peer.name,
                       "' of the same feature group has ", peer.num_array_ids,
                       ": slots of one group share rows, so give them the same cardinality");
    }
    if (peer.rows != slot.rows) {
      return SlotError(
          slot, "optimizer, initializer, admission, eviction or weight bound differ from slot '",
          peer.name, "' of the same feature group: slots of one group share rows");
    }
    if (slot.mode >= kMaxSlotModes) {
      return SlotError(slot, "mode is ", slot.mode, ", above the last, ", kMaxSlotModes - 1);
    }
    if (peer.mode != slot.mode) {
      return SlotError(slot, "consistency or embedding_staleness differ from slot '", peer.name,
                       "' of the same feature group: slots of one group share rows");
    }
    const SlotConfig& owner = *by_prefix.emplace(slot.index_prefix, &slot).first->second;
    if (owner.group != slot.group) {
      return SlotError(slot, "index_prefix is that of slot '", owner.name,
                       "', which is in another feature group");
    }
  }
  return Status::Ok();
}

}  // namespace

// Servers find the policy of a row by the top bits of its sign: the config names groups, not slots.
TrainConfig SlotTable::WithGroups(const TrainConfig& config) const {
  std::map<uint32_t, RowConfig> rows;
  for (const SlotConfig& slot : slots_) {
    if (slot.rows.IsEmpty()) continue;
    const auto group = static_cast<uint32_t>(slot.index_prefix >> id_bits_);
    rows.emplace(group, slot.rows.Over(config, config.lr_factor));
  }
  TrainConfig full = config;
  full.groups.clear();
  for (const auto& [group, group_rows] : rows) full.groups.push_back({group, group_rows});
  full.feature_index_prefix_bit = rows.empty() ? 0 : 64 - id_bits_;
  return full;
}

uint64_t FoldId(uint64_t id, uint32_t id_bits) {
  const uint64_t modulus = (uint64_t{1} << id_bits) - 1;
  // 2^id_bits is 1 modulo the modulus, so the high part counts as much as the low one. With 32 bits
  // or more the sum is at most twice the modulus.
  uint64_t folded = (id & modulus) + (id >> id_bits);
  if (folded >= modulus) folded -= modulus;
  if (folded >= modulus) folded -= modulus;
  return folded;
}

StatusOr<SlotTable> SlotTable::Create(uint32_t feature_index_prefix_bit,
                                      std::vector<SlotConfig> slots) {
  if (feature_index_prefix_bit < 1 || feature_index_prefix_bit > 32) {
    return InvalidArgument("feature_index_prefix_bit is ", feature_index_prefix_bit,
                           ", must be 1 to 32");
  }
  if (slots.empty()) return InvalidArgument("the embedding config has no slots: add at least one");
  const uint32_t id_bits = 64 - feature_index_prefix_bit;
  // Prefixes are set before CheckGroups() compares groups by them.
  for (SlotConfig& slot : slots) {
    PERSIA_RETURN_IF_ERROR(CheckSlot(slot, id_bits));
    PERSIA_RETURN_IF_ERROR(SetPrefix(&slot, id_bits));
    PERSIA_RETURN_IF_ERROR(CheckNumber(slot, id_bits));
  }
  PERSIA_RETURN_IF_ERROR(CheckGroups(slots));
  SlotTable table(id_bits, std::move(slots));
  for (size_t i = 0; i < table.slots_.size(); ++i) {
    if (!table.index_.emplace(table.slots_[i].name, i).second) {
      return SlotError(table.slots_[i], "appears twice: slot names must be unique");
    }
  }
  return table;
}

SlotTable::SlotTable(uint32_t id_bits, std::vector<SlotConfig> slots)
    : id_bits_(id_bits), slots_(std::move(slots)) {}

const SlotConfig* SlotTable::Find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &slots_[it->second];
}

void SlotTable::MakeSigns(const SlotConfig& slot, std::span<const uint64_t> ids,
                          uint64_t* signs) const {
  if (slot.hash_stack_rounds == 0) {
    return simd::ActiveKernels().fold_ids(signs, ids.data(), id_bits_, slot.index_prefix,
                                          ids.size());
  }
  for (const uint64_t id : ids) {
    uint64_t hash = id;
    for (uint64_t round = 0; round < slot.hash_stack_rounds; ++round) {
      // Each round hashes the one before, as in the published system: the buckets of an ID are
      // fixed by its value.
      hash = SignHash(hash);
      const uint64_t bucket = hash % slot.hash_stack_size + round * slot.hash_stack_size;
      *signs++ = FoldId(bucket, id_bits_) + slot.index_prefix;
    }
  }
}

SlotCounters::SlotCounters(const SlotTable& slots)
    : slots_(slots.slots()), counters_(slots.slots().size()) {}

void SlotCounters::LookedUp(const SlotConfig& slot, uint64_t num_ids,
                            std::span<const uint64_t> new_signs) {
  // Counting is measurement: it is off where measurement is.
  if (num_ids == 0 || !DurationStats::enabled()) return;
  constexpr auto kRelaxed = std::memory_order_relaxed;
  Counters& counters = Of(slot);
  counters.num_ids.Add(num_ids);
  counters.num_distinct.Add(new_signs.size());
  counters.last_distinct_ratio.store(
      static_cast<double>(new_signs.size()) / static_cast<double>(num_ids), kRelaxed);
  // Of this slot: slots that are rare in batches are sampled as densely as others.
  const uint64_t batch = counters.num_batches.fetch_add(1, kRelaxed);
  if (batch < kAllBatches || batch % kOneBatchIn == 0) counters.distinct.Add(new_signs);
}

std::vector<SlotStats> SlotCounters::stats() const {
  std::vector<SlotStats> all;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Counters& counters = counters_[i];
    Metrics& metrics = all.emplace_back(SlotStats{slots_[i].name, {}}).metrics;
    // Ratios are not Counters: they are the latest value, or an estimate.
    counters.list.AddTo(&metrics);
    metrics.AddRatio("last_distinct_ratio", "batch_unique_indices_rate",
                     "Distinct indices of the latest batch by all.",
                     counters.last_distinct_ratio.load());
    metrics.AddRatio("estimated_distinct", "estimated_distinct_id",
                     "Different indices so far, estimated.", counters.distinct.Estimate());
  }
  return all;
}

}  // namespace persia::worker
