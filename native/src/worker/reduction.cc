#include "worker/reduction.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "worker/bags.h"
#include "worker/wire_floats.h"

namespace persia::worker {
namespace {

Status SlotError(std::string_view slot, const auto&... what) {
  return InvalidArgument("gradient of slot '", slot, "': ", what...);
}

// Summed by the rank, which can do so for a slot that shares no row with another.
Status CheckSummed(const PlannedGroup& group, const PlannedFeature& feature,
                   const SlotGradient& gradient) {
  if (!feature.slot->embedding_summation || group.num_features != 1) {
    return SlotError(gradient.slot,
                     "it is summed by row, but the slot is raw or shares its feature group with "
                     "another slot of the batch: send its gradients as they are");
  }
  if (gradient.num_rows == group.num_signs && gradient.dim == group.dim) return Status::Ok();
  return SlotError(gradient.slot, "its sums are [", gradient.num_rows, ", ", gradient.dim,
                   "], the distinct rows [", group.num_signs, ", ", group.dim, "]");
}

Status CheckShape(const PlannedGroup& group, const PlannedFeature& feature,
                  const SlotGradient& gradient) {
  if (gradient.skipped) return Status::Ok();
  if (gradient.summed) return CheckSummed(group, feature, gradient);
  if (gradient.num_rows == feature.num_rows() && gradient.dim == feature.slot->dim) {
    return Status::Ok();
  }
  return SlotError(gradient.slot, "its shape is [", gradient.num_rows, ", ", gradient.dim,
                   "], that of the embeddings [", feature.num_rows(), ", ", feature.slot->dim, "]");
}

// By feature of the batch; null: not sent.
StatusOr<std::vector<const SlotGradient*>> MatchSlots(const LookupPlan& plan,
                                                      std::span<const SlotGradient> gradients) {
  std::vector<const SlotGradient*> matched(plan.features.size(), nullptr);
  for (const SlotGradient& gradient : gradients) {
    const auto feature =
        std::find_if(plan.features.begin(), plan.features.end(),
                     [&](const PlannedFeature& f) { return f.slot->name == gradient.slot; });
    if (feature == plan.features.end()) return SlotError(gradient.slot, "not a slot of the batch");
    const SlotGradient*& entry = matched[feature - plan.features.begin()];
    if (entry != nullptr) return SlotError(gradient.slot, "sent twice");
    PERSIA_RETURN_IF_ERROR(CheckShape(plan.groups[feature->group], *feature, gradient));
    entry = &gradient;
  }
  return matched;
}

// The greatest that a gradient is multiplied by; 1 or less without weights.
double MaxMultiplier(const Bags& bags) {
  if (bags.weights.empty()) return 1.0;
  double max = 0.0;
  for (size_t bag = 0; bag < bags.num_bags; ++bag) {
    const double factor = bags.Factor(bag);
    for (size_t i = bags.Begin(bag); i < bags.End(bag); ++i) {
      max = std::max(max, std::abs(factor * static_cast<double>(bags.Weight(i))));
    }
  }
  return max;
}

// Of the gradients before they were summed, whoever sums them, so that the same slots are left out.
// Infinite where sums that the rank has sent are not finite, which only a faulty rank does.
double MaxMagnitudeOf(const PlannedFeature& feature, const SlotGradient& gradient) {
  if (gradient.summed) {
    const size_t num_floats = size_t{gradient.num_rows} * gradient.dim;
    const bool finite = simd::ActiveKernels().all_finite(gradient.rows, num_floats);
    return finite ? gradient.max_magnitude : std::numeric_limits<double>::infinity();
  }
  const size_t num_padding_rows = feature.slot->embedding_summation ? 0 : 1;
  return MaxMagnitude({gradient.rows + num_padding_rows * gradient.dim,
                       (gradient.num_rows - num_padding_rows) * gradient.dim});
}

// Whether no sum that the slot contributes to can overflow: servers refuse an update with an
// infinity in it, so that one such sum would lose the gradients of all slots. The half left over is
// for what rounding adds.
bool SumsStayFinite(const PlannedFeature& feature, const SlotGradient& gradient,
                    float inverse_scale, size_t num_slots) {
  const double max = MaxMagnitudeOf(feature, gradient);
  const double bound = max * inverse_scale * MaxMultiplier(feature.bags()) *
                       static_cast<double>(feature.sign_numbers.size()) *
                       static_cast<double>(num_slots);
  return std::isfinite(max) && bound <= 0.5 * double{std::numeric_limits<float>::max()};
}

// A raw slot's padding row has a gradient too; nothing is updated by it.
BagGradients GradientsOf(const PlannedFeature& feature, const float* rows) {
  const SlotConfig& slot = *feature.slot;
  if (rows != nullptr && !slot.embedding_summation) rows += slot.dim;
  return {rows, slot.dim};
}

// How the sums of a group of signs are made.
enum class Way : uint8_t { kInPlace, kGathered, kGiven };

// One batch's sums. `sums` says by sign number where each goes, null for those left out.
class Summation {
 public:
  Summation(const LookupPlan& plan, std::span<const SlotGradient* const> selected, float scale,
            std::span<float* const> sums)
      : plan_(plan), scale_(scale), sums_(sums), ways_(plan.groups.size(), Way::kInPlace) {
    for (size_t i = 0; i < selected.size(); ++i) {
      const PlannedFeature& feature = plan.features[i];
      const bool given = selected[i] != nullptr && selected[i]->summed;
      const float* rows = selected[i] == nullptr ? nullptr : selected[i]->rows;
      bags_.push_back(feature.bags());
      gradients_.push_back(given ? BagGradients{rows, feature.slot->dim}
                                 : GradientsOf(feature, rows));
      if (given) {
        ways_[feature.group] = Way::kGiven;  // of a group of one slot
      } else if (!bags_[i].IsPlain()) {
        ways_[feature.group] = Way::kGathered;
      }
    }
  }

