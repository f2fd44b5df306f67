#include "worker/lookup_plan.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/id_features.h"

namespace persia::worker {
namespace {

// Of a raw slot's index; as many as fit into the largest embeddings message, so that a batch that
// could never be answered is refused before memory is taken for it.
constexpr uint64_t kMaxIndexCells = 1ull << 27;

Status FeatureError(std::string_view name, const std::string& what) {
  return InvalidArgument("feature '" + std::string(name) + "': " + what);
}

// Of the characters of both, the share in their longest common subsequence.
double Similarity(std::string_view a, std::string_view b) {
  std::vector<size_t> longest(b.size() + 1);  // of `a` so far, and `b` up to each place
  for (const char c : a) {
    size_t diagonal = 0;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t above = longest[j + 1];
      longest[j + 1] = c == b[j] ? diagonal + 1 : std::max(above, longest[j]);
      diagonal = above;
    }
  }
  return 2.0 * static_cast<double>(longest.back()) / static_cast<double>(a.size() + b.size());
}

Status UnknownSlot(std::string_view name, const SlotTable& slots) {
  constexpr size_t kMaxName = 256;  // requests for predictions come from outside the job
  std::string_view nearest;
  double best = 0.6;  // as difflib's, which suggests keys of config files
  for (const SlotConfig& slot : slots.slots()) {
    if (std::max(name.size(), slot.name.size()) > kMaxName) continue;
    if (const double similarity = Similarity(name, slot.name); similarity > best) {
      best = similarity;
      nearest = slot.name;
    }
  }
  return FeatureError(name, "the embedding config has no slot of this name: " +
                                (nearest.empty() ? "add one, or do not send it"
                                                 : "did you mean '" + std::string(nearest) + "'?"));
}

StatusOr<Feature> FindSlot(const IdFeature& feature, const SlotTable& slots) {
  const SlotConfig* slot = slots.Find(feature.name);
  if (slot == nullptr) return UnknownSlot(feature.name, slots);
  const uint64_t batch_size = feature.offsets.size() - 1;
  if (!slot->embedding_summation && batch_size * slot->sample_fixed_size > kMaxIndexCells) {
    return FeatureError(feature.name,
                        std::to_string(batch_size) + " samples with a sample_fixed_size of " +
                            std::to_string(slot->sample_fixed_size) + " are more than the " +
                            std::to_string(kMaxIndexCells) + " IDs that fit: make either smaller");
  }
  if (!slot->embedding_summation && !feature.weights.empty()) {
    return FeatureError(
        feature.name,
        "it has weights, but its slot is a raw one, whose rows are not summed: weigh "
        "them in the model, or set embedding_summation");
  }
  return Feature{slot, feature.offsets, feature.ids, feature.weights, feature.numbers};
}

// Signs are numbered with 32 bits in a batch.
Status CheckNumSigns(std::span<const Feature> features) {
  uint64_t num_signs = 0;
  for (const Feature& feature : features) {
    num_signs += uint64_t{feature.num_ids()} * feature.slot->num_buckets();
    if (num_signs > UINT32_MAX) {
      return FeatureError(feature.slot->name,
                          "with it the batch has " + std::to_string(num_signs) +
                              " IDs after the hash stack, at most 2^32 - 1 fit: send smaller "
                              "batches");
    }
  }
  return Status::Ok();
}

// Without a branch, so that the compiler compares several offsets at once. Such a feature needs no
// offsets to be pooled, which is the common case.
bool HasOneIdEach(std::span<const uint32_t> offsets) {
  uint32_t differences = 0;
  for (uint32_t i = 0; i < offsets.size(); ++i) differences |= offsets[i] ^ i;
  return differences == 0;
}

// From numbers of the signs of distinct IDs to those of all IDs.
void SpreadNumbers(const Feature& feature, std::span<const uint32_t> of_distinct,
                   std::vector<uint32_t>* numbers) {
  const size_t num_buckets = feature.slot->num_buckets();
  numbers->resize(feature.numbers.size() * num_buckets);
  if (num_buckets == 1) {  // the loop of the others is slower
    std::ranges::transform(feature.numbers, numbers->begin(),
                           [&](uint32_t id) { return of_distinct[id]; });
    return;
  }
  auto next = numbers->begin();
  for (const uint32_t id : feature.numbers) {
    next = std::copy_n(of_distinct.begin() + id * num_buckets, num_buckets, next);
  }
}

}  // namespace

