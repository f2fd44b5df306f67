#include "base/buffer.h"

#include <cstdlib>
#include <mutex>
#include <vector>

namespace persia {
namespace {

constexpr size_t kAlignment = 64;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kLargeBytes = SIZE_MAX;  // all on the heap, where AddressSanitizer sees their ends
#else
constexpr size_t kLargeBytes = 64 << 10;
#endif

// Large blocks that wait for their next use, the latest at the back.
class KeptBlocks {
 public:
  // Never destroyed: buffers of static objects may be freed after everything else.
  static KeptBlocks& Get() {
    static auto* kept = new KeptBlocks;
    return *kept;
  }

  // A block of at least `size_bytes` and at most a quarter more; empty when there is none.
  // Searched from the back, where the blocks are whose pages are most likely still in the caches. A
  // much larger block is left alone: a message would keep memory that it does not need for as long
  // as it lives.
  MappedMemory Take(size_t size_bytes) {
    const std::lock_guard lock(mutex_);
    for (size_t i = blocks_.size(); i-- > 0;) {
      const size_t bytes = blocks_[i].size();
      if (bytes < size_bytes || bytes - size_bytes > size_bytes / 4) continue;
      MappedMemory block = std::move(blocks_[i]);
      blocks_.erase(blocks_.begin() + static_cast<ptrdiff_t>(i));
      total_bytes_ -= bytes;
      return block;
    }
    return {};
  }

  void Put(MappedMemory block) {
    std::vector<MappedMemory> dropped;  // given back to the system without the lock
    const std::lock_guard lock(mutex_);
    total_bytes_ += block.size();
    blocks_.push_back(std::move(block));
    size_t num_dropped = 0;
    while (total_bytes_ > Buffer::kMaxKeptBytes || blocks_.size() - num_dropped > kMaxBlocks) {
      total_bytes_ -= blocks_[num_dropped].size();
      dropped.push_back(std::move(blocks_[num_dropped++]));
    }
    blocks_.erase(blocks_.begin(), blocks_.begin() + static_cast<ptrdiff_t>(num_dropped));
  }

  size_t total_bytes() {
    const std::lock_guard lock(mutex_);
    return total_bytes_;
  }

 private:
  static constexpr size_t kMaxBlocks = 64;  // so that the search stays short

  std::mutex mutex_;
  std::vector<MappedMemory> blocks_;
  size_t total_bytes_ = 0;
};

}  // namespace

Buffer::Buffer(size_t size_bytes) : size_(size_bytes) {
  if (size_bytes == 0) return;
  if (size_bytes < kLargeBytes) {
    // aligned_alloc wants a multiple of the alignment.
    const size_t rounded = (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
    data_ = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
  } else {
    block_ = KeptBlocks::Get().Take(size_bytes);
    if (block_.data() == nullptr) block_ = MappedMemory::Allocate(size_bytes);
    data_ = block_.data();
  }
  if (data_ == nullptr) std::abort();  // out of memory: nothing sensible is left to do
}

Buffer::~Buffer() {
  if (block_.data() == nullptr) {
    std::free(data_);
  } else {
    KeptBlocks::Get().Put(std::move(block_));
  }
}

size_t Buffer::KeptBytes() { return KeptBlocks::Get().total_bytes(); }

}  // namespace persia
