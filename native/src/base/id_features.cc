#include "base/id_features.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <unordered_set>

#include "base/bytes.h"

namespace persia {
namespace {

constexpr uint32_t kMagic = 0x42444950;  // "PIDB"
constexpr uint32_t kVersion = 1;
constexpr uint32_t kWeightedVersion =
    2;  // with flags and weights; written only where there are any

enum FeatureFlags : uint32_t { kHasWeights = 1 };

// Branch-free over the array, so that checking costs little beside copying it.
bool NonDecreasing(std::span<const uint32_t> offsets) {
  bool ok = true;
  for (size_t i = 1; i < offsets.size(); ++i) ok &= offsets[i - 1] <= offsets[i];
  return ok;
}

// By magnitudes, so that it is vectorised as well.
bool AllFinite(std::span<const float> weights) {
  bool ok = true;
  for (const float weight : weights) ok &= std::abs(weight) <= std::numeric_limits<float>::max();
  return ok;
}

Status FeatureError(const IdFeature& feature, const auto&... what) {
  return InvalidArgument("feature '", feature.name, "': ", what...);
}

// Everything that later stages take for granted. They index by these offsets without another look,
// so each condition here is one that would otherwise read past an array.
Status CheckFeature(const IdFeature& feature, uint32_t batch_size) {
  if (feature.name.empty()) return InvalidArgument("ID features: a feature has no name");
  if (feature.offsets.size() != size_t{batch_size} + 1) {
    return FeatureError(feature, feature.offsets.size(), " offsets for a batch of ", batch_size,
                        "; batch_size + 1 are needed");
  }
  if (feature.offsets.front() != 0 || feature.offsets.back() != feature.ids.size() ||
      !NonDecreasing(feature.offsets)) {
    return FeatureError(feature,
                        "offsets must begin with 0, never decrease and end with the number of IDs");
  }
  if (!feature.weights.empty() && feature.weights.size() != feature.ids.size()) {
    return FeatureError(feature, feature.weights.size(), " weights for ", feature.ids.size(),
                        " IDs; one an ID is needed");
  }
  if (!AllFinite(feature.weights)) {
    return FeatureError(feature, "a weight is NaN or infinite: drop its ID, or give it 0");
  }
  return Status::Ok();
}

// Before the features are read, because their arrays are as long as the batch: a batch size from
// the network must not be trusted with that.
Status CheckHead(uint32_t batch_size, size_t num_features) {
  if (num_features == 0) return InvalidArgument("ID features: a batch needs at least one feature");
  if (batch_size > kMaxBatchSize) {
    return InvalidArgument("batch_size: ", batch_size, " samples, at most ", kMaxBatchSize,
                           " fit into a batch");
  }
  return Status::Ok();
}

Status CheckBatch(const IdFeatures& batch) {
  PERSIA_RETURN_IF_ERROR(CheckHead(batch.batch_size, batch.features.size()));
  std::unordered_set<std::string_view> names;
  for (const IdFeature& feature : batch.features) {
    PERSIA_RETURN_IF_ERROR(CheckFeature(feature, batch.batch_size));
    if (!names.insert(feature.name).second) {
      return FeatureError(feature, "appears twice in the batch");
    }
  }
  return Status::Ok();
}

// One feature in place. The order of the reads is the format; failures show once, at the end.
Status ReadFeature(ByteReader* reader, uint32_t version, IdFeatures* batch) {
  const auto name_bytes = reader->Get<uint32_t>();
  const auto flags = reader->Get<uint32_t>();  // reserved without weights
  const auto num_ids = reader->Get<uint64_t>();
  IdFeature feature;
  feature.name = reader->GetString(name_bytes);
  feature.offsets = reader->GetArray<uint32_t>(uint64_t{batch->batch_size} + 1);
  feature.ids = reader->GetArray<uint64_t>(num_ids);
  if (version == kWeightedVersion) {
    if (reader->ok() && (flags & ~uint32_t{kHasWeights}) != 0) {
      return Corruption("ID features: feature '", feature.name, "' has flags ", flags,
                        "; known is 1 (weights)");
    }
    if ((flags & kHasWeights) != 0) feature.weights = reader->GetArray<float>(num_ids);
  }
  if (!reader->ok())
    return Corruption("ID features: the message ends before its last feature does");
  batch->features.push_back(feature);
  return Status::Ok();
}

}  // namespace

// Checked before a byte is written: the loader's script gets the error, with its own names in it.
StatusOr<std::vector<std::byte>> EncodeIdFeatures(const IdFeatures& batch) {
  PERSIA_RETURN_IF_ERROR(CheckBatch(batch));
  size_t size = 64;
  for (const IdFeature& feature : batch.features) {
    // With room for the paddings.
    size += feature.name.size() + feature.offsets.size_bytes() + feature.ids.size_bytes() +
            feature.weights.size_bytes() + 64;
  }
  ByteWriter writer;
  writer.Reserve(size);
  writer.Put(kMagic);
  // The old version where it suffices, so that workers that do not know weights take batches
  // without them.
  const bool weighted =
      std::any_of(batch.features.begin(), batch.features.end(),
                  [](const IdFeature& feature) { return !feature.weights.empty(); });
  writer.Put(weighted ? kWeightedVersion : kVersion);
  writer.Put(static_cast<uint32_t>(batch.features.size()));
  writer.Put(batch.batch_size);
  for (const IdFeature& feature : batch.features) {
    writer.Put(static_cast<uint32_t>(feature.name.size()));
    writer.Put(feature.weights.empty() ? uint32_t{0} : uint32_t{kHasWeights});
    writer.Put(uint64_t{feature.ids.size()});
    writer.PutString(feature.name);
    writer.PutArray(feature.offsets);
    writer.PutArray(feature.ids);
    if (!feature.weights.empty()) writer.PutArray(feature.weights);
  }
  return writer.Release();
}

StatusOr<IdFeatures> DecodeIdFeatures(std::span<const std::byte> message) {
  ByteReader reader(message);
  const auto magic = reader.Get<uint32_t>();
  const auto version = reader.Get<uint32_t>();
  const auto num_features = reader.Get<uint32_t>();
  IdFeatures batch;
  batch.batch_size = reader.Get<uint32_t>();
  if (!reader.ok()) return Corruption("ID features: the message ends within its header");
  if (magic != kMagic) return Corruption("ID features: the magic number is not PIDB");
  if (version != kVersion && version != kWeightedVersion) {
    return Corruption("ID features: version ", version, "; this build reads 1 and 2");
  }
  PERSIA_RETURN_IF_ERROR(CheckHead(batch.batch_size, num_features));
  for (uint32_t i = 0; i < num_features; ++i) {
    PERSIA_RETURN_IF_ERROR(ReadFeature(&reader, version, &batch));
  }
  // A message of a newer form would otherwise lose its end silently.
  if (reader.remaining() != 0) {
    return Corruption("ID features: ", reader.remaining(),
                      " bytes are left over after the last feature");
  }
  PERSIA_RETURN_IF_ERROR(CheckBatch(batch));
  return batch;
}

}  // namespace persia