StatusOr<FeatureBatch> FeatureBatch::Decode(Buffer bytes, const SlotTable& slots) {
  PERSIA_ASSIGN_OR_RETURN(IdFeatures decoded, DecodeIdFeatures(std::as_const(bytes).span(),
                                                               kMaxIdBytes, Numbering::kKeep));
  FeatureBatch batch;
  batch.batch_size_ = decoded.batch_size;
  batch.features_.reserve(decoded.features.size());
  for (const IdFeature& id_feature : decoded.features) {
    PERSIA_ASSIGN_OR_RETURN(const Feature feature, FindSlot(id_feature, slots));
    batch.features_.push_back(feature);
  }
  PERSIA_RETURN_IF_ERROR(CheckNumSigns(batch.features_));
  batch.size_bytes_ = bytes.size() + decoded.storage_bytes;
  batch.bytes_ = std::move(bytes);  // the features' views stay where they are
  batch.ids_ = std::move(decoded.storage);
  return batch;
}

// Without offsets where each bag has as many rows: the kernels then need no second array.
Bags PlannedFeature::bags() const {
  Bags bags{.dim = slot->dim,
            .num_bags = num_items(),
            .offsets = {},
            .rows_per_offset = slot->num_buckets(),
            .numbers = sign_numbers,
            .weights = weights,
            .scaling = slot->scaling()};
  if (slot->embedding_summation) {
    bags.num_bags = num_rows();
    if (!has_one_id_each) bags.offsets = offsets;
  }
  return bags;
}

void Reroute(const Placement& placement, LookupPlan* plan) {
  const uint32_t num_servers = placement.num_servers();
  plan->placement = placement;
  const std::vector<ServerBlocks> before = std::exchange(plan->requests, {});
  plan->requests.resize(num_servers);
  std::vector<size_t> next(before.size(), 0);
  uint32_t number = 0;
  for (const PlannedGroup& group : plan->groups) {
    std::vector<uint32_t> num_routed(num_servers, 0);
    for (uint32_t i = 0; i < group.num_signs; ++i, ++number) {
      uint16_t& server = plan->server_of[number];
      const uint64_t sign = before[server].signs[next[server]++];
      server = static_cast<uint16_t>(placement.ServerOf(SignHash(sign)));
      plan->requests[server].signs.push_back(sign);
      ++num_routed[server];
    }
    for (uint32_t server = 0; server < num_servers; ++server) {
      if (num_routed[server] == 0) continue;
      plan->requests[server].blocks.push_back({group.dim, num_routed[server]});
    }
  }
}

// Group after group, for the numbers of a group must follow one another: deduplication has one
// table that is cleared between groups and so stays small.
LookupPlan LookupPlanner::Make(const FeatureBatch& batch, const SlotTable& slots,
                               const Placement& placement, SlotCounters* counters) {
  LookupPlan plan;
  plan.placement = placement;
  plan.batch_size = batch.batch_size();
  plan.requests.resize(placement.num_servers());
  plan.features.resize(batch.features().size());
  std::vector<bool> planned(plan.features.size(), false);
  for (size_t first = 0; first < planned.size(); ++first) {
    if (planned[first]) continue;
    const SlotConfig& leader = *batch.features()[first].slot;
    signs_.Clear();
    uint32_t num_features = 0;
    for (size_t i = first; i < planned.size(); ++i) {
      const Feature& feature = batch.features()[i];
      if (feature.slot->group != leader.group) continue;
      const size_t num_known = signs_.keys().size();
      PlanFeature(feature, plan.batch_size, plan.num_signs(), slots, &plan.features[i]);
      if (counters != nullptr) {
        counters->LookedUp(*feature.slot, feature.num_ids(), signs_.keys().subspan(num_known));
      }
      plan.features[i].group = static_cast<uint32_t>(plan.groups.size());
      plan.num_ids += feature.num_ids();
      planned[i] = true;
      ++num_features;
    }
    RouteGroup(leader, num_features, &plan);
  }
  return plan;
}

