#include "worker/embeddings_writer.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"

namespace persia::worker {
namespace {

constexpr uint64_t kMaxMessageBytes = 1ull << 30;  // the limit of net::Channel and net::Server
constexpr uint64_t kHeadBytes = 24;
constexpr uint64_t kSlotHeadBytes = 24;
constexpr uint32_t kAbsent = 2;  // the kind of a slot of a stage that is not asked for
// Fields of a slot's head, by their offset in it.
constexpr size_t kDtypeOffset = 5;
constexpr size_t kUnitOffset = 20;

uint64_t Padded(uint64_t size_bytes) { return (size_bytes + 7) / 8 * 8; }

uint64_t SlotBytes(const PlannedFeature& feature, uint64_t batch_size, StageMask stages) {
  const SlotConfig& slot = *feature.slot;
  uint64_t bytes = kSlotHeadBytes + Padded(slot.name.size());
  if (!Includes(stages, slot.stage)) return bytes;
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

SlotSpace PutSlot(const PlannedFeature& feature, uint64_t batch_size, StageMask stages,
                  Cursor* cursor) {
  const SlotConfig& slot = *feature.slot;
  SlotSpace space;
  if (!Includes(stages, slot.stage)) {
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

StatusOr<EmbeddingsWriter> EmbeddingsWriter::Create(const BatchPlan& plan,
                                                    uint64_t worker_incarnation, uint64_t reference,
                                                    StageMask stages) {
  uint64_t size_bytes = kHeadBytes;
  for (const PlannedFeature& feature : plan.features) {
    size_bytes += SlotBytes(feature, plan.batch_size, stages);
    if (size_bytes > kMaxMessageBytes) {
      return InvalidArgument("slot '" + feature.slot->name + "': the batch's embeddings exceed " +
                             std::to_string(kMaxMessageBytes) + " bytes: send smaller batches");
    }
  }
  EmbeddingsWriter writer;
  writer.message_ = Buffer(size_bytes);
  Cursor cursor(writer.message_.data());
  cursor.Put(worker_incarnation);
  cursor.Put(reference);
  cursor.Put(static_cast<uint32_t>(plan.features.size()));
  cursor.Put(plan.batch_size);
  for (const PlannedFeature& feature : plan.features) {
    writer.slots_.push_back(PutSlot(feature, plan.batch_size, stages, &cursor));
  }
  return writer;
}

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
