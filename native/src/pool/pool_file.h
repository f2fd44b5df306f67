// PoolFile: a pool's file in its directory, locked against a second user; as a Backing it is read
// and written through the page cache.
//
// Positional reads and writes instead of a mapping: pages of a mapped file count as memory of the
// process that touched them, so a server's memory would grow with the rows it has ever seen.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "pool/backing.h"

namespace persia::pool {

// kIOError with the text of errno; call it before anything that may change that.
Status SystemError(const std::string& what, const std::string& path);
// Makes a file durable, or with O_DIRECTORY among the `flags` of open() a directory's entries: a
// new name may be lost in a power failure until its directory was synced, too.
Status SyncPath(const std::string& path, int flags);

// Owned by a RowPool, and locked (flock) as long as it is open for writing: two processes that
// write one pool would each overwrite what the other has placed. The lock ends with the process,
// also with one that was killed, so no stale lock must be removed.
//
// Thread safety is that of Backing. Grow() and Publish() belong to the pool's owner alone.
class PoolFile final : public Backing {
 public:
  enum class Access : uint8_t {
    kExclusive,  // kUnavailable where another process or object has it
    kReadOnly,   // for a look at a pool that may be in use
  };

  // A file without its name until Publish(). `syncs`: whether Sync() waits for the device; without
  // it rows survive a killed process, not a power failure. kFailedPrecondition: there is a pool.
  static StatusOr<std::unique_ptr<PoolFile>> Create(const std::string& directory, bool syncs);
  // kNotFound: there is none.
  static StatusOr<std::unique_ptr<PoolFile>> Open(const std::string& directory, Access access,
                                                  bool syncs);
  ~PoolFile() override;

  // What was written is durable, and the directory's pool from now on.
  // Until then the bytes are in a file of another name, which the next Create() empties: a
  // half-made pool is never opened.
  Status Publish();

  uint64_t size() const override { return size_; }
  Status Read(uint64_t offset, std::span<std::byte> out) const override;
  Status Write(uint64_t offset, std::span<const std::byte> bytes) override;
  // write() hands bytes to the page cache, which outlives the process: nothing is left to drain.
  void Drain() override {}
  Status Sync() override;
  Status ReadMany(std::span<const ReadPiece> pieces) const override;
  void ExpectRandomReads() override;
  Status Grow(uint64_t size) override;

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }

 private:
  PoolFile(int fd, std::string directory, bool syncs);
  Status Lock() const;

  const int fd_;
  const std::string directory_;
  const std::string path_;
  const bool syncs_;
  std::atomic<uint64_t> size_ = 0;  // read by threads that the pool's mutex does not keep away
};

}  // namespace persia::pool
