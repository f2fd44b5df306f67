// MappedMemory: zeroed memory straight from the operating system.
//
// Rows and indexes are large, live long and are read at random, so page size decides their speed:
// blocks of 2 MiB and more are aligned to huge pages and advised to be them. Running out is
// reported, not fatal: a full server must go on serving the rows that it has.
#pragma once

#include <cstddef>
#include <utility>

namespace persia {

// Move-only; the pages go back to the system with the object. malloc() would mix long-lived blocks
// with short-lived ones, and rarely return them. Not for small or short-lived memory: each costs
// system calls, and pages that are zeroed.
class MappedMemory {
 public:
  // Of x86-64 and most arm64 systems. Where huge pages are larger, memory is merely aligned less
  // well.
  static constexpr size_t kHugePageBytes = size_t{2} << 20;
  static constexpr size_t kPageBytes = 4096;

  // Owns nothing: data() is null.
  MappedMemory() = default;
  MappedMemory(MappedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedMemory& operator=(MappedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~MappedMemory();

  // `size` bytes, rounded up to whole pages; data() is null when there is no memory.
  static MappedMemory Allocate(size_t size);
  // The same, and the size may exceed what the system has: only pages that are written take memory.
  static MappedMemory AllocateSparse(size_t size);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  MappedMemory(std::byte* data, size_t size) : data_(data), size_(size) {}
  static MappedMemory Map(size_t size, int flags);

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The size of the pages of a MappedMemory, where its owner knows better than the default.

// For memory that has not been touched: only what will be takes memory.
void UseSmallPages(const MappedMemory& memory);

// Gives the pages that lie within these bytes of a MappedMemory back to the system: they are zero,
// and take no memory until they are written again, when they are small. Returns how many bytes.
size_t ReleasePages(std::byte* data, size_t size);

// Undoes that they will be small: their pages may be huge, together with those around them.
void UseHugePages(std::byte* data, size_t size);

// Puts what lies on small pages onto huge ones, at once where the system can, else when it finds
// time. Others may use the memory meanwhile.
void MoveToHugePages(const MappedMemory& memory);

// The system's setting, as it stands in a file: `always madvise [never]` is what forbids them.
bool AllowsHugePages(const char* setting_file);

}  // namespace persia