void LookupPlanner::PlanFeature(const Feature& feature, uint32_t batch_size, uint32_t first_number,
                                const SlotTable& slots, PlannedFeature* planned) {
  planned->slot = feature.slot;
  planned->offsets.assign(feature.offsets.begin(), feature.offsets.end());
  planned->weights.assign(feature.weights.begin(), feature.weights.end());
  planned->has_one_id_each = HasOneIdEach(feature.offsets);
  if (!feature.slot->embedding_summation) {
    NumberSigns(*feature.slot, KeepDistinct(feature, batch_size, &planned->index), slots,
                &planned->sign_numbers);
  } else if (feature.numbers.empty()) {
    NumberSigns(*feature.slot, feature.ids, slots, &planned->sign_numbers);
  } else {
    NumberSigns(*feature.slot, feature.ids, slots, &distinct_numbers_);
    SpreadNumbers(feature, distinct_numbers_, &planned->sign_numbers);
  }
  // The group's numbers follow those routed so far.
  for (uint32_t& number : planned->sign_numbers) number += first_number;
}

void LookupPlanner::NumberSigns(const SlotConfig& slot, std::span<const uint64_t> ids,
                                const SlotTable& slots, std::vector<uint32_t>* numbers) {
  feature_signs_.resize(ids.size() * slot.num_buckets());
  slots.MakeSigns(slot, ids, feature_signs_.data());
  numbers->resize(feature_signs_.size());
  signs_.Insert(feature_signs_, numbers->data());
}

// A raw slot keeps the first sample_fixed_size IDs of a sample: those alone are looked up.
std::span<const uint64_t> LookupPlanner::KeepDistinct(const Feature& feature, uint32_t batch_size,
                                                      std::vector<uint32_t>* index) {
  const size_t width = feature.slot->sample_fixed_size;
  index->assign(batch_size * width, 0);
  distinct_ids_.Clear();
  for (uint32_t sample = 0; sample < batch_size; ++sample) {
    const uint32_t begin = feature.offsets[sample];
    const size_t num_kept = std::min<size_t>(feature.offsets[sample + 1] - begin, width);
    uint32_t* cells = index->data() + sample * width;
    if (feature.numbers.empty()) {
      distinct_ids_.Insert(feature.ids.subspan(begin, num_kept), cells);
    } else {
      for (size_t i = 0; i < num_kept; ++i) {
        distinct_ids_.Insert({&feature.ids[feature.numbers[begin + i]], 1}, cells + i);
      }
    }
    for (size_t i = 0; i < num_kept; ++i) ++cells[i];  // 0 is padding
  }
  return distinct_ids_.keys();
}

// Signs of a server stay in the order of their numbers. Answers and sums are laid out by that
// order, so LocateRows() needs no table of places.
void LookupPlanner::RouteGroup(const SlotConfig& leader, uint32_t num_features, LookupPlan* plan) {
  const auto num_servers = static_cast<uint32_t>(plan->requests.size());
  const std::span<const uint64_t> signs = signs_.keys();
  num_routed_.assign(num_servers, 0);
  plan->groups.push_back({leader.dim, static_cast<uint32_t>(signs.size()), leader.mode,
                          plan->num_signs(), num_features});
  plan->server_of.reserve(plan->server_of.size() + signs.size());
  for (const uint64_t sign : signs) {
    const uint32_t server = num_servers == 1 ? 0 : plan->placement.ServerOf(SignHash(sign));
    plan->server_of.push_back(static_cast<uint16_t>(server));
    plan->requests[server].signs.push_back(sign);
    ++num_routed_[server];
  }
  for (uint32_t server = 0; server < num_servers; ++server) {
    if (num_routed_[server] == 0) continue;
    plan->requests[server].blocks.push_back({leader.dim, num_routed_[server]});
  }
}

}  // namespace persia::worker
