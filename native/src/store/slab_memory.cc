#include "store/slab_memory.h"

#include <algorithm>
#include <utility>

#include "base/page_size.h"

namespace persia::store {
namespace {

constexpr size_t kBlockBytes = MappedMemory::kHugePageBytes;
constexpr size_t kLineBytes = 64;
// Wider rows would leave too much at the end of a block and get memory of their own.
constexpr size_t kMaxSharedRowBytes = kBlockBytes / 128;
constexpr uint64_t kManyRows = kBlockBytes / 6;

}  // namespace

SlabPiece SlabMemory::Take(size_t row_bytes, size_t num_rows) {
  if (row_bytes > kMaxSharedRowBytes) {
    auto own = std::make_shared<MappedMemory>(MappedMemory::Allocate(num_rows * row_bytes));
    return {.block = own, .data = own->data(), .size = own->size()};
  }
  const std::lock_guard lock(mutex_);
  if ((block_ == nullptr || kBlockBytes - block_used_ < row_bytes) && !OpenBlock()) return {};
  const size_t left = kBlockBytes - block_used_;
  const size_t rows = std::min(num_rows, left / row_bytes);
  size_t size = (rows * row_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  if (left - size < row_bytes) size = left;
  SlabPiece piece = {.block = block_, .data = block_->data() + block_used_, .size = size};
  block_used_ += size;
  num_rows_ += rows;
  if (block_used_ == kBlockBytes) {
    if (!block_is_huge_) MoveToHugePages(*block_);
    block_.reset();
  }
  return piece;
}

bool SlabMemory::OpenBlock() {
  const bool huge = num_rows_ >= kManyRows;
  MappedMemory memory = MappedMemory::Allocate(kBlockBytes);
  if (memory.data() == nullptr) return false;
  if (!huge) UseSmallPages(memory);
  block_ = std::make_shared<MappedMemory>(std::move(memory));
  block_used_ = 0;
  block_is_huge_ = huge;
  return true;
}

void SlabMemory::Clear() {
  const std::lock_guard lock(mutex_);
  block_.reset();
  num_rows_ = 0;
}

uint64_t SlabMemory::unused_bytes() const {
  const std::lock_guard lock(mutex_);
  return block_ != nullptr && block_is_huge_ ? kBlockBytes - block_used_ : 0;
}

}  // namespace persia::store
