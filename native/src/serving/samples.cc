#include "serving/samples.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "base/bytes.h"

namespace persia::serving {
namespace {

// The form of PersiaBatch.to_bytes() (persia/embedding/data.py, dense_codec.py), which clients send
// and logs keep. These numbers must be the same there.
constexpr uint32_t kBatchMagic = 0x54414250;  // "PBAT"
constexpr uint32_t kDenseMagic = 0x534e4450;  // "PDNS"
constexpr uint32_t kVersion = 1;
constexpr uint32_t kNoMeta = 0xffffffff;
constexpr uint8_t kFeatureRole = 0;
constexpr uint8_t kLabelRole = 1;
constexpr uint8_t kMaxDims = 32;
constexpr std::array<uint32_t, kNumDtypes> kItemBytes = {1, 1, 2, 4, 8, 1, 2, 4, 4, 8, 2};

// The exponent of a number that is NaN or infinite has all bits set.
template <typename T>
bool NoneHasAll(std::span<const std::byte> values, T exponent) {
  bool ok = true;
  for (size_t i = 0; i + sizeof(T) <= values.size(); i += sizeof(T)) {
    T bits;
    std::memcpy(&bits, values.data() + i, sizeof(T));
    ok &= (bits & exponent) != exponent;
  }
  return ok;
}

// The bytes of `num_samples` samples; none where they would not fit 64 bits.
uint64_t ValueBytes(uint64_t num_samples, std::span<const uint64_t> shape, uint8_t dtype) {
  uint64_t count = num_samples;
  for (const uint64_t size : shape) {
    if (size != 0 && count > std::numeric_limits<uint32_t>::max() / size) return ~uint64_t{0};
    count *= size;
  }
  return count * kItemBytes[dtype];
}

Status CutShort() { return Corruption("dense section is cut short"); }

// One tensor in place; a label is skipped.
Status ReadTensor(ByteReader* reader, Samples* samples) {
  const auto role = reader->Get<uint8_t>();
  const auto dtype = reader->Get<uint8_t>();
  const auto num_dims = reader->Get<uint8_t>();
  reader->Get<uint8_t>();
  const auto name_bytes = reader->Get<uint32_t>();
  if (!reader->ok()) return CutShort();
  if (role > kLabelRole || dtype >= kNumDtypes || num_dims == 0 || num_dims > kMaxDims) {
    return Corruption("dense section: a tensor has role ", role, ", dtype ", dtype, ", ", num_dims,
                      " dimensions");
  }
  const auto shape = reader->GetArray<uint64_t>(num_dims);
  DenseFeature feature;
  feature.name = reader->GetString(name_bytes);
  if (!reader->ok()) return CutShort();
  if (shape[0] != samples->size()) {
    return Corruption("dense section: a tensor has ", shape[0], " rows in a batch of ",
                      samples->size());
  }
  feature.dtype = dtype;
  feature.shape.assign(shape.begin() + 1, shape.end());
  feature.values = reader->GetArray<std::byte>(ValueBytes(shape[0], feature.shape, dtype));
  if (!reader->ok()) return CutShort();
  const auto is_no_bool = [](std::byte value) { return value > std::byte{1}; };
  if (dtype == kBool && std::any_of(feature.values.begin(), feature.values.end(), is_no_bool)) {
    return Corruption("dense section: bytes other than 0 and 1 in a tensor of bool");
  }
  if (role == kFeatureRole) samples->dense.push_back(std::move(feature));
  return Status::Ok();
}

Status ReadDense(std::span<const std::byte> section, Samples* samples) {
  ByteReader reader(section);
  const auto magic = reader.Get<uint32_t>();
  const auto version = reader.Get<uint32_t>();
  const auto batch_size = reader.Get<uint32_t>();
  const auto num_tensors = reader.Get<uint32_t>();
  const auto meta_bytes = reader.Get<uint32_t>();
  reader.Get<uint32_t>();
  if (!reader.ok()) return CutShort();
  if (magic != kDenseMagic || version != kVersion || batch_size != samples->size()) {
    return Corruption("not a dense section of version 1 for ", samples->size(), " samples");
  }
  if (meta_bytes != kNoMeta) reader.GetString(meta_bytes);
  for (uint32_t i = 0; i < num_tensors; ++i) {
    PERSIA_RETURN_IF_ERROR(ReadTensor(&reader, samples));
  }
  if (!reader.ok() || reader.remaining() != 0) return CutShort();
  return Status::Ok();
}

// Arrays of one feature of a merged batch.
// Owned here until the batch is encoded: IdFeatures has views alone.
struct MergedIds {
  std::vector<uint32_t> offsets = {0};
  std::vector<uint64_t> ids;
  std::vector<float> weights;
};

MergedIds MergeIds(std::span<const Samples* const> parts, size_t feature) {
  MergedIds merged;
  size_t num_samples = 0;
  size_t num_ids = 0;
  size_t num_weights = 0;
  for (const Samples* part : parts) {
    const IdFeature& ids = part->ids.features[feature];
    num_samples += part->size();
    num_ids += ids.ids.size();
    num_weights += ids.weights.size();
  }
  merged.offsets.reserve(num_samples + 1);
  merged.ids.reserve(num_ids);
  merged.weights.reserve(num_weights);
  for (const Samples* part : parts) {
    const IdFeature& ids = part->ids.features[feature];
    // Offsets of a part count from its own first ID. Too many IDs for 32 bits do not fit the
    // message either, which is then refused.
    const auto begin = static_cast<uint32_t>(merged.ids.size());
    for (const uint32_t offset : ids.offsets.subspan(1)) merged.offsets.push_back(begin + offset);
    merged.ids.insert(merged.ids.end(), ids.ids.begin(), ids.ids.end());
    merged.weights.insert(merged.weights.end(), ids.weights.begin(), ids.weights.end());
  }
  return merged;
}

// Whether IDs of this feature have weights. Without IDs there are none to tell by.
bool IsWeighted(const IdFeature& feature) { return !feature.weights.empty(); }

// Without labels and metadata, which a prediction does not need. The parts have one layout
// (HaveOneLayout), so the first one describes all.
void PutDense(std::span<const Samples* const> parts, uint32_t batch_size, ByteWriter* writer) {
  const auto& features = parts.front()->dense;
  size_t num_bytes = 64;
  for (const DenseFeature& feature : features) {
    num_bytes +=
        feature.name.size() + feature.shape.size() * sizeof(uint64_t) + 64;  // with paddings
  }
  for (const Samples* part : parts) {
    for (const DenseFeature& feature : part->dense) num_bytes += feature.values.size();
  }
  writer->Reserve(num_bytes);
  for (const uint32_t field : {kDenseMagic, kVersion, batch_size,
                               static_cast<uint32_t>(features.size()), kNoMeta, uint32_t{0}}) {
    writer->Put(field);
  }
  for (size_t i = 0; i < features.size(); ++i) {
    const DenseFeature& feature = features[i];
    writer->Put(kFeatureRole);
    writer->Put(feature.dtype);
    writer->Put(static_cast<uint8_t>(feature.shape.size() + 1));
    writer->Put(uint8_t{0});
    writer->Put(static_cast<uint32_t>(feature.name.size()));
    writer->Put(uint64_t{batch_size});
    for (const uint64_t size : feature.shape) writer->Put(size);
    writer->PutString(feature.name);
    for (const Samples* part : parts) {
      writer->PutBytes(part->dense[i].values.data(), part->dense[i].values.size());
    }
    writer->Align();
  }
}

}  // namespace

uint32_t ItemBytes(uint8_t dtype) { return kItemBytes[dtype]; }

bool AllFinite(uint8_t dtype, std::span<const std::byte> values) {
  constexpr uint8_t kFloat64 = 9;
  constexpr uint8_t kFloat16 = 10;
  if (dtype == kFloat32) return NoneHasAll<uint32_t>(values, 0x7f80'0000u);
  if (dtype == kFloat64) return NoneHasAll<uint64_t>(values, 0x7ff0'0000'0000'0000u);
  if (dtype == kFloat16) return NoneHasAll<uint16_t>(values, 0x7c00u);
  return true;
}

StatusOr<Samples> DecodeSamples(std::span<const std::byte> content) {
  Samples samples;
  samples.memory = Buffer(content.size());  // aligned, which `content` need not be
  if (!content.empty()) std::memcpy(samples.memory.data(), content.data(), content.size());
  ByteReader reader(samples.memory.span());
  const auto magic = reader.Get<uint32_t>();
  const auto version = reader.Get<uint32_t>();
  const auto requires_grad = reader.Get<uint32_t>();
  reader.Get<uint32_t>();
  const auto id_bytes = reader.Get<uint64_t>();
  const auto dense_bytes = reader.Get<uint64_t>();
  if (!reader.ok() || magic != kBatchMagic || version != kVersion || requires_grad > 1) {
    return Corruption("not a batch of version 1");
  }
  const size_t left = reader.remaining();
  if (id_bytes > left || dense_bytes != left - id_bytes || id_bytes % 8 != 0) {
    return Corruption("a batch of ", id_bytes, " + ", dense_bytes, " bytes came with ", left);
  }
  const auto body = std::as_const(samples.memory).span().last(left);
  PERSIA_ASSIGN_OR_RETURN(samples.ids,
                          DecodeIdFeatures(body.first(id_bytes),
                                           std::max(kMaxSampleIdBytes, uint64_t{content.size()})));
  if (samples.size() == 0) return InvalidArgument("the batch has no samples");
  PERSIA_RETURN_IF_ERROR(ReadDense(body.subspan(id_bytes), &samples));
  samples.is_batch = true;
  return samples;
}

bool HaveOneLayout(const Samples& a, const Samples& b) {
  const auto same_ids = [](const IdFeature& x, const IdFeature& y) {
    return x.name == y.name && IsWeighted(x) == IsWeighted(y);
  };
  const auto same_dense = [](const DenseFeature& x, const DenseFeature& y) {
    return x.name == y.name && x.dtype == y.dtype && x.shape == y.shape;
  };
  return std::equal(a.ids.features.begin(), a.ids.features.end(), b.ids.features.begin(),
                    b.ids.features.end(), same_ids) &&
         std::equal(a.dense.begin(), a.dense.end(), b.dense.begin(), b.dense.end(), same_dense);
}

StatusOr<std::vector<std::byte>> Merge(std::span<const Samples* const> parts) {
  IdFeatures ids;
  std::vector<MergedIds> merged;
  const size_t num_features = parts.front()->ids.features.size();
  merged.reserve(num_features);
  for (const Samples* part : parts) ids.batch_size += part->size();
  for (size_t i = 0; i < num_features; ++i) {
    const MergedIds& arrays = merged.emplace_back(MergeIds(parts, i));
    ids.features.push_back(
        {parts.front()->ids.features[i].name, arrays.offsets, arrays.ids, arrays.weights});
  }
  PERSIA_ASSIGN_OR_RETURN(const auto id_section, EncodeIdFeatures(ids));
  ByteWriter dense;
  PutDense(parts, ids.batch_size, &dense);
  ByteWriter message;
  constexpr std::array<uint32_t, 4> kHead = {kBatchMagic, kVersion, 0, 0};
  message.Reserve(sizeof(kHead) + 2 * sizeof(uint64_t) + id_section.size() + dense.size());
  message.PutBytes(kHead.data(), sizeof(kHead));
  message.Put(uint64_t{id_section.size()});
  message.Put(uint64_t{dense.size()});
  message.PutBytes(id_section.data(), id_section.size());
  message.PutBytes(dense.span().data(), dense.size());
  return message.Release();
}

}  // namespace persia::serving
