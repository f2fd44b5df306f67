// TracedBatch: which batch this thread works for, so that spans in all processes tell.
//
// Set where a batch is known (a rank's lookup, the return of its gradients) for as long as the
// object lives. Timed reads it, and net/ carries it: a channel puts it into the header of a
// request, and a server sets it for the handler. So the batch's number reaches the parameter
// servers without being part of any message body. One thread-local word: it costs next to nothing,
// traced or not.
//
// The wire has 32 bits for it, 0 meaning none: of a batch_id from 2^32 - 1 on only the lower bits
// arrive. Objects nest, and end in the opposite order on the thread that made them.
#pragma once

#include <cstdint>

#include "base/trace_buffer.h"

namespace persia {

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

  explicit TracedBatch(uint32_t tag) : outer_(current_) { current_ = tag; }
  TracedBatch(const TracedBatch&) = delete;
  ~TracedBatch() { current_ = outer_; }

 private:
  static constinit inline thread_local uint32_t current_ = kNone;

  const uint32_t outer_;
};

}  // namespace persia