  // False, and the sums unfinished, when a gradient is not finite. Sums that were given are judged
  // by the caller, with all others.
  bool Run() {
    FillInPlace();
    for (size_t i = 0; i < bags_.size(); ++i) {
      if (gradients_[i].begin == nullptr) continue;
      const uint32_t group = plan_.features[i].group;
      if (ways_[group] == Way::kGiven) {
        CopyGiven(plan_.groups[group], &gradients_[i]);
        continue;
      }
      // Also brings them into the cache, for the sums.
      const size_t num_floats = size_t{bags_[i].num_bags} * bags_[i].dim;
      if (!simd::ActiveKernels().all_finite(gradients_[i].begin, num_floats)) return false;
      if (ways_[group] != Way::kInPlace) continue;
      AddInPlace(bags_[i], gradients_[i], scale_, sums_);
      gradients_[i].begin = nullptr;
    }
    Gather();
    return true;
  }

 private:
  // Minus zero is what leaves every number as it is when it is added.
  void FillInPlace() {
    ForEachSign(Way::kInPlace,
                [this](uint32_t number, uint32_t dim) { std::fill_n(sums_[number], dim, -0.0f); });
  }
  void CopyGiven(const PlannedGroup& group, BagGradients* given) {
    for (uint32_t i = 0; i < group.num_signs; ++i) {
      std::copy_n(given->begin + size_t{i} * group.dim, group.dim, sums_[group.first_number + i]);
    }
    given->begin = nullptr;
  }
  // What was neither added in place nor given.
  void Gather() {
    thread_local GradientSums gathered;
    if (std::find(ways_.begin(), ways_.end(), Way::kGathered) == ways_.end()) return;
    gathered.Build(bags_, gradients_, scale_, plan_.num_signs());
    ForEachSign(Way::kGathered, [this](uint32_t number, uint32_t dim) {
      constexpr uint32_t kAhead = 8;
      if (number + kAhead < plan_.num_signs()) gathered.Prefetch(number + kAhead, dim);
      gathered.Sum(number, dim, sums_[number]);
    });
  }
  // Calls use(number, dim) for those signs that are not left out, of groups that are summed so.
  template <typename Use>
  void ForEachSign(Way way, Use use) const {
    for (size_t g = 0; g < plan_.groups.size(); ++g) {
      if (ways_[g] != way) continue;
      uint32_t number = plan_.groups[g].first_number;
      const uint32_t end = number + plan_.groups[g].num_signs;
      for (; number < end; ++number) {
        if (sums_[number] != nullptr) use(number, plan_.groups[g].dim);
      }
    }
  }

