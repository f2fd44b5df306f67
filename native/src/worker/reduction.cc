#include "worker/reduction.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "worker/bags.h"
#include "worker/wire_floats.h"

namespace persia::worker {
namespace {

Status SlotError(std::string_view slot, const std::string& what) {
  return InvalidArgument("gradient of slot '" + std::string(slot) + "': " + what);
}

Status CheckShape(const PlannedFeature& feature, const SlotGradient& gradient) {
  if (gradient.skipped) return Status::Ok();
  if (gradient.num_rows == feature.num_rows() && gradient.dim == feature.slot->dim) {
    return Status::Ok();
  }
  return SlotError(gradient.slot, "its shape is [" + std::to_string(gradient.num_rows) + ", " +
                                      std::to_string(gradient.dim) + "], that of the embeddings [" +
                                      std::to_string(feature.num_rows()) + ", " +
                                      std::to_string(feature.slot->dim) + "]");
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
    PERSIA_RETURN_IF_ERROR(CheckShape(*feature, gradient));
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

// Whether no sum that the slot contributes to can overflow: servers refuse an update with an
// infinity in it, so that one such sum would lose the gradients of all slots. The half left over is
// for what rounding adds.
bool SumsStayFinite(const PlannedFeature& feature, const SlotGradient& gradient,
                    float inverse_scale, size_t num_slots) {
  const size_t num_padding_rows = feature.slot->embedding_summation ? 0 : 1;
  const double max = MaxMagnitude({gradient.rows + num_padding_rows * gradient.dim,
                                   (gradient.num_rows - num_padding_rows) * gradient.dim});
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

// The gradients are read once, from front to back, and added to the sums, which are as many as the
// signs of one group and so near at hand.
void AddInPlace(const Bags& bags, const BagGradients& gradients, float scale,
                std::span<float* const> sums) {
  const simd::Kernels& kernels = simd::ActiveKernels();
  const float* gradient = gradients.begin;
  for (const uint32_t number : bags.numbers) {
    if (scale == 1.0f) {
      kernels.add(sums[number], gradient, bags.dim);
    } else {
      kernels.add_scaled(sums[number], gradient, scale, bags.dim);
    }
    gradient += gradients.stride;
  }
}

// One batch's sums. `sums` says by sign number where each goes, null for those left out.
class Summation {
 public:
  Summation(const LookupPlan& plan, std::span<const float* const> selected, float scale,
            std::span<float* const> sums)
      : plan_(plan), scale_(scale), sums_(sums), is_plain_(plan.groups.size(), true) {
    for (size_t i = 0; i < selected.size(); ++i) {
      bags_.push_back(plan.features[i].bags());
      gradients_.push_back(GradientsOf(plan.features[i], selected[i]));
      if (!bags_[i].IsPlain()) is_plain_[plan.features[i].group] = false;
    }
  }

  // False, and the sums unfinished, when a gradient is not finite.
  bool Run() {
    FillPlain();
    for (size_t i = 0; i < bags_.size(); ++i) {
      if (gradients_[i].begin == nullptr) continue;
      // Also brings them into the cache, for the sums.
      const size_t num_floats = size_t{bags_[i].num_bags} * bags_[i].dim;
      if (!simd::ActiveKernels().all_finite(gradients_[i].begin, num_floats)) return false;
      if (!is_plain_[plan_.features[i].group]) continue;
      AddInPlace(bags_[i], gradients_[i], scale_, sums_);
      gradients_[i].begin = nullptr;
    }
    Gather();
    return true;
  }

 private:
  // Minus zero is what leaves every number as it is when it is added.
  void FillPlain() {
    ForEachSign(true,
                [this](uint32_t number, uint32_t dim) { std::fill_n(sums_[number], dim, -0.0f); });
  }
  // What was not added in place.
  void Gather() {
    thread_local GradientSums gathered;
    if (std::all_of(is_plain_.begin(), is_plain_.end(), [](bool plain) { return plain; })) return;
    gathered.Build(bags_, gradients_, scale_, plan_.num_signs());
    ForEachSign(false, [this](uint32_t number, uint32_t dim) {
      constexpr uint32_t kAhead = 8;
      if (number + kAhead < plan_.num_signs()) gathered.Prefetch(number + kAhead, dim);
      gathered.Sum(number, dim, sums_[number]);
    });
  }
  // Calls use(number, dim) for those signs that are not left out, of groups that are plain or not.
  template <typename Use>
  void ForEachSign(bool plain, Use use) const {
    uint32_t number = 0;
    for (size_t g = 0; g < plan_.groups.size(); ++g) {
      const uint32_t end = number + plan_.groups[g].num_signs;
      if (is_plain_[g] != plain) number = end;
      for (; number < end; ++number) {
        if (sums_[number] != nullptr) use(number, plan_.groups[g].dim);
      }
    }
  }

  const LookupPlan& plan_;
  const float scale_;
  const std::span<float* const> sums_;
  std::vector<bool> is_plain_;  // by group
  std::vector<Bags> bags_;      // by feature, as the next
  std::vector<BagGradients> gradients_;
};

// By feature: what was sent for it, null for nothing, which is counted.
std::vector<const float*> SelectSent(std::span<const SlotGradient* const> matched,
                                     ReducedGradients* reduced) {
  std::vector<const float*> selected(matched.size(), nullptr);
  for (size_t i = 0; i < selected.size(); ++i) {
    if (matched[i] == nullptr || matched[i]->skipped) {
      reduced->skipped_features.push_back(static_cast<uint32_t>(i));
    } else {
      selected[i] = matched[i]->rows;
    }
  }
  return selected;
}

// Leaves out, and counts, what could make a sum that is not finite.
void DropNonfinite(const LookupPlan& plan, std::span<const SlotGradient* const> matched,
                   float inverse_scale, std::span<const float*> selected,
                   ReducedGradients* reduced) {
  for (size_t i = 0; i < selected.size(); ++i) {
    if (selected[i] == nullptr) continue;
    if (SumsStayFinite(plan.features[i], *matched[i], inverse_scale, selected.size())) continue;
    selected[i] = nullptr;
    reduced->nonfinite_features.push_back(static_cast<uint32_t>(i));
  }
}

// By sign number: whether a slot that contributes has it.
std::vector<uint8_t> SignsToKeep(const LookupPlan& plan, std::span<const float* const> selected) {
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
void LayOutSums(const LookupPlan& plan, std::span<const float* const> selected,
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
bool SumGradients(const LookupPlan& plan, std::span<const float* const> selected,
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

StatusOr<ReducedGradients> ReduceGradients(const LookupPlan& plan, float scale,
                                           std::span<const SlotGradient> gradients) {
  const float inverse_scale = 1.0f / scale;
  if (!(scale > 0.0f) || !std::isfinite(scale) || !std::isfinite(inverse_scale)) {
    return InvalidArgument(
        "scale of the gradients is " + std::to_string(scale) +
        ", must be a finite positive number: pass the loss scale, 1 without AMP");
  }
  PERSIA_ASSIGN_OR_RETURN(const auto matched, MatchSlots(plan, gradients));
  ReducedGradients reduced;
  std::vector<const float*> selected = SelectSent(matched, &reduced);
  if (SumGradients(plan, selected, inverse_scale, &reduced)) return reduced;
  // Rare, so that which slots are to blame is only asked now.
  DropNonfinite(plan, matched, inverse_scale, selected, &reduced);
  SumGradients(plan, selected, inverse_scale, &reduced);
  return reduced;
}

}  // namespace persia::worker
