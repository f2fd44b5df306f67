// RowPool: rows on a device, by address, in versions, and the checkpoints they can go back to.
//
// What a checkpoint may need is never changed in place: Write() puts a new version into a free slot
// and ends the one it replaces (row_record.h). The slot of an ended version is free again once no
// checkpoint can need it; where none can need it already, the new version is written over it.
// Checkpoints are batch numbers: BeginCheckpoint(c), after the last batch up to c, keeps what is
// there as of c; the user writes what it still has of those batches in memory, then calls
// Commit(c), from which on the pool goes back to c when it is opened again, whatever happens.
//
// Which signs there are, and where, the user remembers; Recover() and Open() tell it anew.
//
// All methods may be called by several threads at once, each with rows of its own. After an error
// of the device nothing more is written or committed: what was committed stays.
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
#include "pool/pool_header.h"
#include "pool/recovery.h"
#include "pool/row_record.h"
#include "pool/slot_allocator.h"

namespace persia::pool {

enum class PoolKind : uint8_t { kFile, kPmem };

struct PoolOptions {
  PoolKind kind = PoolKind::kFile;
  uint64_t size_bytes = 0;  // that the pool may grow to; 0, of a pool that is there: as it was made
  uint64_t extent_bytes = uint64_t{16} << 20;  // by which it grows; of a new pool
  bool syncs = true;                           // kind file: commits wait for the device
  uint32_t max_pending = 8;                    // checkpoints begun and not committed
  std::string schema{};                        // what rows consist of; empty: not known yet
  uint32_t num_threads = 1;                    // of recovery
};

inline constexpr uint64_t kNoAddress = 0;

// A row to be read with others.
struct RowRead {
  uint64_t address = kNoAddress;
  uint64_t sign = 0;
  std::span<float> values{};  // as many as the row has
  RowHead head{};
  bool is_found = false;
};

struct RowWrite {
  RowHead head;         // of a version above the committed checkpoint
  const float* values;  // the embedding, then the state
  uint64_t replaces = kNoAddress;
};

struct RowRemoval {
  uint64_t address;
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
  uint64_t used_bytes = 0;    // of slots with versions that are needed
  uint64_t memory_bytes = 0;  // of lists of free slots, and of the versions that follow
  uint64_t num_kept = 0;      // versions that have ended and are kept for a checkpoint
  uint64_t committed = 0;
  uint32_t num_pending = 0;
};

class RowPool {
 public:
  // A pool in a directory that has none. kInvalidArgument: a size out of range.
  static StatusOr<std::unique_ptr<RowPool>> Create(const std::string& directory,
                                                   const PoolOptions& options);
  // The directory's pool as of its committed checkpoint. kNotFound: there is none; kUnavailable: it
  // is in use; kFailedPrecondition: it has another schema or format; kCorruption: rows are lost.
  static StatusOr<std::unique_ptr<RowPool>> Open(const std::string& directory,
                                                 const PoolOptions& options,
                                                 const VisitRows& visit);
  // The same over bytes that are kept elsewhere.
  static StatusOr<std::unique_ptr<RowPool>> Format(std::unique_ptr<Backing> backing,
                                                   const PoolOptions& options);
  static StatusOr<std::unique_ptr<RowPool>> Recover(std::unique_ptr<Backing> backing,
                                                    const PoolOptions& options,
                                                    const VisitRows& visit);

  // Sets what rows consist of, once; the same again is fine, another is kFailedPrecondition.
  Status SetSchema(const std::string& schema);

  // addresses[i] is where rows[i] is from now on. kResourceExhausted: the pool or the device is
  // full; then nothing was written.
  Status Write(std::span<const RowWrite> rows, std::span<uint64_t> addresses);
  Status Remove(std::span<const RowRemoval> rows);
  // All rows and checkpoints go, also the committed one; durable when it returns. In one step: what
  // is opened after a crash is the pool before or an empty one. The caller keeps other calls out.
  Status Clear();
  // Into `values` as many floats as the row has. kCorruption: the device returned something else
  // than the row of this sign that was written there.
  Status Read(uint64_t address, uint64_t sign, RowHead* head, std::span<float> values) const;
  // Of this pool alone, for good.
  uint64_t id() const { return pool_id_; }
  // The same of many rows, in the time that the device needs for as many at once. A row that is not
  // found was replaced or removed meanwhile, which the caller need not keep others from doing; or
  // Read() says why.
  void ReadMany(std::span<RowRead> rows) const;
  // Before many rows are written over: what Write() reads of them is in the system's memory then.
  struct Place {
    uint64_t address;
    size_t num_floats;
  };
  void BringNear(std::span<const Place> rows) const;
  // Before some tens of rows of so many floats are read, or replaced: their cache misses overlap.
  void Touch(uint64_t address, size_t num_floats) const {
    backing_->Touch(address, SlotBytes(num_floats));
  }
  // Whether rows are mapped memory: then there is nothing to ask for.
  bool is_mapped() const { return backing_->Mapped(0) != nullptr; }
  // kInvalidArgument: a row of that dim has no room in an extent.
  Status CheckSize(uint32_t dim, uint32_t state_floats) const;

