#include "worker/narrow_embeddings.h"

#include <cstring>
#include <vector>

#include "base/bytes.h"

namespace persia::worker {
namespace {

// Fields of a slot's head, by their offset in it.
constexpr size_t kDtypeOffset = 5;
constexpr size_t kUnitOffset = 20;

size_t Padded(size_t size_bytes) { return (size_bytes + 7) / 8 * 8; }

// A slot as it lies in the message: its head, name and index, and behind them its rows.
struct Slot {
  std::span<const std::byte> before_rows;
  std::span<const float> rows;
};

Slot ReadSlot(std::span<const std::byte> message, ByteReader* reader, uint32_t batch_size) {
  const size_t begin = message.size() - reader->remaining();
  const auto name_bytes = reader->Get<uint32_t>();
  const bool raw = (reader->Get<uint32_t>() & 0xffu) == 1;
  const auto dim = reader->Get<uint32_t>();
  const auto num_rows = reader->Get<uint32_t>();
  const auto sample_fixed_size = reader->Get<uint32_t>();
  reader->Get<uint32_t>();
  reader->GetString(name_bytes);
  if (raw) {
    reader->GetArray<int64_t>(uint64_t{batch_size} * sample_fixed_size);
    reader->GetArray<uint32_t>(batch_size);
  }
  const size_t end = message.size() - reader->remaining();
  return {message.subspan(begin, end - begin), reader->GetArray<float>(uint64_t{num_rows} * dim)};
}

// Returns where the next slot goes.
std::byte* WriteSlot(const Slot& slot, WireDtype dtype, std::byte* out) {
  std::memcpy(out, slot.before_rows.data(), slot.before_rows.size());
  const float unit = WireUnit(dtype, slot.rows);
  out[kDtypeOffset] = static_cast<std::byte>(dtype);
  std::memcpy(out + kUnitOffset, &unit, sizeof(unit));
  out += slot.before_rows.size();
  Narrow(dtype, slot.rows, unit, reinterpret_cast<uint16_t*>(out));
  const size_t size_bytes = slot.rows.size() * sizeof(uint16_t);
  std::memset(out + size_bytes, 0, Padded(size_bytes) - size_bytes);
  return out + Padded(size_bytes);
}

}  // namespace

StatusOr<Buffer> NarrowEmbeddings(std::span<const std::byte> message, WireDtype dtype) {
  ByteReader reader(message);
  reader.Get<uint64_t>();  // incarnation
  reader.Get<uint64_t>();  // reference
  const auto num_slots = reader.Get<uint32_t>();
  const auto batch_size = reader.Get<uint32_t>();
  const size_t head_bytes = message.size() - reader.remaining();
  size_t size_bytes = head_bytes;
  std::vector<Slot> slots;
  for (uint32_t i = 0; i < num_slots && reader.ok(); ++i) {
    const Slot& slot = slots.emplace_back(ReadSlot(message, &reader, batch_size));
    size_bytes += slot.before_rows.size() + Padded(slot.rows.size() * sizeof(uint16_t));
  }
  if (!reader.ok() || reader.remaining() != 0) {
    return Internal("embeddings to be narrowed are no message of float32");
  }
  Buffer narrow(size_bytes);
  std::memcpy(narrow.data(), message.data(), head_bytes);
  std::byte* next = narrow.data() + head_bytes;
  for (const Slot& slot : slots) next = WriteSlot(slot, dtype, next);
  return narrow;
}

}  // namespace persia::worker
