// The backing of kind `pmem`: a pool's file, mapped, written past the page cache with the
// processor's flush instructions (libpmem).
//
// On persistent memory (fsdax) what was drained is durable. On other files, tmpfs among them, the
// same instructions run, and rows survive a killed process, not a power failure: tests use this.
//
// libpmem, not libpmemobj: a pool's records are its own log (row_record.h) and need no
// transactions, whose undo log would write every row twice.
#pragma once

#include <memory>

#include "pool/pool_file.h"

namespace persia::pool {

// Whether libpmem was there when this was built.
bool HasPmem();

// Maps the first `map_bytes` of the file, those included that it has yet to grow to: the mapping
// never moves, so that rows can be read without a lock while the pool grows. The backing owns the
// file. kFailedPrecondition: built without libpmem; kIOError: there is no room for the mapping.
StatusOr<std::unique_ptr<Backing>> MapPmem(std::unique_ptr<PoolFile> file, uint64_t map_bytes);

}  // namespace persia::pool
