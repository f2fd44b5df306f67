// TraceBuffer: what this process did when, while a trace is recorded.
//
// Spans come from DurationStats::Record, so that whatever is measured is traced too, under the same
// name. Off, which is the normal state, it costs one relaxed load for each measured phase. On, a
// span takes a slot of its own by one atomic addition and is written there without a lock; when all
// slots are taken, later spans are counted and dropped, so that memory and time stay bounded.
//
// Times are those of the monotonic clock (CLOCK_MONOTONIC), which all processes of a host share.
// Thread-safe. There is one for the process: TraceBuffer::Global().
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace persia {

// What `persia-launcher trace` collects from all processes of a job and joins by batch_id and
// reference.
struct TraceSpan {
  static constexpr uint64_t kNoBatch = UINT64_MAX;

  std::array<char, 32> name{};  // ends with a zero; a longer name is cut
  uint64_t begin_ns = 0;        // monotonic clock
  uint64_t end_ns = 0;
  uint64_t reference = 0;        // the embedding worker's number of the batch; 0: not known here
  uint64_t batch_id = kNoBatch;  // the loaders' number of the batch
  uint32_t thread_id = 0;        // the system's
};

class TraceBuffer {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Recording {
    std::vector<TraceSpan> spans;  // in the order in which they ended, nearly
    // Spans that found no free cell. A trace that has some is incomplete at its end.
    uint64_t num_dropped = 0;
  };

  // The only one: DurationStats records into it without being told where.
  static TraceBuffer& Global();

  // Begins a recording of at most `capacity` spans; one that is under way is thrown away.
  // Takes 80 bytes a span at once, so that recording never allocates.
  void Start(size_t capacity);
  // Ends the recording and returns it; empty when none is under way.
  Recording Stop();

  // Asked before the arguments of Add() are made: with tracing off a phase costs this load and
  // nothing else.
  bool on() const { return on_.load(std::memory_order_relaxed); }
  // Does nothing when no recording is under way.
  void Add(const std::string& name, TimePoint begin, TimePoint end, uint64_t reference,
           uint64_t batch_id);

 private:
  // `written` is set last, with release order: a reader that sees it sees the whole span.
  struct Slot {
    TraceSpan span;
    std::atomic<bool> written{false};
  };
  struct Slots {
    explicit Slots(size_t size) : entries(size) {}
    std::vector<Slot> entries;
    std::atomic<uint64_t> next{0};
  };

  std::atomic<bool> on_{false};
  std::mutex mutex_;  // guards the pointer, not what it points to
  // Shared, so that a thread that still writes a span keeps the memory of a recording that has
  // ended.
  std::shared_ptr<Slots> slots_;
};

// Which batch this thread works for, so that spans in all processes tell.
//
// Set where a batch is known (a rank's lookup, the return of its gradients) for as long as the
// object lives. Timed reads it, and net/ carries it: a channel puts it into the header of a
// request, and a server sets it for the handler. So the batch's number reaches the parameter
// servers without being part of any message body. One thread-local word: it costs next to nothing,
// traced or not.
//
// The wire has 32 bits for it, 0 meaning none: of a batch_id from 2^32 - 1 on only the lower bits
// arrive. Objects nest, and end in the opposite order on the thread that made them.
class TracedBatch {
 public:
  static constexpr uint32_t kNone = 0;

  // For batch_id TraceSpan::kNoBatch: none.
  static uint32_t TagOf(uint64_t batch_id) { return static_cast<uint32_t>(batch_id + 1); }
  static uint64_t IdOf(uint32_t tag) {
    return tag == kNone ? TraceSpan::kNoBatch : uint64_t{tag} - 1;
  }
  // Of this thread.
  static uint32_t tag() { return current_; }

  // Makes `tag` this thread's batch until the object ends; kNone for work that belongs to no batch.
  explicit TracedBatch(uint32_t tag) : outer_(current_) { current_ = tag; }
  TracedBatch(const TracedBatch&) = delete;
  ~TracedBatch() { current_ = outer_; }

 private:
  static constinit inline thread_local uint32_t current_ = kNone;

  const uint32_t outer_;
};

}  // namespace persia
