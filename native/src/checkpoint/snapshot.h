// Snapshot: a store at one moment, as the bytes of files that are produced during training.
//
// Begin() takes all rows, TakeChanges() those that changed since the last committed packet. The
// moment is the one between two calls on the store at which either returns: an update before it is
// in the files in all shards, one after it in none.
//
// Each part is a file of its own with rows of some of the store's internal shards; together the
// parts have all rows, each once. Parts may be read by different threads, and should be: encoding
// costs a microsecond a row.
//
// What reads a part from the store to the file: RowFeed copies rows in threads of its own, which
// are the only ones to lock shards; SnapshotPart encodes them in the thread that calls Read(), at
// the share of DumpThrottle. The memory for all of it is bounded: rows saved by training
// (StoreSnapshot::Options), rows copied ahead (RowFeed), and rows that wait for a block to be full.
//
// Where training changes rows faster than they are read, and has waited too long, the snapshot
// fails, not the training: Read() returns kResourceExhausted from then on.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/placement.h"
#include "base/status.h"
#include "checkpoint/block_writer.h"
#include "checkpoint/dump_throttle.h"
#include "checkpoint/file_format.h"
#include "checkpoint/row_feed.h"
#include "store/embedding_store.h"
#include "store/row_records.h"
#include "store/store_snapshot.h"

namespace persia::checkpoint {

// Where a store stands in its cluster; a store in this process is the only one.
struct Replica {
  uint32_t index = 0;
  Placement placement;
};

class Snapshot;

// One file, from its header to its trailer. Thread-safe, but the bytes of a file are those of
// Read() in the order of the calls: one thread reads a part.
class SnapshotPart {
 public:
  // Of `*snapshot`, which owns it. The header says which part it is.
  SnapshotPart(Snapshot* snapshot, const FileHeader& header, bool with_state,
               size_t max_gathered_bytes);

  // Copies the next bytes of the file, `max_bytes` until its end is near, to what allocate(count)
  // returns; none at its end: then it is not called. Waits for rows to be copied, and sleeps while
  // the store is trained. After a failure the file stays incomplete, and every later call fails in
  // the same way. kFailedPrecondition: the snapshot was closed; kResourceExhausted: it was given
  // up, or there is no memory.
  Status Read(size_t max_bytes, const std::function<std::byte*(size_t)>& allocate);

  uint64_t num_rows() const { return num_rows_.load(); }    // encoded so far
  uint64_t num_bytes() const { return num_bytes_.load(); }  // read so far

 private:
  Status Produce(size_t num_bytes);
  Status ProduceRows();
  Status Write(const store::RowRecords& rows);
  Status Finish();

  Snapshot& snapshot_;
  const uint32_t number_;
  std::mutex mutex_;               // guards what follows, but for the counters
  std::vector<std::byte> bytes_;   // produced, from position_ on not yet read
  size_t num_since_throttle_ = 0;  // rows
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
    // Of all parts together: rows that wait until a block is full. Rows come in the order of
    // hashes, so that every virtual shard has a block in the making: with less memory blocks are
    // smaller.
    size_t max_gathered_bytes = size_t{256} << 20;
    // A shard is kept from its other users while so many are copied: some tens of microseconds.
    size_t rows_at_a_time = 512;
    // What those who read parts may take of processors while the store is trained; see
    // dump_throttle.h.
    double max_processors = 0;
  };

  // The store must outlive it. Waits for the calls in progress, then returns at once; the store
  // takes no other snapshot, and loads no rows, until this one is closed. kInvalidArgument: no
  // parts, or more than 65,536; else as StoreSnapshot::Begin.
  static StatusOr<std::unique_ptr<Snapshot>> Begin(store::EmbeddingStore& store,
                                                   const Options& options);

  // A packet of what has changed since the one before, as StoreSnapshot::TakeChanges.
  static StatusOr<std::unique_ptr<Snapshot>> TakeChanges(store::EmbeddingStore& store,
                                                         const Options& options);

  uint64_t step() const { return rows_->step(); }  // updates that the store had applied
  FileKind kind() const;
  uint64_t num_rows() const { return rows_->num_rows(); }  // of changes: with removals
  // None where the store was not configured, and so had no rows.
  const std::optional<TrainConfig>& config() const { return rows_->config(); }
  uint32_t num_parts() const { return static_cast<uint32_t>(parts_.size()); }
  // kInvalidArgument: there is none of this number. Lives as long as the snapshot.
  StatusOr<SnapshotPart*> part(uint32_t number);

  // Of changes: all files are where they belong, and the next packet starts from here. Without,
  // these changes are in the next packet again. kFailedPrecondition: parts were not read to the
  // end.
  Status Commit();
  // Training is left alone from here on: it saves no rows and waits for none. What has not been
  // read is lost; changes that were not committed are in the next packet.
  void Close();

 private:
  friend class SnapshotPart;

  explicit Snapshot(std::unique_ptr<store::StoreSnapshot> rows) : rows_(std::move(rows)) {}

  static Status CheckOptions(const Options& options);
  static std::unique_ptr<Snapshot> Of(std::unique_ptr<store::StoreSnapshot> rows,
                                      const Options& options);
  void AddPart(const Options& options, uint32_t number);
  // A part has written its rows, and its file is about to be completed.
  Status CheckEnd(uint64_t num_rows);

  // Destroyed in reverse order: parts use the feed and the throttle, which use the rows.
  std::unique_ptr<store::StoreSnapshot> rows_;
  std::optional<DumpThrottle> throttle_;
  std::optional<RowFeed> feed_;  // after rows_: ends before these do
  std::vector<std::unique_ptr<SnapshotPart>> parts_;
  std::atomic<uint64_t> num_rows_written_ = 0;
  std::atomic<uint32_t> num_parts_written_ = 0;
};

}  // namespace persia::checkpoint
