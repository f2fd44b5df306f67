// RowPool: rows on a device, by address, in versions, and the checkpoints they can go back to.
//
// What a checkpoint may need is never changed in place: Write() puts a new version into a free cell
// and ends the one it replaces (row_record.h). The cell of an ended version is free again once no
// checkpoint can need it; where none can need it already, the new version is written over it.
//
// Checkpoints are batch numbers, and so are versions: a version belongs to every checkpoint from
// its own batch up to the one before the batch that ended it. A checkpoint takes three steps:
//  1. BeginCheckpoint(c), after the last batch up to c and before any later one, keeps all versions
//     of c from then on. It writes nothing.
//  2. The user writes what it still has of those batches in memory, while later batches change
//     rows.
//  3. Commit(c) makes the pool go back to c when it is opened again, whatever happens then.
// Several may be between the first step and the third, and are committed in their order.
//
// The user remembers which signs there are and at which address; Recover() and Open() tell it anew.
//
// Threads: all methods may be called by several threads at once, each with rows of its own; where
// one is different, it says so. Locks: header_mutex_, then mutex_. header_mutex_ is
// held for syncs of the device, mutex_ for memory and while the file grows, so that stats() and
// Write() never wait for a sync.
//
// Errors: after an error of the device nothing more is written or committed, and all such calls
// fail with kIOError: what was committed stays. Memory is the free list, some 8 bytes a free cell,
// and what PoolStats::num_kept counts.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "pool/backing.h"
#include "pool/cell_allocator.h"
#include "pool/pool_header.h"
#include "pool/recovery.h"
#include "pool/row_record.h"

namespace persia::pool {

enum class PoolKind : uint8_t { kFile, kPmem };

struct PoolOptions {
  PoolKind kind = PoolKind::kFile;
  uint64_t size_bytes = 0;  // that the pool may grow to; 0, of a pool that is there: as it was made
  // By which a new pool grows. An extent has cells of one size, so that pools of rows of many sizes
  // waste up to an extent for each.
  uint64_t extent_bytes = uint64_t{16} << 20;
  bool syncs = true;         // kind file: commits wait for the device
  uint32_t max_pending = 8;  // checkpoints begun and not committed: each may keep a version a row
  // What rows consist of, so that no other program takes them for its own; empty: not known yet. A
  // pool that has none takes the first one that it is opened with.
  std::string schema{};
  uint32_t num_threads = 1;  // of recovery
};

// No row is there: the header of the pool is.
inline constexpr uint64_t kNoAddress = 0;

// A row to be read with others.
struct RowRead {
  uint64_t address = kNoAddress;
  uint64_t sign = 0;
  std::span<float> values{};  // as many as the row has
  RowHead head{};
  bool is_found = false;
};

// A version to be written. One row's versions must rise, or recovery takes the wrong one.
struct RowWrite {
  RowHead head;                    // of a version above the committed checkpoint
  const float* values;             // the embedding, then the state; borrowed until Write() returns
  uint64_t replaces = kNoAddress;  // where the row's version before is; none: the row is new
};

struct RowRemoval {
  uint64_t address;  // of the row's version now, which ends
  uint64_t sign;
  uint64_t version;  // the batch that removed the row
};

// A pending checkpoint, all of which is on the device: CommitPool() can make it the pool's without
// opening it.
struct PreparedCheckpoint {
  uint64_t batch = 0;
  uint64_t num_rows = 0;
  // Of the header, which changes when the pool is cleared or opened: that undoes what is not
  // committed.
  uint64_t pool_id = 0;
  uint64_t sequence = 0;
};

struct PoolStats {
  uint64_t size_bytes = 0;    // of the file
  uint64_t max_bytes = 0;     // that it may grow to
  uint64_t used_bytes = 0;    // of cells with versions that are needed
  uint64_t memory_bytes = 0;  // of lists of free cells, and of the versions that follow
  uint64_t num_kept = 0;      // versions that have ended and are kept for a checkpoint
  uint64_t committed = 0;
  uint32_t num_pending = 0;
};

class RowPool {
 public:
  // Makes a pool in a directory that has none, and locks it until it is destroyed.
  // kInvalidArgument: a size out of range; kFailedPrecondition: there is one.
  static StatusOr<std::unique_ptr<RowPool>> Create(const std::string& directory,
                                                   const PoolOptions& options);
  // Opens the directory's pool as of its committed checkpoint, and locks it. Undoes what was
  // written after that; `visit` gets every row of it. kNotFound: there is none; kUnavailable: it is
  // in use; kFailedPrecondition: it has another schema or format; kCorruption: rows are lost.
  static StatusOr<std::unique_ptr<RowPool>> Open(const std::string& directory,
                                                 const PoolOptions& options,
                                                 const VisitRows& visit);
  // The same over bytes that are kept elsewhere; the pool owns `backing`, which Format() expects to
  // be empty.
  static StatusOr<std::unique_ptr<RowPool>> Format(std::unique_ptr<Backing> backing,
                                                   const PoolOptions& options);
  static StatusOr<std::unique_ptr<RowPool>> Recover(std::unique_ptr<Backing> backing,
                                                    const PoolOptions& options,
                                                    const VisitRows& visit);

