#include "base/id_features.h"

#include <string>
#include <unordered_set>

#include "base/bytes.h"

namespace persia {
namespace {

constexpr uint32_t kMagic = 0x42444950;  // "PIDB"
constexpr uint32_t kVersion = 1;

// Branch-free over the array, so that checking costs little beside copying it.
bool NonDecreasing(std::span<const uint32_t> offsets) {
  bool ok = true;
  for (size_t i = 1; i < offsets.size(); ++i) ok &= offsets[i - 1] <= offsets[i];
  return ok;
}

Status FeatureError(const IdFeature& feature, const std::string& what) {
  return InvalidArgument("feature '" + std::string(feature.name) + "': " + what);
}

Status CheckFeature(const IdFeature& feature, uint32_t batch_size) {
  if (feature.name.empty()) return InvalidArgument("ID features: a feature has no name");
  if (feature.offsets.size() != size_t{batch_size} + 1) {
    return FeatureError(feature, std::to_string(feature.offsets.size()) +
                                     " offsets for a batch of " + std::to_string(batch_size) +
                                     "; batch_size + 1 are needed");
  }
  if (feature.offsets.front() != 0 || feature.offsets.back() != feature.ids.size() ||
      !NonDecreasing(feature.offsets)) {
    return FeatureError(feature,
                        "offsets must begin with 0, never decrease and end with the number of IDs");
  }
  return Status::Ok();
}

Status CheckHead(uint32_t batch_size, size_t num_features) {
  if (num_features == 0) return InvalidArgument("ID features: a batch needs at least one feature");
  if (batch_size > kMaxBatchSize) {
    return InvalidArgument("batch_size: " + std::to_string(batch_size) + " samples, at most " +
                           std::to_string(kMaxBatchSize) + " fit into a batch");
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

IdFeature ReadFeature(ByteReader* reader, uint32_t batch_size) {
  const auto name_bytes = reader->Get<uint32_t>();
  reader->Get<uint32_t>();  // reserved
  const auto num_ids = reader->Get<uint64_t>();
  IdFeature feature;
  feature.name = reader->GetString(name_bytes);
  feature.offsets = reader->GetArray<uint32_t>(uint64_t{batch_size} + 1);
  feature.ids = reader->GetArray<uint64_t>(num_ids);
  return feature;
}

}  // namespace

StatusOr<std::vector<std::byte>> EncodeIdFeatures(const IdFeatures& batch) {
  PERSIA_RETURN_IF_ERROR(CheckBatch(batch));
  ByteWriter writer;
  writer.Put(kMagic);
  writer.Put(kVersion);
  writer.Put(static_cast<uint32_t>(batch.features.size()));
  writer.Put(batch.batch_size);
  for (const IdFeature& feature : batch.features) {
    writer.Put(static_cast<uint32_t>(feature.name.size()));
    writer.Put(uint32_t{0});
    writer.Put(uint64_t{feature.ids.size()});
    writer.PutString(feature.name);
    writer.PutArray(feature.offsets);
    writer.PutArray(feature.ids);
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
  if (version != kVersion) {
    return Corruption("ID features: version " + std::to_string(version) + "; this build reads 1");
  }
  PERSIA_RETURN_IF_ERROR(CheckHead(batch.batch_size, num_features));
  for (uint32_t i = 0; i < num_features; ++i) {
    batch.features.push_back(ReadFeature(&reader, batch.batch_size));
    if (!reader.ok()) {
      return Corruption("ID features: the message ends before its last feature does");
    }
  }
  if (reader.remaining() != 0) {
    return Corruption("ID features: " + std::to_string(reader.remaining()) +
                      " bytes are left over after the last feature");
  }
  PERSIA_RETURN_IF_ERROR(CheckBatch(batch));
  return batch;
}

}  // namespace persia
