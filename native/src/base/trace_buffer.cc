#include "base/trace_buffer.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace persia {
namespace {

uint64_t ToNanoseconds(TraceBuffer::TimePoint time) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

uint32_t ThisThread() {
  thread_local const auto id = static_cast<uint32_t>(::gettid());
  return id;
}

}  // namespace

TraceBuffer& TraceBuffer::Global() {
  // Never destroyed: threads may outlive the statics.
  static auto* const buffer = new TraceBuffer;
  return *buffer;
}

void TraceBuffer::Start(size_t capacity) {
  auto slots = std::make_shared<Slots>(capacity);
  const std::lock_guard lock(mutex_);
  slots_ = std::move(slots);
  on_.store(true, std::memory_order_relaxed);
}

void TraceBuffer::Add(const std::string& name, TimePoint begin, TimePoint end, uint64_t reference,
                      uint64_t batch_id) {
  std::shared_ptr<Slots> slots;
  {
    const std::lock_guard lock(mutex_);
    slots = slots_;
  }
  // The recording has ended since the caller asked whether it is on.
  if (slots == nullptr) return;
  const uint64_t position = slots->next.fetch_add(1, std::memory_order_relaxed);
  // Counted all the same, by `next`: Stop() tells how many were dropped.
  if (position >= slots->entries.size()) return;
  Slot& slot = slots->entries[position];
  const size_t length = std::min(name.size(), slot.span.name.size() - 1);
  std::memcpy(slot.span.name.data(), name.data(), length);
  slot.span.begin_ns = ToNanoseconds(begin);
  slot.span.end_ns = ToNanoseconds(end);
  slot.span.reference = reference;
  slot.span.batch_id = batch_id;
  slot.span.thread_id = ThisThread();
  slot.written.store(true, std::memory_order_release);
}

TraceBuffer::Recording TraceBuffer::Stop() {
  std::shared_ptr<Slots> slots;
  {
    const std::lock_guard lock(mutex_);
    // Threads that have passed the check still write into the cells, which they share the ownership
    // of.
    on_.store(false, std::memory_order_relaxed);
    slots.swap(slots_);
  }
  Recording recording;
  if (slots == nullptr) return recording;
  const uint64_t num_taken = slots->next.load(std::memory_order_relaxed);
  const uint64_t num_kept = std::min<uint64_t>(num_taken, slots->entries.size());
  recording.num_dropped = num_taken - num_kept;
  recording.spans.reserve(num_kept);
  for (uint64_t i = 0; i < num_kept; ++i) {
    const Slot& slot = slots->entries[i];
    // One that is being written at this moment is left out.
    if (slot.written.load(std::memory_order_acquire)) recording.spans.push_back(slot.span);
  }
  return recording;
}

}  // namespace persia