  const LookupPlan& plan_;
  const float scale_;
  const std::span<float* const> sums_;
  std::vector<Way> ways_;   // by group
  std::vector<Bags> bags_;  // by feature, as the next
  std::vector<BagGradients> gradients_;
};

// By feature: what was sent for it, null for nothing, which is counted.
std::vector<const SlotGradient*> SelectSent(std::span<const SlotGradient* const> matched,
                                            ReducedGradients* reduced) {
  std::vector<const SlotGradient*> selected(matched.size(), nullptr);
  for (size_t i = 0; i < selected.size(); ++i) {
    if (matched[i] == nullptr || matched[i]->skipped) {
      reduced->skipped_features.push_back(static_cast<uint32_t>(i));
    } else {
      selected[i] = matched[i];
    }
  }
  return selected;
}

// Leaves out, and counts, what could make a sum that is not finite.
void DropNonfinite(const LookupPlan& plan, float inverse_scale,
                   std::span<const SlotGradient*> selected, ReducedGradients* reduced) {
  for (size_t i = 0; i < selected.size(); ++i) {
    if (selected[i] == nullptr) continue;
    if (SumsStayFinite(plan.features[i], *selected[i], inverse_scale, selected.size())) continue;
    selected[i] = nullptr;
    reduced->nonfinite_features.push_back(static_cast<uint32_t>(i));
  }
}

// By sign number: whether a slot that contributes has it.
std::vector<uint8_t> SignsToKeep(const LookupPlan& plan,
                                 std::span<const SlotGradient* const> selected) {
  std::vector<uint8_t> keep(plan.num_signs(), 0);
  for (size_t i = 0; i < selected.size(); ++i) {
    if (selected[i] == nullptr) continue;
    for (const uint32_t number : plan.features[i].sign_numbers) keep[number] = 1;
  }
  return keep;
}

// Where the sums of each server's request begin, in new memory.
std::vector<float*> AllocateSums(ReducedGradients* reduced) {
  std::vector<float*> begins;
  reduced->storage.clear();
  reduced->gradients.clear();
  for (const ServerBlocks& request : reduced->requests) {
    const uint64_t num_floats = request.num_floats();
    Buffer& buffer = reduced->storage.emplace_back(num_floats * sizeof(float));
    begins.push_back(reinterpret_cast<float*>(buffer.data()));
    reduced->gradients.emplace_back(begins.back(), num_floats);
  }
  return begins;
}

// Fills the requests, and makes room for their sums. (*sums)[number] is where a sign's goes, null
// where it is left out.
void LayOutSums(const LookupPlan& plan, std::span<const SlotGradient* const> selected,
                ReducedGradients* reduced, std::vector<float*>* sums) {
  if (std::find(selected.begin(), selected.end(), nullptr) == selected.end()) {
    reduced->requests = plan.requests;
    return LocateRows(plan, AllocateSums(reduced), sums);
  }
  const std::vector<uint8_t> keep = SignsToKeep(plan, selected);
  const auto is_kept = [&](const PlannedGroup&, uint32_t number) { return keep[number] != 0; };
  reduced->kept = SelectRequests(plan, is_kept);
  reduced->requests = reduced->kept;
  LocateRows(plan, AllocateSums(reduced), sums, is_kept);
}

// False when a gradient or a sum is not finite.
bool SumGradients(const LookupPlan& plan, std::span<const SlotGradient* const> selected,
                  float inverse_scale, ReducedGradients* reduced) {
  thread_local std::vector<float*> sums;
  LayOutSums(plan, selected, reduced, &sums);
  if (!Summation(plan, selected, inverse_scale, sums).Run()) return false;
  return std::all_of(reduced->gradients.begin(), reduced->gradients.end(),
                     [](std::span<const float> server) {
                       return simd::ActiveKernels().all_finite(server.data(), server.size());
                     });
}

}  // namespace

bool IsGradientScale(float scale) {
  return scale > 0.0f && std::isfinite(scale) && std::isfinite(1.0f / scale);
}

StatusOr<ReducedGradients> ReduceGradients(const LookupPlan& plan, float scale,
                                           std::span<const SlotGradient> gradients) {
  const float inverse_scale = 1.0f / scale;
  if (!IsGradientScale(scale)) {
    return InvalidArgument(
        "scale of the gradients is ", scale,
        ", must be a finite positive number: pass the loss scale, 1 without AMP");
  }
  PERSIA_ASSIGN_OR_RETURN(const auto matched, MatchSlots(plan, gradients));
  ReducedGradients reduced;
  std::vector<const SlotGradient*> selected = SelectSent(matched, &reduced);
  if (SumGradients(plan, selected, inverse_scale, &reduced)) return reduced;
  // Rare, so that which slots are to blame is only asked now.
  DropNonfinite(plan, inverse_scale, selected, &reduced);
  SumGradients(plan, selected, inverse_scale, &reduced);
  return reduced;
}

}  // namespace persia::worker
