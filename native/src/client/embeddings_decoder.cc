// DecodeEmbeddings: the client's end of the embeddings message (docs/wire_format.md).
//
// What comes out is indexed by model code without another look, so everything that an index or a
// shape could do is checked here.
#include <string>
#include <unordered_set>
#include <utility>

#include "base/bytes.h"
#include "base/id_features.h"
#include "base/row_protocol.h"
#include "client/embedding_client.h"

namespace persia::client {
namespace {

// 0: pooled.
constexpr uint8_t kRaw = 1;
constexpr uint8_t kAbsent = 2;
constexpr size_t kSlotHeadBytes = 24;

Status Truncated(size_t size_bytes) {
  return Corruption("an embeddings message of " + std::to_string(size_bytes) +
                    " bytes ends before its last slot does");
}

Status SlotError(const SlotEmbedding& slot, const std::string& what) {
  return Corruption("embeddings of slot '" + slot.name + "': " + what);
}

// Branch-free over the array, so that checking costs little beside using it. A negative index is
// too large as an unsigned number.
bool AllBelow(std::span<const int64_t> index, uint64_t num_rows) {
  bool ok = true;
  for (const int64_t row : index) ok &= static_cast<uint64_t>(row) < num_rows;
  return ok;
}

Status CheckShape(const SlotEmbedding& slot, uint8_t kind, uint32_t batch_size) {
  if (slot.name.empty()) return Corruption("an embeddings message: a slot has no name");
  if (kind > kAbsent) {
    return SlotError(slot, "its kind is " + std::to_string(kind) +
                               "; it must be 0 (pooled), 1 (raw) or 2 (absent)");
  }
  if (slot.dim == 0 || slot.dim > kMaxRowDim) {
    return SlotError(slot, "its dim is " + std::to_string(slot.dim) + "; it must be 1 to " +
                               std::to_string(kMaxRowDim));
  }
  if (slot.absent) {
    return slot.num_rows == 0 && slot.sample_fixed_size == 0
               ? Status::Ok()
               : SlotError(slot, "it is absent and has rows");
  }
  if (!slot.raw && (slot.num_rows != batch_size || slot.sample_fixed_size != 0)) {
    return SlotError(slot, "a pooled slot has one row for each of the " +
                               std::to_string(batch_size) + " samples, not " +
                               std::to_string(slot.num_rows));
  }
  if (slot.raw && slot.num_rows == 0) return SlotError(slot, "its row 0, the padding, is missing");
  return Status::Ok();
}

// Rows of 16 bits, into memory of their own.
Status ReadNarrow(ByteReader* reader, worker::WireDtype dtype, float unit, SlotEmbedding* slot,
                  std::vector<Buffer>* widened) {
  const auto rows = reader->GetArray<uint16_t>(uint64_t{slot->num_rows} * slot->dim);
  if (!reader->ok()) return Status::Ok();  // the caller checks
  if (!worker::IsWireUnit(unit)) {
    return SlotError(*slot, "its unit is " + std::to_string(unit) + ", no power of two in range");
  }
  Buffer& floats = widened->emplace_back(rows.size() * sizeof(float));
  slot->rows = reinterpret_cast<const float*>(floats.data());
  Widen(dtype, rows, unit, reinterpret_cast<float*>(floats.data()));
  return Status::Ok();
}

// The caller checks that the reader is still ok.
StatusOr<SlotEmbedding> ReadSlot(ByteReader* reader, uint32_t batch_size,
                                 std::vector<Buffer>* widened) {
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
      return SlotError(slot,
                       "an index is not below its " + std::to_string(slot.num_rows) + " rows");
    }
  }
  auto dtype = worker::ToWireDtype(dtype_number);
  if (!dtype.ok()) return SlotError(slot, dtype.status().message());
  if (*dtype == worker::WireDtype::kFloat32) {
    slot.rows = reader->GetArray<float>(uint64_t{slot.num_rows} * slot.dim).data();
  } else {
    PERSIA_RETURN_IF_ERROR(ReadNarrow(reader, *dtype, unit, &slot, widened));
  }
  return slot;
}

}  // namespace

StatusOr<LookupResult> DecodeEmbeddings(uint32_t worker_index, Buffer message) {
  ByteReader reader(std::as_const(message).span());
  LookupResult result;
  result.reference.worker_index = worker_index;
  result.reference.worker_incarnation = reader.Get<uint64_t>();
  result.reference.reference = reader.Get<uint64_t>();
  const auto num_slots = reader.Get<uint32_t>();
  result.batch_size = reader.Get<uint32_t>();
  if (!reader.ok() || num_slots > reader.remaining() / kSlotHeadBytes) {
    return Truncated(message.size());
  }
  if (result.batch_size > kMaxBatchSize) {
    return Corruption("an embeddings message: batch_size is " + std::to_string(result.batch_size) +
                      ", at most " + std::to_string(kMaxBatchSize));
  }
  std::unordered_set<std::string> names;
  for (uint32_t i = 0; i < num_slots; ++i) {
    auto slot = ReadSlot(&reader, result.batch_size, &result.widened);
    if (!reader.ok()) return Truncated(message.size());
    if (!slot.ok()) return slot.status();
    if (!names.insert(slot->name).second) return SlotError(*slot, "it appears twice");
    result.slots.push_back(std::move(slot).value());
  }
  if (reader.remaining() != 0) {
    return Corruption("an embeddings message: " + std::to_string(reader.remaining()) +
                      " bytes are left over after the last slot");
  }
  result.storage = std::move(message);  // its bytes stay where they are
  return result;
}

}  // namespace persia::client
