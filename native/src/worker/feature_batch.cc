#include "worker/feature_batch.h"

#include <string>
#include <utility>

#include "base/id_features.h"

namespace persia::worker {
namespace {

// Of a raw slot's index; as many as fit into the largest embeddings message, so that a batch that
// could never be answered is refused before memory is taken for it.
constexpr uint64_t kMaxIndexCells = 1ull << 27;

Status FeatureError(std::string_view name, const std::string& what) {
  return InvalidArgument("feature '" + std::string(name) + "': " + what);
}

StatusOr<Feature> FindSlot(const IdFeature& feature, const SlotTable& slots) {
  const SlotConfig* slot = slots.Find(feature.name);
  if (slot == nullptr) {
    return FeatureError(
        feature.name, "the embedding config has no slot of this name: add one, or do not send it");
  }
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
  return Feature{slot, feature.offsets, feature.ids, feature.weights};
}

// Signs are numbered with 32 bits in a batch.
Status CheckNumSigns(std::span<const Feature> features) {
  uint64_t num_signs = 0;
  for (const Feature& feature : features) {
    num_signs += uint64_t{feature.ids.size()} * feature.slot->num_buckets();
    if (num_signs > UINT32_MAX) {
      return FeatureError(feature.slot->name,
                          "with it the batch has " + std::to_string(num_signs) +
                              " IDs after the hash stack, at most 2^32 - 1 fit: send smaller "
                              "batches");
    }
  }
  return Status::Ok();
}

}  // namespace

StatusOr<FeatureBatch> FeatureBatch::Decode(Buffer bytes, const SlotTable& slots) {
  StatusOr<IdFeatures> decoded = DecodeIdFeatures(std::as_const(bytes).span());
  if (!decoded.ok()) return decoded.status();
  FeatureBatch batch;
  batch.batch_size_ = decoded->batch_size;
  batch.features_.reserve(decoded->features.size());
  for (const IdFeature& id_feature : decoded->features) {
    StatusOr<Feature> feature = FindSlot(id_feature, slots);
    if (!feature.ok()) return feature.status();
    batch.features_.push_back(*feature);
  }
  PERSIA_RETURN_IF_ERROR(CheckNumSigns(batch.features_));
  batch.bytes_ = std::move(bytes);  // the features' views stay where they are
  return batch;
}

}  // namespace persia::worker
