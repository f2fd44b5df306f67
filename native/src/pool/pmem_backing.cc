#include "pool/pmem_backing.h"

#ifdef PERSIA_HAVE_PMEM
#include <libpmem.h>
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace persia::pool {

#ifdef PERSIA_HAVE_PMEM

namespace {

class PmemBacking final : public Backing {
 public:
  PmemBacking(std::unique_ptr<PoolFile> file, std::byte* data, uint64_t map_bytes)
      : file_(std::move(file)), data_(data), map_bytes_(map_bytes) {}
  ~PmemBacking() override { ::munmap(data_, map_bytes_); }

  uint64_t size() const override { return file_->size(); }

  // Reading a mapping beyond the file's end would end the process by a signal.
  Status Read(uint64_t offset, std::span<std::byte> out) const override {
    if (offset + out.size() > size()) {
      return Corruption("pool ", file_->path(), " ends before byte ", offset + out.size(),
                        "; it was cut short: remove it and load a checkpoint");
    }
    std::memcpy(out.data(), data_ + offset, out.size());
    return Status::Ok();
  }

  // By reading, of each cache line a byte: prefetch instructions may be dropped where the address
  // is not in the processor's tables, and reads that need nothing of one another overlap.
  void Touch(uint64_t offset, uint64_t count) const override {
    constexpr uint64_t kLineBytes = 64;
    const uint64_t end = std::min(offset + count, size());
    for (uint64_t at = offset / kLineBytes * kLineBytes; at < end; at += kLineBytes) {
      static_cast<void>(*static_cast<const volatile std::byte*>(data_ + at));
    }
  }
  const std::byte* Mapped(uint64_t offset) const override { return data_ + offset; }

  // 8 bytes are one store: pmem_memcpy does not promise that.
  Status Write(uint64_t offset, std::span<const std::byte> bytes) override {
    if (bytes.size() == sizeof(uint64_t) && offset % sizeof(uint64_t) == 0) {
      uint64_t word;
      std::memcpy(&word, bytes.data(), sizeof(word));
      auto* place = reinterpret_cast<uint64_t*>(data_ + offset);
      std::atomic_ref(*place).store(word, std::memory_order_relaxed);
      pmem_flush(place, sizeof(word));
      return Status::Ok();
    }
    pmem_memcpy_nodrain(data_ + offset, bytes.data(), bytes.size());
    return Status::Ok();
  }
  void Drain() override { pmem_drain(); }
  // Each thread has drained what it wrote.
  Status Sync() override { return Status::Ok(); }
  Status Grow(uint64_t new_size) override {
    if (new_size > map_bytes_) return Internal("a pool grows beyond its mapping");
    PERSIA_RETURN_IF_ERROR(file_->Grow(new_size));
    return file_->Sync();  // the file's size is no store: flushing does not cover it
  }

 private:
  const std::unique_ptr<PoolFile> file_;
  std::byte* const data_;
  const uint64_t map_bytes_;
};

// With MAP_SYNC, which only persistent memory grants, a page's place in the file is durable before
// the page can be written.
void* Map(int fd, uint64_t bytes) {
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  void* data = ::mmap(nullptr, bytes, kAccess, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
  return data != MAP_FAILED ? data : ::mmap(nullptr, bytes, kAccess, MAP_SHARED, fd, 0);
}

}  // namespace

bool HasPmem() { return true; }

StatusOr<std::unique_ptr<Backing>> MapPmem(std::unique_ptr<PoolFile> file, uint64_t map_bytes) {
  void* data = Map(file->fd(), map_bytes);
  if (data == MAP_FAILED) {
    return IOError("cannot map ", map_bytes, " bytes of ", file->path(), ": ",
                   std::strerror(errno));
  }
  return std::unique_ptr<Backing>(
      std::make_unique<PmemBacking>(std::move(file), static_cast<std::byte*>(data), map_bytes));
}

#else

bool HasPmem() { return false; }

StatusOr<std::unique_ptr<Backing>> MapPmem(std::unique_ptr<PoolFile> file, uint64_t) {
  return FailedPrecondition("pool ", file->path(),
                            " was asked for as pmem, but this build of persia has no libpmem; use "
                            "kind file, or install libpmem-dev and build persia again");
}

#endif

}  // namespace persia::pool
