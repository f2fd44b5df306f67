// What a person or a script wants of a pool without its rows: a look at it, a check, more room, and
// the commit of a checkpoint that was prepared.
//
// The functions take the directory that the pool is in and may be called by several threads and
// processes at once: all but InspectPool() lock the pool's file, as RowPool::Open does, and fail
// with kUnavailable while a server has it. All fail with kNotFound where there is no pool, and with
// kCorruption or kFailedPrecondition for the reasons of RowPool::Open.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "pool/pool_header.h"
#include "pool/row_pool.h"

namespace persia::pool {

// The pool's header, as its last commit left it, and the size of its file now.
struct PoolInfo : PoolHeader {
  uint64_t file_bytes = 0;
};

struct PoolReport {
  PoolInfo info;
  uint64_t num_living = 0;    // rows found; a whole pool has info.num_rows of them
  uint64_t num_ended = 0;     // versions of rows that recovery leaves out
  uint64_t num_free = 0;      // cells without a whole record
  uint64_t num_repeated = 0;  // signs found more than once; a whole pool has none
  uint64_t num_unassigned_extents = 0;
  // Whether recovery would find every row of the checkpoint. A damaged record counts as free, so
  // that the number of living rows tells of the damage.
  bool is_whole() const { return num_living == info.num_rows && num_repeated == 0; }
};

// Reads the header. Works while a server has the pool: it takes no lock, and a header that is being
// written has a whole copy beside it.
StatusOr<PoolInfo> InspectPool(const std::string& directory);
// Reads every row and changes nothing. Keeps all signs in memory to find repetitions: some 40 bytes
// a row.
StatusOr<PoolReport> CheckPool(const std::string& directory);
// From now on the pool may grow to `size_bytes`, durably; the file itself grows when rows need it.
// kInvalidArgument: less than before.
Status GrowPool(const std::string& directory, uint64_t size_bytes);
// Makes what RowPool::Prepare() returned the pool's checkpoint, as RowPool::Commit() would have. It
// is for a server that died between the two, of a job that had decided to commit.
// kFailedPrecondition: the pool was changed or opened since, which undid what was prepared.
Status CommitPool(const std::string& directory, const PreparedCheckpoint& checkpoint);

}  // namespace persia::pool