  // Writes versions; addresses[i] is where rows[i] is from now on. The versions that they replace
  // must be living ones. Nothing is durable before a Commit() that the versions belong to.
  // kResourceExhausted: the pool or the device is full; nothing was written, and the call may
  // succeed after a commit, which frees cells. kCorruption: a replaced version is not there.
  Status Write(std::span<const RowWrite> rows, std::span<uint64_t> addresses);
  // Ends the rows' versions; needs no room. As durable as Write().
  Status Remove(std::span<const RowRemoval> rows);
  // Removes all rows and checkpoints, also the committed one; durable when it returns. In one step:
  // what is opened after a crash is the pool before or an empty one. The caller keeps other calls
  // out.
  Status Clear();
  // Reads a row into `values`, which has as many floats as the row. The caller keeps others from
  // replacing it meanwhile. kCorruption: the device returned something else than the row of this
  // sign that was written there.
  Status Read(uint64_t address, uint64_t sign, RowHead* head, std::span<float> values) const;
  // Of this pool alone, for good: what is kept beside a pool names its pool by it.
  uint64_t id() const { return pool_id_; }
  // Reads many rows in the time that the device needs for as many at once. A row that is not found
  // was replaced or removed meanwhile, which the caller need not keep others from doing; or Read()
  // says why.
  void ReadMany(std::span<RowRead> rows) const;
  // Reads the pages of rows that are about to be replaced, so that Write() does not wait for them:
  // the system reads a page of a file before it changes a part of it. For callers that hold no lock
  // here and one around Write(). The rows may change meanwhile; what is read is thrown away.
  struct Place {
    uint64_t address;
    size_t num_floats;
  };
  void BringNear(std::span<const Place> rows) const;
  // Before some tens of rows of so many floats are read, or replaced: their cache misses overlap.
  // Does nothing where rows are not mapped memory.
  void Touch(uint64_t address, size_t num_floats) const {
    backing_->Touch(address, CellBytes(num_floats));
  }
  // Whether rows are mapped memory: then reads take less than a microsecond, and ReadMany() and
  // BringNear() gain nothing.
  bool is_mapped() const { return backing_->Mapped(0) != nullptr; }
  // kInvalidArgument: a row of that dim has no room in an extent.
  Status CheckSize(uint32_t dim, uint32_t state_floats) const;

  // Begins the checkpoint `batch`, before anything of a later batch is written; `batch` is above
  // all checkpoints before, and not below any version written. kResourceExhausted: too many are
  // pending.
  Status BeginCheckpoint(uint64_t batch);
  // Commits the oldest pending one, after all versions up to it were written. Durable when it
  // returns; frees the cells that only the checkpoint before needed. kInvalidArgument: `batch` is
  // not the oldest pending one, as when Clear() or DropCheckpoint() came first.
  Status Commit(uint64_t batch);
  // Makes all of it durable without committing it: that is for the caller to decide, here or, where
  // this process ends before, by CommitPool(). Writes of later batches may go on.
  StatusOr<PreparedCheckpoint> Prepare(uint64_t batch);
  // Gives a pending one up, and frees what only it needed. kInvalidArgument: it is not pending.
  Status DropCheckpoint(uint64_t batch);
  std::optional<uint64_t> oldest_pending() const;
  // The newest checkpoint that was begun, committed or not: a row of a batch up to it that waits in
  // memory must be written before it changes. Also where others are pending that are older.
  uint64_t last_checkpoint() const { return last_checkpoint_.load(std::memory_order_relaxed); }
  // 0: none yet; then the pool is empty when it is opened again. Neither of the two takes a lock.
  uint64_t committed() const { return committed_.load(std::memory_order_relaxed); }
  // Whether rows are of the committed checkpoint or of one that may be: they may come back.
  bool HasRowsInCheckpoints() const;

