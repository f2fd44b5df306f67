// What a person or a script wants of a pool without its rows: a look at it, a check, more room.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "pool/row_pool.h"

namespace persia::pool {

struct PoolInfo {
  uint64_t pool_id = 0;
  uint64_t committed = 0;  // the batch that the pool goes back to when it is opened; 0: none yet
  uint64_t num_rows = 0;   // of that batch
  uint64_t file_bytes = 0;
  uint64_t size_bytes = 0;  // that it may grow to
  uint64_t extent_bytes = 0;
  std::string schema;
};

struct PoolReport {
  PoolInfo info;
  uint64_t num_living = 0;    // rows found; a whole pool has info.num_rows of them
  uint64_t num_ended = 0;     // versions of rows that recovery leaves out
  uint64_t num_free = 0;      // slots without a whole record
  uint64_t num_repeated = 0;  // signs found more than once; a whole pool has none
  uint64_t num_unassigned_extents = 0;
  bool is_whole() const { return num_living == info.num_rows && num_repeated == 0; }
};

// Works while a server has the pool. kNotFound, kCorruption, kFailedPrecondition as RowPool::Open.
StatusOr<PoolInfo> InspectPool(const std::string& directory);
// Reads every row and changes nothing. kUnavailable: a server has the pool.
StatusOr<PoolReport> CheckPool(const std::string& directory);
// From now on it may grow to `size_bytes`. kInvalidArgument: less than before.
Status GrowPool(const std::string& directory, uint64_t size_bytes);
// What RowPool::Prepare() returned is the pool's checkpoint from now on, as RowPool::Commit() would
// have made it. kFailedPrecondition: the pool was changed or opened since.
Status CommitPool(const std::string& directory, const PreparedCheckpoint& checkpoint);

}  // namespace persia::pool
