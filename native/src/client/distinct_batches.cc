#include "client/distinct_batches.h"

#include <algorithm>
#include <utility>

#include "worker/reduction.h"

namespace persia::client {
namespace {

// All three: a worker that was replaced counts its references from 1 again.
bool IsSame(const worker::BatchReference& a, const worker::BatchReference& b) {
  return a.reference == b.reference && a.worker_incarnation == b.worker_incarnation &&
         a.worker_index == b.worker_index;
}

// Null: the gradient is sent as it is. That is always right; sums only save bytes.
const worker::DistinctSlot* FindSlot(std::span<const DistinctBatches::Slot> slots,
                                     const worker::SlotGradient& gradient) {
  if (gradient.skipped || gradient.summed) return nullptr;
  const auto slot = std::find_if(slots.begin(), slots.end(), [&](const auto& candidate) {
    return candidate->name == gradient.slot;
  });
  if (slot == slots.end()) return nullptr;
  // The worker refuses another shape, and names it.
  const bool fits = (*slot)->batch_size == gradient.num_rows && (*slot)->dim == gradient.dim;
  return fits ? slot->get() : nullptr;
}

}  // namespace

// A slot that is looked up again replaces its earlier lookup, whose rows may be others. Beyond the
// bounds the oldest batches are forgotten: their gradients are then sent per sample.
void DistinctBatches::Keep(const worker::BatchReference& reference,
                           std::vector<worker::DistinctSlot> slots) {
  if (slots.empty()) return;
  const std::lock_guard lock(mutex_);
  auto entry = FindLocked(reference);
  if (entry == entries_.end()) entry = entries_.insert(entry, Entry{reference, {}});
  for (worker::DistinctSlot& slot : slots) {
    std::erase_if(entry->slots, [&](const Slot& earlier) {
      if (earlier->name != slot.name) return false;
      num_bytes_ -= earlier->size_bytes();
      return true;
    });
    num_bytes_ += slot.size_bytes();
    entry->slots.push_back(std::make_shared<const worker::DistinctSlot>(std::move(slot)));
  }
  while (entries_.size() > kMaxBatches || num_bytes_ > max_bytes_) ForgetLocked(entries_.begin());
}

std::vector<DistinctBatches::Slot> DistinctBatches::Find(
    const worker::BatchReference& reference) const {
  const std::lock_guard lock(mutex_);
  for (const Entry& entry : entries_) {
    if (IsSame(entry.reference, reference)) return entry.slots;
  }
  return {};
}

void DistinctBatches::Forget(const worker::BatchReference& reference) {
  const std::lock_guard lock(mutex_);
  const auto entry = FindLocked(reference);
  if (entry != entries_.end()) ForgetLocked(entry);
}

size_t DistinctBatches::num_batches() const {
  const std::lock_guard lock(mutex_);
  return entries_.size();
}

size_t DistinctBatches::num_bytes() const {
  const std::lock_guard lock(mutex_);
  return num_bytes_;
}

std::list<DistinctBatches::Entry>::iterator DistinctBatches::FindLocked(
    const worker::BatchReference& reference) {
  return std::find_if(entries_.begin(), entries_.end(),
                      [&](const Entry& entry) { return IsSame(entry.reference, reference); });
}

void DistinctBatches::ForgetLocked(std::list<Entry>::iterator entry) {
  for (const Slot& slot : entry->slots) num_bytes_ -= slot->size_bytes();
  entries_.erase(entry);
}

// One buffer for the sums of all slots, which outlives the call through `sent`: the gradients that
// are sent point into it.
SentGradients SumDistinct(std::span<const worker::SlotGradient> gradients,
                          std::span<const DistinctBatches::Slot> slots, float scale) {
  SentGradients sent{{gradients.begin(), gradients.end()}, {}};
  // A wrong scale is refused by the worker.
  if (slots.empty() || !worker::IsGradientScale(scale)) return sent;
  size_t num_floats = 0;
  for (const auto& slot : slots) num_floats += size_t{slot->num_rows} * slot->dim;
  sent.sums = Buffer(num_floats * sizeof(float));
  auto* sums = reinterpret_cast<float*>(sent.sums.data());
  const float* const end = sums + num_floats;
  for (worker::SlotGradient& gradient : sent.slots) {
    const worker::DistinctSlot* slot = FindSlot(slots, gradient);
    if (slot == nullptr) continue;
    const size_t count = size_t{slot->num_rows} * slot->dim;
    if (count > static_cast<size_t>(end - sums)) break;  // a slot twice, which the worker refuses
    float max_magnitude = 0.0f;
    // False where a sum is not finite: the worker then gets the gradients themselves, and names the
    // slot.
    if (!worker::SumByRow(*slot, gradient.rows, 1.0f / scale, sums, &max_magnitude)) continue;
    gradient.num_rows = slot->num_rows;
    gradient.rows = sums;
    gradient.summed = true;
    gradient.max_magnitude = max_magnitude;
    sums += count;
  }
  return sent;
}

}  // namespace persia::client
