#include "worker/embeddings_writer.h"

#include <cstring>
#include <string>
#include <utility>

namespace persia::worker {
namespace {

constexpr uint64_t kMaxMessageBytes = 1ull << 30;  // the limit of net::Channel and net::Server
constexpr uint64_t kHeadBytes = 24;
constexpr uint64_t kSlotHeadBytes = 24;
constexpr uint32_t kAbsent = 2;  // the kind of a slot of a part that is not asked for

uint64_t Padded(uint64_t size_bytes) { return (size_bytes + 7) / 8 * 8; }

uint64_t SlotBytes(const PlannedFeature& feature, uint64_t batch_size, LookupParts parts) {
  const SlotConfig& slot = *feature.slot;
  uint64_t bytes = kSlotHeadBytes + Padded(slot.name.size());
  if (!Includes(parts, slot.part)) return bytes;
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

SlotSpace PutSlot(const PlannedFeature& feature, uint64_t batch_size, LookupParts parts,
                  Cursor* cursor) {
  const SlotConfig& slot = *feature.slot;
  SlotSpace space;
  if (!Includes(parts, slot.part)) {
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

}  // namespace

StatusOr<EmbeddingsWriter> EmbeddingsWriter::Create(const BatchPlan& plan,
                                                    uint64_t worker_incarnation, uint64_t reference,
                                                    LookupParts parts) {
  uint64_t size_bytes = kHeadBytes;
  for (const PlannedFeature& feature : plan.features) {
    size_bytes += SlotBytes(feature, plan.batch_size, parts);
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
    writer.slots_.push_back(PutSlot(feature, plan.batch_size, parts, &cursor));
  }
  return writer;
}

}  // namespace persia::worker