  PoolStats stats() const;

 private:
  struct Pending {
    uint64_t batch;
    int64_t new_rows;  // since the checkpoint before; negative where more were removed than made
  };
  // A version that has ended, from the time when its end was written.
  struct Ended {
    uint64_t address;
    uint64_t version;
    uint64_t end;
  };

  RowPool(std::unique_ptr<Backing> backing, const PoolOptions& options, PoolHeader header);

  struct Version {
    uint64_t address = kNoAddress;
    RowRecord record;  // the beginning
  };

  Status CheckWrite(const RowWrite& row) const;
  // Finds the rows' addresses; versions that are written over are no longer in `replaced`. All rows
  // get a cell or none does.
  Status TakeCells(std::span<const RowWrite> rows, std::span<Version> replaced,
                   std::span<uint64_t> addresses);
  std::optional<uint64_t> TakeCell(uint32_t cell_bytes, Status* status);
  Status AssignExtent(uint64_t offset, uint32_t cell_bytes);
  uint64_t SeedOf(uint64_t address) const;
  Status WriteRecords(std::span<const RowWrite> rows, std::span<const uint64_t> addresses);
  // The living versions at the addresses of rows, kNoAddress being none; row.version is the one
  // that comes after it.
  StatusOr<std::vector<Version>> FindLiving(std::span<const RowRemoval> rows) const;
  // Whether the cell's bytes are the row of the sign; then the row is in *head and `values`.
  bool Decode(std::span<const std::byte> cell, uint64_t address, uint64_t sign, RowHead* head,
              std::span<float> values) const;
  // Writes the version's end and adds it to *ended, for Release() once all are drained.
  Status End(const Version& version, uint64_t end, std::vector<Ended>* ended);
  void Release(std::span<const Ended> ended);
  // The caller of these holds mutex_.
  bool IsNeeded(const Ended& ended) const;
  void CountRows(uint64_t version, int64_t count);
  // After pending_ or committed_ changed: frees what no checkpoint needs any more.
  void NoteCheckpoints();
  // What the header will be with the oldest pending checkpoint; kInvalidArgument: it is not that.
  StatusOr<PoolHeader> HeaderAt(uint64_t batch) const;
  // The caller holds header_mutex_, but for Recover().
  Status WriteHeaderDurably(PoolHeader header);
  Status CheckHealth() const;
  // Returns `status`, after which CheckHealth() fails if it is an error.
  Status Fail(Status status);

  const std::unique_ptr<Backing> backing_;
  const uint32_t max_pending_;
  const uint64_t pool_id_;
  uint64_t filling_id_;  // changes with Clear(); guarded by mutex_
  const uint64_t extent_bytes_;
  const uint64_t max_bytes_;
  std::atomic<bool> has_failed_{false};

  mutable std::mutex mutex_;  // guards what follows, up to kept_
  CellAllocator cells_;
  // Written under mutex_, read without: once for each row that a store with a tier changes.
  std::atomic<uint64_t> committed_;
  std::atomic<uint64_t> last_checkpoint_;
  uint64_t newest_;               // batch of which something was written
  std::vector<Pending> pending_;  // ascending
  int64_t new_rows_ = 0;          // beyond the last pending checkpoint
  std::vector<Ended> kept_;

  // By extent, for the largest number of them. An address is only known to a thread that has seen
  // the number of its extent.
  std::unique_ptr<std::atomic<uint64_t>[]> extent_ids_;

  // Taken before mutex_ and held while a header is written: there is one writer of the two copies.
  mutable std::mutex header_mutex_;
  PoolHeader header_;
};

}  // namespace persia::pool
