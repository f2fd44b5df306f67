#include "worker/embeddings_message.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/id_features.h"

namespace persia::worker {
namespace {

constexpr uint64_t kMaxMessageBytes = 1ull << 30;  // the limit of net::Channel and net::Server
constexpr uint64_t kHeadBytes = 24;
constexpr uint64_t kSlotHeadBytes = 24;
// The kinds of slots. 0: pooled.
constexpr uint8_t kRaw = 1;
constexpr uint8_t kAbsent = 2;  // not asked for
constexpr uint8_t kAsRows = 3;  // distinct rows, to be pooled by the client
// Fields of a slot's head, by their offset in it.
constexpr size_t kDtypeOffset = 5;
constexpr size_t kUnitOffset = 20;

// Must agree with PutSlot() and PoolFeature() to the byte: memory is taken once, by this sum.
// Of a slot that is not sent as rows.
uint64_t SlotBytes(const PlannedFeature& feature, uint64_t batch_size, SlotMask slots) {
  const SlotConfig& slot = *feature.slot;
  uint64_t bytes = kSlotHeadBytes + Padded(slot.name.size());
  if (!Includes(slots, slot.mode)) return bytes;
  bytes += Padded(uint64_t{feature.num_rows()} * slot.dim * sizeof(float));
  if (!slot.embedding_summation) {
    bytes += batch_size * slot.sample_fixed_size * sizeof(int64_t);
    bytes += Padded(batch_size * sizeof(uint32_t));
  }
  return bytes;
}

// Writes fields and steps over arrays. All sizes were added up before, by SlotBytes().
class Cursor {
 public:
  explicit Cursor(std::byte* begin) : next_(begin) {}

  template <typename T>
  void Put(T value) {
    std::memcpy(next_, &value, sizeof(T));
    next_ += sizeof(T);
  }
  // Space for `count` elements; the padding behind them is zeros.
  template <typename T>
  T* Skip(uint64_t count) {
    auto* array = reinterpret_cast<T*>(next_);
    const uint64_t size_bytes = count * sizeof(T);
    std::memset(next_ + size_bytes, 0, Padded(size_bytes) - size_bytes);
    next_ += Padded(size_bytes);
    return array;
  }

