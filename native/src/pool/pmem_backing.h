// The backing of kind `pmem`: a pool's file, mapped, written past the page cache with the
// processor's flush instructions (libpmem).
//
// On persistent memory (fsdax) what was drained is durable. On other files, tmpfs among them, the
// same instructions run, and rows survive a killed process, not a power failure.
#pragma once

#include <memory>

#include "pool/pool_file.h"

namespace persia::pool {

// Whether libpmem was there when this was built.
bool HasPmem();

// Maps the first `map_bytes` of the file, those included that it has yet to grow to.
// kFailedPrecondition: built without libpmem.
StatusOr<std::unique_ptr<Backing>> MapPmem(std::unique_ptr<PoolFile> file, uint64_t map_bytes);

}  // namespace persia::pool
