#include "base/id_features.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <unordered_set>

#include "base/bytes.h"
#include "base/hash.h"
#include "base/narrow_numbers.h"

namespace persia {
namespace {

constexpr uint32_t kMagic = 0x42444950;  // "PIDB"
constexpr uint32_t kVersion = 3;
constexpr uint32_t kWeightedVersion = 2;  // with flags and weights; version 1 has neither

enum FeatureFlags : uint32_t {
  kHasWeights = 1,
  kOneIdEach = 2,  // each sample has one: without offsets
  kNumbered = 4,   // distinct IDs, and the number of each ID among them
};
constexpr uint32_t kKnownFlags = kHasWeights | kOneIdEach | kNumbered;
constexpr uint32_t kIdBytesShift = 8;  // above the flags: the bytes of an ID

// Offsets of samples with one ID each.
std::span<const uint32_t> OneIdEach(uint32_t batch_size) {
  static const auto offsets = [] {
    std::array<uint32_t, kMaxBatchSize + 1> all;
    std::iota(all.begin(), all.end(), 0);
    return all;
  }();
  return std::span(offsets).first(size_t{batch_size} + 1);
}

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
  const bool one_id_each = feature.offsets.data() == OneIdEach(batch_size).data();
  if (feature.offsets.front() != 0 || feature.offsets.back() != feature.num_ids() ||
      (!one_id_each && !NonDecreasing(feature.offsets))) {
    return FeatureError(feature,
                        "offsets must begin with 0, never decrease and end with the number of IDs");
  }
  if (!feature.weights.empty() && feature.weights.size() != feature.num_ids()) {
    return FeatureError(feature, feature.weights.size(), " weights for ", feature.num_ids(),
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

// Of numbers below `count`.
uint8_t NumberBytes(uint64_t count) { return BytesFor(count == 0 ? 0 : count - 1); }

Status CutShort() {
  return Corruption("ID features: the message ends before its last feature does");
}

// Before memory is taken for them: a byte of the message may become 8.
Status CheckIdBytes(const IdFeatures& batch, uint64_t num_ids, uint64_t num_numbers,
                    uint64_t max_id_bytes) {
  const uint64_t num_bytes =  // no count is above the size of the message
      num_ids * sizeof(uint64_t) + num_numbers * sizeof(uint32_t);
  if (batch.storage_bytes <= max_id_bytes && num_bytes <= max_id_bytes - batch.storage_bytes) {
    return Status::Ok();
  }
  return ResourceExhausted("ID features: the IDs of the batch take more than ", max_id_bytes,
                           " bytes, 8 for each ID and 4 for each kept number: send smaller "
                           "batches");
}

// The batch's from now on.
template <typename Number>
std::span<const Number> Store(std::vector<Number> numbers, IdFeatures* batch) {
  const auto stored = std::make_shared<const std::vector<Number>>(std::move(numbers));
  batch->storage.push_back(stored);
  batch->storage_bytes += stored->size() * sizeof(Number);
  return *stored;
}

// Without a branch, so that the compiler compares several at once.
uint32_t Greatest(std::span<const uint32_t> numbers) {
  uint32_t greatest = 0;
  for (const uint32_t number : numbers) greatest = std::max(greatest, number);
  return greatest;
}

// Whether the numbers are all of those below `count`, in the order of their first appearance.
bool AreInOrder(std::span<const uint32_t> numbers, uint64_t count) {
  uint64_t next = 0;
  bool ok = true;
  for (const uint32_t number : numbers) {
    ok &= number <= next;
    next += number == next ? 1 : 0;
  }
  return ok && next == count;
}

// Reads the numbers of a feature's distinct IDs. Keeps them where the decoder of the same IDs
// without numbers would find the same distinct ones in the same order; else *ids become all IDs. A
// sender may choose another order, and list IDs that no sample has.
Status ReadIdNumbers(ByteReader* reader, uint64_t num_ids, uint64_t max_id_bytes,
                     Numbering numbering, std::vector<uint64_t>* ids, IdFeature* feature,
                     IdFeatures* batch) {
  const uint64_t num_distinct = ids->size();
  auto numbers = ReadNumbers<uint32_t>(reader, NumberBytes(num_distinct), num_ids);
  if (!reader->ok()) return Status::Ok();
  if (numbering == Numbering::kKeep && AreInOrder(numbers, num_distinct)) {
    feature->numbers = Store(std::move(numbers), batch);
    return Status::Ok();
  }
  if (Greatest(numbers) >= num_distinct) {
    return Corruption("ID features: feature '", feature->name, "' has a number above its ",
                      num_distinct, " distinct IDs");
  }
  PERSIA_RETURN_IF_ERROR(CheckIdBytes(*batch, num_ids, 0, max_id_bytes));
  std::vector<uint64_t> all(num_ids);
  for (size_t i = 0; i < all.size(); ++i) all[i] = (*ids)[numbers[i]];
  *ids = std::move(all);
  return Status::Ok();
}

// The offsets and IDs of version 3. Its numbers are the peer's word, and are compared here.
Status ReadNarrow(ByteReader* reader, uint32_t flags, uint64_t num_ids, uint64_t least,
                  uint64_t num_distinct, uint64_t max_id_bytes, Numbering numbering,
                  IdFeature* feature, IdFeatures* batch) {
  const uint32_t id_bytes = flags >> kIdBytesShift;
  const bool numbered = (flags & kNumbered) != 0;
  if ((flags & 0xff & ~kKnownFlags) != 0 || id_bytes < 1 || id_bytes > 8) {
    return Corruption("ID features: feature '", feature->name, "' has flags ", flags & 0xff,
                      " and IDs of ", id_bytes, " bytes; known are flags up to ", kKnownFlags,
                      ", and 1 to 8 bytes");
  }
  if (num_distinct > num_ids || (num_distinct > 0) != (numbered && num_ids > 0)) {
    return Corruption("ID features: feature '", feature->name, "' has ", num_distinct,
                      " distinct IDs of ", num_ids);
  }
  if (num_ids > reader->remaining()) return CutShort();  // each has at least a byte
  const bool keeps = numbering == Numbering::kKeep && numbered;
  PERSIA_RETURN_IF_ERROR(
      CheckIdBytes(*batch, keeps ? num_distinct : num_ids, keeps ? num_ids : 0, max_id_bytes));
  feature->offsets = (flags & kOneIdEach) != 0
                         ? OneIdEach(batch->batch_size)
                         : reader->GetArray<uint32_t>(uint64_t{batch->batch_size} + 1);
  auto ids = ReadNumbers<uint64_t>(reader, static_cast<uint8_t>(id_bytes),
                                   numbered ? num_distinct : num_ids, least);
  if (numbered && num_ids > 0) {
    if (!reader->ok()) return Status::Ok();
    PERSIA_RETURN_IF_ERROR(
        ReadIdNumbers(reader, num_ids, max_id_bytes, numbering, &ids, feature, batch));
  }
  feature->ids = Store(std::move(ids), batch);
  return Status::Ok();
}

// The order of the reads is the format; a message that is cut short shows at the end.
Status ReadFeature(ByteReader* reader, uint32_t version, uint64_t max_id_bytes, Numbering numbering,
                   IdFeatures* batch) {
  const auto name_bytes = reader->Get<uint32_t>();
  const auto flags = reader->Get<uint32_t>();  // reserved in version 1
  const auto num_ids = reader->Get<uint64_t>();
  IdFeature feature;
  if (version == kVersion) {
    const auto least = reader->Get<uint64_t>();
    const auto num_distinct = reader->Get<uint64_t>();
    feature.name = reader->GetString(name_bytes);
    if (!reader->ok()) return CutShort();
    PERSIA_RETURN_IF_ERROR(ReadNarrow(reader, flags, num_ids, least, num_distinct, max_id_bytes,
                                      numbering, &feature, batch));
  } else {
    feature.name = reader->GetString(name_bytes);
    feature.offsets = reader->GetArray<uint32_t>(uint64_t{batch->batch_size} + 1);
    feature.ids = reader->GetArray<uint64_t>(num_ids);
    if (version == kWeightedVersion && reader->ok() && (flags & ~uint32_t{kHasWeights}) != 0) {
      return Corruption("ID features: feature '", feature.name, "' has flags ", flags,
                        "; known is 1 (weights)");
    }
  }
  if (version >= kWeightedVersion && (flags & kHasWeights) != 0) {
    feature.weights = reader->GetArray<float>(num_ids);
  }
  if (!reader->ok()) return CutShort();
  batch->features.push_back(feature);
  return Status::Ok();
}

// Numbers IDs in the order of their first appearance; keeps its memory from one feature to the
// next.
class Distinct {
 public:
  // False: there are more than `most`.
  bool Number(std::span<const uint64_t> ids, size_t most) {
    ids_.clear();
    numbers_.resize(ids.size());
    const size_t mask = std::bit_ceil(2 * ids.size()) - 1;
    table_.assign(mask + 1, 0);
    for (size_t i = 0; i < ids.size(); ++i) {
      size_t place = SignHash(ids[i]) & mask;
      while (table_[place] != 0 && ids_[table_[place] - 1] != ids[i]) place = (place + 1) & mask;
      if (table_[place] == 0) {
        if (ids_.size() == most) return false;
        ids_.push_back(ids[i]);
        table_[place] = static_cast<uint32_t>(ids_.size());
      }
      numbers_[i] = table_[place] - 1;
    }
    return true;
  }
  std::span<const uint64_t> ids() const { return ids_; }
  std::span<const uint32_t> numbers() const { return numbers_; }

 private:
  std::vector<uint64_t> ids_;
  std::vector<uint32_t> numbers_;
  std::vector<uint32_t> table_;  // 1 + number; 0: empty
};

template <typename Value>
void PutNumbers(ByteWriter* writer, uint8_t bytes, size_t count, Value value) {
  constexpr size_t kMostKept = size_t{8} << 20;
  thread_local std::vector<std::byte> packed;
  packed.resize(count * bytes);
  PackNumbers(bytes, count, value, packed.data());
  writer->PutArray(std::span<const std::byte>(packed));
  if (packed.capacity() > kMostKept) packed = {};
}

void WriteFeature(const IdFeature& feature, Distinct* distinct, ByteWriter* writer) {
  // The table has 8 to 16 bytes for each, which the thread keeps.
  constexpr size_t kMostNumbered = 1 << 20;
  const std::span<const uint64_t> ids = feature.ids;
  uint64_t least = 0, greatest = 0;
  if (!ids.empty()) {
    const auto [min, max] = std::ranges::minmax(ids);
    least = min;
    greatest = max;
  }
  const uint8_t id_bytes = BytesFor(greatest - least);
  const size_t num_bytes = ids.size() * id_bytes;
  // A number has at least a byte.
  const bool numbered =
      ids.size() <= kMostNumbered && distinct->Number(ids, (num_bytes - ids.size()) / id_bytes) &&
      distinct->ids().size() * id_bytes + ids.size() * NumberBytes(distinct->ids().size()) <
          num_bytes;
  const bool one_id_each = std::ranges::equal(
      feature.offsets, OneIdEach(static_cast<uint32_t>(feature.offsets.size() - 1)));
  const std::span<const uint64_t> sent = numbered ? distinct->ids() : ids;
  writer->Put(static_cast<uint32_t>(feature.name.size()));
  writer->Put((feature.weights.empty() ? 0 : uint32_t{kHasWeights}) |
              (one_id_each ? uint32_t{kOneIdEach} : 0) | (numbered ? uint32_t{kNumbered} : 0) |
              uint32_t{id_bytes} << kIdBytesShift);
  writer->Put(uint64_t{ids.size()});
  writer->Put(least);
  writer->Put(numbered ? uint64_t{sent.size()} : uint64_t{0});
  writer->PutString(feature.name);
  if (!one_id_each) writer->PutArray(feature.offsets);
  PutNumbers(writer, id_bytes, sent.size(), [&](size_t i) { return sent[i] - least; });
  if (numbered) {
    const std::span<const uint32_t> numbers = distinct->numbers();
    PutNumbers(writer, NumberBytes(sent.size()), numbers.size(),
               [&](size_t i) { return numbers[i]; });
  }
  if (!feature.weights.empty()) writer->PutArray(feature.weights);
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
  writer.Put(kVersion);
  writer.Put(static_cast<uint32_t>(batch.features.size()));
  writer.Put(batch.batch_size);
  thread_local Distinct distinct;
  for (const IdFeature& feature : batch.features) WriteFeature(feature, &distinct, &writer);
  return writer.Release();
}

StatusOr<IdFeatures> DecodeIdFeatures(std::span<const std::byte> message, uint64_t max_id_bytes,
                                      Numbering numbering) {
  ByteReader reader(message);
  const auto magic = reader.Get<uint32_t>();
  const auto version = reader.Get<uint32_t>();
  const auto num_features = reader.Get<uint32_t>();
  IdFeatures batch;
  batch.batch_size = reader.Get<uint32_t>();
  if (!reader.ok()) return Corruption("ID features: the message ends within its header");
  if (magic != kMagic) return Corruption("ID features: the magic number is not PIDB");
  if (version < 1 || version > kVersion) {
    return Corruption("ID features: version ", version, "; this build reads 1 to ", kVersion);
  }
  PERSIA_RETURN_IF_ERROR(CheckHead(batch.batch_size, num_features));
  for (uint32_t i = 0; i < num_features; ++i) {
    PERSIA_RETURN_IF_ERROR(ReadFeature(&reader, version, max_id_bytes, numbering, &batch));
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