 private:
  std::byte* next_;
};

// The layout of docs/wire_format.md. The reserved bytes become the dtype and the unit where a
// message is narrowed.
void PutHead(const SlotConfig& slot, uint32_t kind, uint32_t num_rows, uint32_t sample_fixed_size,
             Cursor* cursor) {
  cursor->Put(static_cast<uint32_t>(slot.name.size()));
  cursor->Put(kind);  // and three reserved bytes
  cursor->Put(slot.dim);
  cursor->Put(num_rows);
  cursor->Put(sample_fixed_size);
  cursor->Put(uint32_t{0});
  std::memcpy(cursor->Skip<char>(slot.name.size()), slot.name.data(), slot.name.size());
}

// See SlotBytes().
uint64_t BytesAsRows(const PlannedFeature& feature, const PlannedGroup& group,
                     const RowsLayout& layout) {
  return kSlotHeadBytes + Padded(feature.slot->name.size()) + layout.index_bytes +
         Padded(uint64_t{group.num_signs} * group.dim * sizeof(float));
}

SlotSpace PutSlotAsRows(const PlannedFeature& feature, const PlannedGroup& group,
                        const RowsLayout& layout, Cursor* cursor) {
  PutHead(*feature.slot, kAsRows, group.num_signs, 0, cursor);
  PutRowsIndex(feature, group.first_number, layout, cursor->Skip<std::byte>(layout.index_bytes));
  SlotSpace space;
  space.rows = cursor->Skip<float>(uint64_t{group.num_signs} * group.dim);
  space.first_number = group.first_number;
  space.num_distinct = group.num_signs;
  space.as_rows = true;
  return space;
}

// Index and counts come first: they are short, and the rows behind them end the slot.
SlotSpace PutSlot(const PlannedFeature& feature, uint64_t batch_size, SlotMask slots,
                  Cursor* cursor) {
  const SlotConfig& slot = *feature.slot;
  SlotSpace space;
  if (!Includes(slots, slot.mode)) {
    PutHead(slot, kAbsent, 0, 0, cursor);
    return space;
  }
  const bool raw = !slot.embedding_summation;
  PutHead(slot, uint32_t{raw}, feature.num_rows(), raw ? slot.sample_fixed_size : 0, cursor);
  if (raw) {
    space.index = cursor->Skip<int64_t>(batch_size * slot.sample_fixed_size);
    space.sample_num_ids = cursor->Skip<uint32_t>(batch_size);
  }
  space.rows = cursor->Skip<float>(uint64_t{feature.num_rows()} * slot.dim);
  return space;
}

// Returns where the next slot goes. `before_rows`: the slot's head, name and index.
// The unit is chosen per slot, by its greatest magnitude (wire_floats.h).
std::byte* WriteNarrow(std::span<const std::byte> before_rows, std::span<const float> rows,
                       WireDtype dtype, std::byte* out) {
  std::memcpy(out, before_rows.data(), before_rows.size());
  const float unit = WireUnit(dtype, rows);
  out[kDtypeOffset] = static_cast<std::byte>(dtype);
  std::memcpy(out + kUnitOffset, &unit, sizeof(unit));
  out += before_rows.size();
  Narrow(dtype, rows, unit, reinterpret_cast<uint16_t*>(out));
  const size_t size_bytes = rows.size() * sizeof(uint16_t);
  std::memset(out + size_bytes, 0, Padded(size_bytes) - size_bytes);
  return out + Padded(size_bytes);
}

// ---- the client's end

Status Truncated(size_t size_bytes) {
  return Corruption("an embeddings message of ", size_bytes,
                    " bytes ends before its last slot does");
}

Status SlotError(const SlotEmbedding& slot, const auto&... what) {
  return Corruption("embeddings of slot '", slot.name, "': ", what...);
}

// Branch-free over the array, so that checking costs little beside using it. A negative index is
// too large as an unsigned number.
bool AllBelow(std::span<const int64_t> index, uint64_t num_rows) {
  bool ok = true;
  for (const int64_t row : index) ok &= static_cast<uint64_t>(row) < num_rows;
  return ok;
}

// What model code takes for granted: an array of this shape is handed to it as it is.
Status CheckShape(const SlotEmbedding& slot, uint8_t kind, uint32_t batch_size) {
  if (slot.name.empty()) return Corruption("an embeddings message: a slot has no name");
  if (kind > kAsRows) {
    return SlotError(slot, "its kind is ", kind,
                     "; it must be 0 (pooled), 1 (raw), 2 (absent) or 3 (as rows)");
  }
  if (slot.dim == 0 || slot.dim > kMaxRowDim) {
    return SlotError(slot, "its dim is ", slot.dim, "; it must be 1 to ", kMaxRowDim);
  }
  if (slot.absent) {
    return slot.num_rows == 0 && slot.sample_fixed_size == 0
               ? Status::Ok()
               : SlotError(slot, "it is absent and has rows");
  }
  if (kind == kAsRows) {
    return slot.sample_fixed_size == 0
               ? Status::Ok()
               : SlotError(slot, "it is pooled and has a sample_fixed_size");
  }
  if (!slot.raw && (slot.num_rows != batch_size || slot.sample_fixed_size != 0)) {
    return SlotError(slot, "a pooled slot has one row for each of the ", batch_size,
                     " samples, not ", slot.num_rows);
  }
  if (slot.raw && slot.num_rows == 0) return SlotError(slot, "its row 0, the padding, is missing");
  return Status::Ok();
}

// The slot's rows stay the distinct ones until PoolSlots().
Status ReadAsRows(ByteReader* reader, uint32_t batch_size, SlotEmbedding* slot,
                  std::vector<DistinctSlot>* distinct) {
  DistinctSlot& rows = distinct->emplace_back();
  rows.name = slot->name;
  rows.dim = slot->dim;
  rows.num_rows = slot->num_rows;
  rows.batch_size = batch_size;
  const Status status = ReadRowsIndex(reader, &rows);
  if (!status.ok()) return SlotError(*slot, status.message());
  slot->rows = reader->GetArray<float>(uint64_t{slot->num_rows} * slot->dim).data();
  return Status::Ok();
}

// Leaves the slots that came as rows to the caller, except those that a device does not pool.
void LeaveUnpooled(LookupResult* result) {
  std::vector<DistinctSlot> pooled_here;
  auto slot = result->slots.begin();
  for (DistinctSlot& distinct : result->distinct) {
    while (slot->name != distinct.name) ++slot;
    if (!distinct.weights.empty()) {
      pooled_here.push_back(std::move(distinct));
      continue;
    }
    slot->unpooled = static_cast<int32_t>(result->unpooled.size());
    result->unpooled.push_back(std::move(distinct));
  }
  result->distinct = std::move(pooled_here);
}

// Pools the slots that came as rows, all into one buffer.
// What a small message can make a client allocate is bounded by what a message of pooled embeddings
// may have.
Status PoolSlots(bool as_rows, LookupResult* result) {
  uint64_t num_floats = 0;
  for (const DistinctSlot& distinct : result->distinct) {
    num_floats += uint64_t{distinct.batch_size} * distinct.dim;
    if (num_floats * sizeof(float) > kMaxMessageBytes) {
      return Corruption("embeddings of slot '", distinct.name, "': with it the batch has above ",
                        kMaxMessageBytes, " bytes of embeddings");
    }
  }
  if (as_rows) LeaveUnpooled(result);
  if (result->distinct.empty()) return Status::Ok();
  Buffer& buffer = result->widened.emplace_back(num_floats * sizeof(float));
  auto* out = reinterpret_cast<float*>(buffer.data());
  auto slot = result->slots.begin();
  for (const DistinctSlot& distinct : result->distinct) {
    while (slot->name != distinct.name) ++slot;
    PoolDistinct(distinct, slot->rows, out);
    slot->rows = out;
    slot->num_rows = distinct.batch_size;
    out += size_t{distinct.batch_size} * distinct.dim;
  }
  return Status::Ok();
}

// The caller checks that the reader is still ok.
// Before each use of a count the reader has checked that its array is there. A slot with a wrong
// shape is refused before its arrays are looked at.
StatusOr<SlotEmbedding> ReadSlot(ByteReader* reader, uint32_t batch_size, LookupResult* result) {
  SlotEmbedding slot;
  const auto name_bytes = reader->Get<uint32_t>();
  const auto kind = reader->Get<uint8_t>();
  const auto dtype_number = reader->Get<uint8_t>();
  reader->Get<uint16_t>();  // reserved
  slot.raw = kind == kRaw;
  slot.absent = kind == kAbsent;
  slot.dim = reader->Get<uint32_t>();
  slot.num_rows = reader->Get<uint32_t>();
  slot.sample_fixed_size = reader->Get<uint32_t>();
  const auto unit = reader->Get<float>();  // of float32: reserved
  slot.name = reader->GetString(name_bytes);
  if (!reader->ok()) return slot;
  PERSIA_RETURN_IF_ERROR(CheckShape(slot, kind, batch_size));
  if (slot.absent) return slot;
  if (slot.raw) {
    const auto index = reader->GetArray<int64_t>(uint64_t{batch_size} * slot.sample_fixed_size);
    slot.index = index.data();
    slot.sample_num_ids = reader->GetArray<uint32_t>(batch_size).data();
    if (!AllBelow(index, slot.num_rows)) {
      return SlotError(slot, "an index is not below its ", slot.num_rows, " rows");
    }
  }
  auto dtype = ToWireDtype(dtype_number);
  if (!dtype.ok()) return SlotError(slot, dtype.status().message());
  if (kind == kAsRows) {
    if (*dtype != WireDtype::kFloat32) return SlotError(slot, "distinct rows must be float32");
    PERSIA_RETURN_IF_ERROR(ReadAsRows(reader, batch_size, &slot, &result->distinct));
    return slot;
  }
  if (*dtype == WireDtype::kFloat32) {
    slot.rows = reader->GetArray<float>(uint64_t{slot.num_rows} * slot.dim).data();
  } else {
    auto rows =
        ReadNarrow(reader, *dtype, unit, uint64_t{slot.num_rows} * slot.dim, &result->widened);
    if (!rows.ok()) return SlotError(slot, rows.status().message());
    slot.rows = *rows;
  }
  return slot;
}

}  // namespace

StatusOr<EmbeddingsLayout> LayOutEmbeddings(const LookupPlan& plan, uint64_t worker_incarnation,
                                            uint64_t reference, SlotMask slots,
                                            EmbeddingsForm form) {
  uint64_t pooled_bytes = kHeadBytes, size_bytes = kHeadBytes;
  std::vector<std::optional<RowsLayout>> as_rows(plan.features.size());
  for (size_t i = 0; i < plan.features.size(); ++i) {
    const PlannedFeature& feature = plan.features[i];
    const uint64_t slot_bytes = SlotBytes(feature, plan.batch_size, slots);
    pooled_bytes += slot_bytes;
    // Refused before memory is taken. Raw slots with a large sample_fixed_size get here. Pooled
    // bytes count, for the client takes memory for them.
    if (pooled_bytes > kMaxMessageBytes) {
      return InvalidArgument("slot '", feature.slot->name, "': the batch's embeddings exceed ",
                             kMaxMessageBytes, " bytes: send smaller batches");
    }
    RowsLayout rows;
    if (Includes(slots, feature.slot->mode) &&
        IsSentAsRows(plan, feature, form, reference != 0, &rows)) {
      as_rows[i] = rows;
      size_bytes += BytesAsRows(feature, plan.groups[feature.group], rows);
    } else {
      size_bytes += slot_bytes;
    }
  }
  // With gradients, rows may be more bytes this way and fewer in both.
  if (size_bytes > kMaxMessageBytes) {
    return LayOutEmbeddings(plan, worker_incarnation, reference, slots, EmbeddingsForm::kPooled);
  }
  EmbeddingsLayout layout;
  layout.bytes_saved = pooled_bytes - std::min(pooled_bytes, size_bytes);
  layout.message = Buffer(size_bytes);
  Cursor cursor(layout.message.data());
  cursor.Put(worker_incarnation);
  cursor.Put(reference);
  cursor.Put(static_cast<uint32_t>(plan.features.size()));
  cursor.Put(plan.batch_size);
  for (size_t i = 0; i < plan.features.size(); ++i) {
    const PlannedFeature& feature = plan.features[i];
    layout.slots.push_back(
        as_rows[i].has_value()
            ? PutSlotAsRows(feature, plan.groups[feature.group], *as_rows[i], &cursor)
            : PutSlot(feature, plan.batch_size, slots, &cursor));
  }
  return layout;
}

StatusOr<Buffer> NarrowEmbeddings(Buffer message, WireDtype dtype) {
  StatusOr<LookupResult> wide = DecodeEmbeddings(/*worker_index=*/0, std::move(message));
  if (!wide.ok() || !wide->widened.empty()) {
    return Internal("embeddings to be narrowed are no message of float32");
  }
  const auto num_floats = [](const SlotEmbedding& slot) {
    return size_t{slot.num_rows} * slot.dim;
  };
  size_t size_bytes = wide->storage.size();
  // Rows take half as many bytes, up to padding; everything else is copied.
  for (const SlotEmbedding& slot : wide->slots) {
    size_bytes -= Padded(num_floats(slot) * sizeof(float));
    size_bytes += Padded(num_floats(slot) * sizeof(uint16_t));
  }
  Buffer narrow(size_bytes);
  const std::byte* from = wide->storage.data();
  std::memcpy(narrow.data(), from, kHeadBytes);
  std::byte* to = narrow.data() + kHeadBytes;
  from += kHeadBytes;
  for (const SlotEmbedding& slot : wide->slots) {
    // An absent slot ends where its rows would begin.
    const std::byte* rows = slot.absent ? from + kSlotHeadBytes + Padded(slot.name.size())
                                        : reinterpret_cast<const std::byte*>(slot.rows);
    to = WriteNarrow({from, rows}, {slot.rows, num_floats(slot)}, dtype, to);
    from = rows + Padded(num_floats(slot) * sizeof(float));
  }
  return narrow;
}

void PoolFeature(const PlannedFeature& feature, uint32_t batch_size,
                 std::span<const float* const> rows, const SlotSpace& space) {
  const SlotConfig& slot = *feature.slot;
  if (space.as_rows) {
    for (uint32_t n = 0; n < space.num_distinct; ++n) {
      std::copy_n(rows[space.first_number + n], slot.dim, space.rows + size_t{n} * slot.dim);
    }
    return;
  }
  const Bags bags = feature.bags();
  if (slot.embedding_summation) {
    PoolBags(bags, rows.data(), space.rows, slot.dim);
    return;
  }
  std::copy(feature.index.begin(), feature.index.end(), space.index);
  for (uint32_t sample = 0; sample < batch_size; ++sample) {
    space.sample_num_ids[sample] = feature.offsets[sample + 1] - feature.offsets[sample];
  }
  // Every index of a missing ID points to it, so it must read as zeros.
  std::fill_n(space.rows, slot.dim, 0.0f);  // padding
  PoolBags(bags, rows.data(), space.rows + slot.dim, slot.dim);
}

StatusOr<LookupResult> DecodeEmbeddings(uint32_t worker_index, Buffer message, bool as_rows) {
  ByteReader reader(std::as_const(message).span());
  LookupResult result;
  result.reference.worker_index = worker_index;
  result.reference.worker_incarnation = reader.Get<uint64_t>();
  result.reference.reference = reader.Get<uint64_t>();
  const auto num_slots = reader.Get<uint32_t>();
  result.batch_size = reader.Get<uint32_t>();
  // Bounds the list of slots before memory is taken for it.
  if (!reader.ok() || num_slots > reader.remaining() / kSlotHeadBytes) {
    return Truncated(message.size());
  }
  if (result.batch_size > kMaxBatchSize) {
    return Corruption("an embeddings message: batch_size is ", result.batch_size, ", at most ",
                      kMaxBatchSize);
  }
  std::unordered_set<std::string> names;
  for (uint32_t i = 0; i < num_slots; ++i) {
    auto slot = ReadSlot(&reader, result.batch_size, &result);
    if (!reader.ok()) return Truncated(message.size());
    if (!slot.ok()) return slot.status();
    if (!names.insert(slot->name).second) return SlotError(*slot, "it appears twice");
    result.slots.push_back(std::move(slot).value());
  }
  if (reader.remaining() != 0) {
    return Corruption("an embeddings message: ", reader.remaining(),
                      " bytes are left over after the last slot");
  }
  PERSIA_RETURN_IF_ERROR(PoolSlots(as_rows, &result));
  result.storage = std::move(message);  // its bytes stay where they are
  return result;
}

}  // namespace persia::worker
