// RowFeed: copies the rows of a snapshot ahead of those who write them.
//
// Only its threads hold shards of a store that trains, and they do little else. So a writer may be
// slow, or be interrupted at any point because its priority is low: training never waits for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"
#include "store/row_records.h"
#include "store/store_snapshot.h"

namespace persia::checkpoint {

// Thread-safe. Rows come with the priority of the thread that made it.
// Owned by the class that writes the rows (Snapshot, RowCopy, RowTransfer); its threads end with
// it. They inherit the priority of the thread that made it, which is therefore not lowered before:
// a thread that holds a shard while it waits for a processor would stall training.
class RowFeed {
 public:
  // Starts. A part has every `num_parts`-th shard, and at most kMaxBatchesAhead batches of
  // `rows_at_a_time` rows, and what was saved meanwhile, wait for its writer. `*rows` must outlive
  // it.
  RowFeed(store::StoreSnapshot* rows, uint32_t num_parts, size_t rows_at_a_time);
  ~RowFeed();  // as Stop()

  // The next rows of a part, in place of what *batch has; false when there are none left. Waits
  // for them; after Stop() or a failure it returns that at once.
  // One thread at a time for each part; different parts side by side. Also gives the memory of the
  // batch before back, so call it as soon as those rows are encoded.
  StatusOr<bool> Next(uint32_t part, store::StoreSnapshot::Batch* batch);

  // Returns when no thread of it uses the snapshot any more.
  // Idempotent, from any thread. Next() that waits meanwhile fails with kFailedPrecondition.
  void Stop();

 private:
  // Enough that a writer that is woken finds rows; more would only be memory.
  static constexpr size_t kMaxBatchesAhead = 4;

  struct Part {
    uint32_t next_shard = 0;
    bool is_read = false;
    bool is_being_read = false;
    std::deque<store::StoreSnapshot::Batch> ahead;
  };

  void Serve();
  // Whether a thread has anything to do now; then *part is to be read, unless it is null.
  bool HasWork(Part** part);
  StatusOr<bool> Read(Part* part, store::StoreSnapshot::Batch* batch);
  StatusOr<bool> ReadShards(Part* part, store::StoreSnapshot::Batch* batch);

  store::StoreSnapshot& rows_;
  const size_t rows_at_a_time_;
  std::mutex mutex_;  // guards what follows, but for a part that is being read
  std::condition_variable has_work_, has_rows_;
  std::vector<Part> parts_;
  size_t next_part_ = 0;
  std::vector<store::StoreSnapshot::Batch> written_;  // to be used again
  std::vector<store::RowRecords> saved_;              // written: go back to the store
  Status status_;
  bool has_stopped_ = false;

  std::once_flag is_joined_;
  std::vector<std::thread> threads_;
};

}  // namespace persia::checkpoint
