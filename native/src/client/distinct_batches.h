// DistinctBatches: what a rank keeps of the batches whose slots came as distinct rows, until it has
// returned their gradients.
//
// A memory of convenience: a batch that is not in it returns its gradients unsummed, and the worker
// sums them with the same result. So it may forget, and does, beyond a bound. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "worker/embeddings_message.h"
#include "worker/types.h"

namespace persia::client {

class DistinctBatches {
 public:
  using Slot = std::shared_ptr<const worker::DistinctSlot>;

  // The oldest batches are forgotten beyond either. Workers hold no more batches in flight.
  static constexpr size_t kMaxBatches = 4096;
  static constexpr size_t kMaxBytes = size_t{256} << 20;

  explicit DistinctBatches(size_t max_bytes = kMaxBytes) : max_bytes_(max_bytes) {}

  // Adds slots of the batch; one that it had before is replaced.
  void Keep(const worker::BatchReference& reference, std::vector<worker::DistinctSlot> slots);
  // None where the batch is not known.
  std::vector<Slot> Find(const worker::BatchReference& reference) const;
  void Forget(const worker::BatchReference& reference);

  size_t num_batches() const;
  size_t num_bytes() const;

 private:
  struct Entry {
    worker::BatchReference reference;
    std::vector<Slot> slots;
  };

  // All require mutex_.
  std::list<Entry>::iterator FindLocked(const worker::BatchReference& reference);
  void ForgetLocked(std::list<Entry>::iterator entry);

  const size_t max_bytes_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // oldest first: that is where a batch to be returned is soon found
  size_t num_bytes_ = 0;
};

// Gradients in the form in which they are sent; `rows` of the summed ones lie in `sums`.
struct SentGradients {
  std::vector<worker::SlotGradient> slots;
  Buffer sums;
};

// Adds up by row the gradients of those slots that came as distinct rows. Others stay as they are,
// as do those that are not finite or not of the embeddings' shape: the worker judges them.
SentGradients SumDistinct(std::span<const worker::SlotGradient> gradients,
                          std::span<const DistinctBatches::Slot> slots, float scale);

}  // namespace persia::client
