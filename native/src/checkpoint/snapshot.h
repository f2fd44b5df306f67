// Snapshot: a store at one moment, as the bytes of files that are produced while training goes on.
//
// Each part is a file of its own with rows of some of the store's internal shards; together the
// parts have all rows. Parts may be read by different threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"
#include "checkpoint/block_writer.h"
#include "checkpoint/dump_pace.h"
#include "checkpoint/file_format.h"
#include "checkpoint/row_feed.h"
#include "store/embedding_store.h"
#include "store/row_records.h"
#include "store/store_snapshot.h"

namespace persia::checkpoint {

// Where a store stands in its cluster; a store in this process is the only one.
struct Replica {
  uint32_t index = 0;
  uint32_t size = 1;
};

// One file. Thread-safe.
class SnapshotPart {
 public:
  // Puts rows that the file is to have into the batch; false when these were the last.
  using NextRows = std::function<StatusOr<bool>(store::StoreSnapshot::Batch*)>;
  // Called when all rows have been written, before the file is completed.
  using CheckEnd = std::function<Status(uint64_t num_rows)>;

  // `*pace` must outlive it.
  SnapshotPart(const FileHeader& header, bool with_state, size_t max_gathered_bytes, NextRows next,
               CheckEnd check_end, DumpPace* pace);

  // Copies the next bytes of the file, `max_bytes` until its end is near, to what allocate(count)
  // returns; none at its end: then it is not called. After a failure the file stays incomplete, and
  // every later call fails in the same way.
  Status Read(size_t max_bytes, const std::function<std::byte*(size_t)>& allocate);

  uint64_t num_rows() const { return num_rows_.load(); }    // encoded so far
  uint64_t num_bytes() const { return num_bytes_.load(); }  // read so far

 private:
  Status Produce(size_t num_bytes);
  Status ProduceRows();
  Status Write(const store::RowRecords& rows);
  Status Finish();

  const NextRows next_;
  const CheckEnd check_end_;
  DumpPace& pace_;
  std::mutex mutex_;              // guards what follows, but for the counters
  std::vector<std::byte> bytes_;  // produced, from position_ on not yet read
  size_t num_since_rest_ = 0;     // rows
  size_t position_ = 0;
  BlockWriter writer_;
  store::StoreSnapshot::Batch batch_;
  bool has_all_rows_ = false;
  bool is_complete_ = false;
  Status status_;
  std::atomic<uint64_t> num_rows_ = 0;
  std::atomic<uint64_t> num_bytes_ = 0;
};

class Snapshot {
 public:
  struct Options {
    uint32_t num_parts = 1;
    Replica replica = {};
    store::StoreSnapshot::Options rows = {};
    bool with_state = true;  // else of the optimizer's state nothing is written
    // Of all parts together: rows that wait until a block is full.
    size_t max_gathered_bytes = size_t{256} << 20;
    // A shard is kept from its other users while so many are copied: some tens of microseconds.
    size_t rows_at_a_time = 512;
    // What those who read parts may take of processors while the store is trained; see dump_pace.h.
    double max_processors = 0;
  };

  // The store must outlive it. kInvalidArgument: no parts, or more than 65,536; else as
  // StoreSnapshot::Begin.
  static StatusOr<std::unique_ptr<Snapshot>> Begin(store::EmbeddingStore& store,
                                                   const Options& options);

  // A packet of what has changed since the one before, as StoreSnapshot::TakeChanges.
  static StatusOr<std::unique_ptr<Snapshot>> TakeChanges(store::EmbeddingStore& store,
                                                         const Options& options);

  uint64_t step() const { return rows_->step(); }
  FileKind kind() const;
  uint64_t num_rows() const { return rows_->num_rows(); }  // of changes: with removals
  const std::optional<TrainConfig>& config() const { return rows_->config(); }
  uint32_t num_parts() const { return static_cast<uint32_t>(parts_.size()); }
  // kInvalidArgument: there is none of this number. Lives as long as the snapshot.
  StatusOr<SnapshotPart*> part(uint32_t number);

  // Of changes: all files are where they belong, and the next packet starts from here. Without,
  // these changes are in the next packet again. kFailedPrecondition: parts were not read to the
  // end.
  Status Commit();
  // Training is left alone from here on; what has not been read is lost.
  void Close();

 private:
  explicit Snapshot(std::unique_ptr<store::StoreSnapshot> rows) : rows_(std::move(rows)) {}

  static Status CheckOptions(const Options& options);
  static std::unique_ptr<Snapshot> Of(std::unique_ptr<store::StoreSnapshot> rows,
                                      const Options& options);
  void AddPart(const Options& options, uint32_t number);
  Status CheckEnd(uint64_t num_rows);

  std::unique_ptr<store::StoreSnapshot> rows_;
  std::optional<DumpPace> pace_;
  std::optional<RowFeed> feed_;  // after rows_: ends before these do
  std::vector<std::unique_ptr<SnapshotPart>> parts_;
  std::atomic<uint64_t> num_rows_written_ = 0;
  std::atomic<uint32_t> num_parts_written_ = 0;
};

}  // namespace persia::checkpoint