  // Before anything of a later batch is written; `batch` is above all checkpoints before.
  // kResourceExhausted: too many are pending.
  Status BeginCheckpoint(uint64_t batch);
  // The oldest pending one. All versions up to it were written. Durable when it returns.
  Status Commit(uint64_t batch);
  // The same without committing it: that is for the caller to decide, here or, where this process
  // ends before, by CommitPool().
  StatusOr<PreparedCheckpoint> Prepare(uint64_t batch);
  // A pending one is given up.
  Status DropCheckpoint(uint64_t batch);
  std::optional<uint64_t> oldest_pending() const;
  // The newest checkpoint that was begun, committed or not: a row of a batch up to it that waits in
  // memory must be written before it changes. Also where others are pending that are older.
  uint64_t last_checkpoint() const;
  uint64_t committed() const;
  // Whether rows are of the committed checkpoint or of one that may be: they may come back.
  bool HasRowsInCheckpoints() const;

  PoolStats stats() const;

 private:
  struct Pending {
    uint64_t batch;
    int64_t new_rows;  // since the checkpoint before
  };
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
  // What the rows' addresses are; versions that are written over are no longer in `replaced`.
  Status TakeSlots(std::span<const RowWrite> rows, std::span<Version> replaced,
                   std::span<uint64_t> addresses);
  std::optional<uint64_t> TakeSlot(uint32_t slot_bytes, Status* status);
  Status AssignExtent(uint64_t offset, uint32_t slot_bytes);
  uint64_t SeedOf(uint64_t address) const;
  Status WriteRecords(std::span<const RowWrite> rows, std::span<const uint64_t> addresses);
  // The living versions at the addresses of rows, kNoAddress being none; row.version is the one
  // that comes after it.
  StatusOr<std::vector<Version>> FindLiving(std::span<const RowRemoval> rows) const;
  // Whether the slot's bytes are the row of the sign; then the row is in *head and `values`.
  bool Decode(std::span<const std::byte> slot, uint64_t address, uint64_t sign, RowHead* head,
              std::span<float> values) const;
  Status End(const Version& version, uint64_t end, std::vector<Ended>* ended);
  void Release(std::span<const Ended> ended);
  bool IsNeeded(const Ended& ended) const;
  void CountRows(uint64_t version, int64_t count);
  // What the header will be with the oldest pending checkpoint; kInvalidArgument: it is not that.
  StatusOr<PoolHeader> HeaderAt(uint64_t batch) const;
  void FreeUnneeded();  // the caller holds mutex_
  Status WriteHeaderDurably(PoolHeader header);
  Status CheckHealth() const;
  Status Fail(Status status);

  const std::unique_ptr<Backing> backing_;
  const uint32_t max_pending_;
  const uint64_t pool_id_;
  uint64_t filling_id_;  // changes with Clear(); guarded by mutex_
  const uint64_t extent_bytes_;
  const uint64_t max_bytes_;
  std::atomic<bool> has_failed_{false};

  mutable std::mutex mutex_;
  SlotAllocator slots_;
  uint64_t committed_;
  uint64_t newest_;               // batch of which something was written
  std::vector<Pending> pending_;  // ascending
  int64_t new_rows_ = 0;          // beyond the last pending checkpoint
  std::vector<Ended> kept_;

  // Of all extents that there may be. Whoever has an address has it from one who saw its extent's.
  std::unique_ptr<std::atomic<uint64_t>[]> extent_ids_;

  mutable std::mutex header_mutex_;  // taken before mutex_
  PoolHeader header_;
};

}  // namespace persia::pool
