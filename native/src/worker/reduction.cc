#include "worker/reduction.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include "worker/pooling.h"
#include "worker/row_kernels.h"

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
StatusOr<std::vector<const SlotGradient*>> MatchSlots(const BatchPlan& plan,
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

// Infinity when an element is NaN or infinite. Compared as integers, which order like the floats.
float MaxMagnitude(const float* values, size_t count) {
  uint32_t max_bits = 0;
  for (size_t i = 0; i < count; ++i) {
    max_bits = std::max(max_bits, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  }
  const float max = std::bit_cast<float>(max_bits);
  return std::isfinite(max) ? max : std::numeric_limits<float>::infinity();
}

// Whether no sum that the slot contributes to can overflow: servers refuse an update with an
// infinity in it, so that one such sum would lose the gradients of all slots. The half left over is
// for what rounding adds.
bool SumsStayFinite(const PlannedFeature& feature, const SlotGradient& gradient,
                    float inverse_scale, size_t num_slots) {
  const size_t num_padding_rows = feature.slot->embedding_summation ? 0 : 1;
  const double max = MaxMagnitude(gradient.rows + num_padding_rows * gradient.dim,
                                  (gradient.num_rows - num_padding_rows) * gradient.dim);
  const double bound = max * inverse_scale * static_cast<double>(feature.sign_numbers.size()) *
                       static_cast<double>(num_slots);
  return std::isfinite(max) && bound <= 0.5 * double{std::numeric_limits<float>::max()};
}

void AddSlot(const PlannedFeature& feature, const float* gradient, float inverse_scale,
             std::span<float* const> sums) {
  const SlotConfig& slot = *feature.slot;
  const size_t num_buckets = slot.num_buckets();
  const std::span<const uint32_t> numbers = feature.sign_numbers;
  const RowKernels kernels;
  const auto add = [&](size_t row, size_t begin, size_t end) {
    const float factor = inverse_scale * SumFactor(slot, static_cast<uint32_t>(end - begin));
    for (const uint32_t number : numbers.subspan(begin, end - begin)) {
      kernels.AddScaled(gradient + row * slot.dim, factor, slot.dim, sums[number]);
    }
  };
  if (slot.embedding_summation) {
    for (size_t sample = 0; sample + 1 < feature.offsets.size(); ++sample) {
      add(sample, feature.offsets[sample] * num_buckets, feature.offsets[sample + 1] * num_buckets);
    }
  } else {
    for (size_t item = 0; item < feature.num_items(); ++item) {
      add(item + 1, item * num_buckets, (item + 1) * num_buckets);
    }
  }
}

// The requests of the lookup without the signs that no contributing slot has.
std::vector<ServerBlocks> KeepSigns(const BatchPlan& plan, const std::vector<uint8_t>& keep) {
  std::vector<ServerBlocks> kept(plan.requests.size());
  std::vector<size_t> next(plan.requests.size(), 0);  // into the lookup's signs
  size_t number = 0;
  for (const PlannedGroup& group : plan.groups) {
    std::vector<uint32_t> num_kept(plan.requests.size(), 0);
    for (uint32_t i = 0; i < group.num_signs; ++i, ++number) {
      const uint16_t server = plan.server_of[number];
      const uint64_t sign = plan.requests[server].signs[next[server]++];
      if (keep[number] == 0) continue;
      kept[server].signs.push_back(sign);
      ++num_kept[server];
    }
    for (size_t server = 0; server < kept.size(); ++server) {
      if (num_kept[server] != 0) kept[server].blocks.push_back({group.dim, num_kept[server]});
    }
  }
  return kept;
}

// By feature: what it contributes, null for nothing. Counts the slots that contribute nothing.
std::vector<const float*> SelectSlots(const BatchPlan& plan,
                                      std::span<const SlotGradient* const> matched,
                                      float inverse_scale, ReducedGradients* reduced) {
  std::vector<const float*> selected(plan.features.size(), nullptr);
  for (size_t i = 0; i < selected.size(); ++i) {
    if (matched[i] == nullptr || matched[i]->skipped) {
      ++reduced->num_skipped_slots;
    } else if (!SumsStayFinite(plan.features[i], *matched[i], inverse_scale, selected.size())) {
      ++reduced->num_nonfinite_slots;
    } else {
      selected[i] = matched[i]->rows;
    }
  }
  return selected;
}

// Fills the requests, and the gradients with zeros. By sign number: where its sum goes, null where
// the sign is left out.
std::vector<float*> LayOutSums(const BatchPlan& plan, std::span<const float* const> selected,
                               ReducedGradients* reduced) {
  std::vector<uint8_t> keep(plan.num_signs(), 0);
  for (size_t i = 0; i < selected.size(); ++i) {
    if (selected[i] == nullptr) continue;
    for (const uint32_t number : plan.features[i].sign_numbers) keep[number] = 1;
  }
  reduced->requests = KeepSigns(plan, keep);
  std::vector<float*> next;
  for (const ServerBlocks& request : reduced->requests) {
    next.push_back(reduced->gradients.emplace_back(request.num_floats(), 0.0f).data());
  }
  std::vector<float*> sums(plan.num_signs(), nullptr);
  size_t number = 0;
  for (const PlannedGroup& group : plan.groups) {
    for (uint32_t i = 0; i < group.num_signs; ++i, ++number) {
      if (keep[number] == 0) continue;
      float*& sum = next[plan.server_of[number]];
      sums[number] = sum;
      sum += group.dim;
    }
  }
  return sums;
}

}  // namespace

StatusOr<ReducedGradients> ReduceGradients(const BatchPlan& plan, float scale,
                                           std::span<const SlotGradient> gradients) {
  const float inverse_scale = 1.0f / scale;
  if (!(scale > 0.0f) || !std::isfinite(scale) || !std::isfinite(inverse_scale)) {
    return InvalidArgument(
        "scale of the gradients is " + std::to_string(scale) +
        ", must be a finite positive number: pass the loss scale, 1 without AMP");
  }
  StatusOr<std::vector<const SlotGradient*>> matched = MatchSlots(plan, gradients);
  if (!matched.ok()) return matched.status();
  ReducedGradients reduced;
  const std::vector<const float*> selected = SelectSlots(plan, *matched, inverse_scale, &reduced);
  const std::vector<float*> sums = LayOutSums(plan, selected, &reduced);
  for (size_t i = 0; i < selected.size(); ++i) {
    if (selected[i] != nullptr) AddSlot(plan.features[i], selected[i], inverse_scale, sums);
  }
  return reduced;
}

}  // namespace persia::worker
