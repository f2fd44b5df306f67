#include "store/slab_memory.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/mapped_memory.h"

namespace persia::store {
namespace {

constexpr size_t kLineBytes = 64;
// Above this, an unfinished huge page is less than 6 bytes a row.
constexpr uint64_t kManyRows = SlabMemory::kBlockBytes / 6;
// Each that has lost its pages divides a mapping, and processes may have some 65,000 of these.
constexpr size_t kMostReleased = 4096;

}  // namespace

SlabPiece SlabMemory::Take(size_t row_bytes, size_t num_rows) {
  if (row_bytes > kMaxSharedRowBytes) {
    // What nearly fills a huge page becomes one.
    const size_t size = num_rows * row_bytes;
    auto own = std::make_shared<MappedMemory>(
        MappedMemory::Allocate(size > kBlockBytes / 16 * 15 ? std::max(size, kBlockBytes) : size));
    return {.block = own, .data = own->data(), .size = own->size()};
  }
  SlabPiece piece = TakeGiven(row_bytes, num_rows);
  if (piece.data != nullptr) return piece;
  Blocks finished;
  piece = TakeShared(row_bytes, num_rows, &finished);
  // Takes long: others may have their pieces meanwhile.
  for (const auto& block : finished) MoveToHugePages(*block);
  return piece;
}

// Rounded to cache lines, so that the next slab begins on one. What is left behind the last row
// goes with it: it is too little for another.
SlabPiece SlabMemory::TakeShared(size_t row_bytes, size_t num_rows, Blocks* finished) {
  const std::lock_guard lock(mutex_);
  const bool fits = block_ != nullptr && kBlockBytes - block_used_ >= row_bytes;
  if (!fits && !OpenBlock(finished)) return {};
  const size_t left = kBlockBytes - block_used_;
  const size_t rows = std::min(num_rows, left / row_bytes);
  size_t size = (rows * row_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  if (left - size < row_bytes) size = left;
  SlabPiece piece = {.block = block_, .data = block_->data() + block_used_, .size = size};
  block_used_ += size;
  num_rows_ += rows;
  if (block_used_ == kBlockBytes) FinishBlock(finished);
  return piece;
}

// A linear search: pieces are given back by tiers alone, some tens at a time.
SlabPiece SlabMemory::TakeGiven(size_t row_bytes, size_t num_rows) {
  const std::lock_guard lock(mutex_);
  const size_t wanted = row_bytes * num_rows;
  const auto fits = [&](const SlabPiece& piece) {
    return piece.size >= std::max(row_bytes, wanted / 2) && piece.size <= 2 * wanted;
  };
  std::unordered_map<const MappedMemory*, size_t> num_given;
  for (const auto& [piece, _] : given_) ++num_given[piece.block.get()];
  const auto rank = [&](const Given& given) {
    const SlabPiece& piece = given.piece;
    return std::tuple(!fits(piece), num_given[piece.block.get()], piece.size);
  };
  const auto best =
      std::min_element(given_.begin(), given_.end(),
                       [&](const Given& a, const Given& b) { return rank(a) < rank(b); });
  if (best == given_.end() || !fits(best->piece)) return {};
  SlabPiece piece = std::move(best->piece);
  // Its pages may have gone back to the system; the next writes bring new ones.
  UseHugePages(piece.data, piece.size);
  given_.erase(best);
  return piece;
}

void SlabMemory::Give(SlabPiece piece) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<MappedMemory> block = piece.block;
  const size_t size = piece.size;
  given_.push_back({std::move(piece), size});
  // What is unfinished may be made whole yet.
  if (block != block_) ReleaseGiven(block);
}

// `block` is the caller's own pointer to it: other owners than given pieces have some of it in use.
void SlabMemory::ReleaseGiven(const std::shared_ptr<MappedMemory>& block) {
  const auto is_of_block = [&](const Given& given) { return given.piece.block == block; };
  const auto num_given = std::count_if(given_.begin(), given_.end(), is_of_block);
  if (block.use_count() == num_given + 1) {
    std::erase_if(given_, is_of_block);
    return;
  }
  if (given_.size() > kMostReleased) return;
  for (Given& given : given_) {
    const SlabPiece& piece = given.piece;
    if (!is_of_block(given) || given.kept_bytes < piece.size) continue;
    given.kept_bytes = piece.size - ReleasePages(piece.data, piece.size);
  }
}

// Memory first: where there is none, the old block stays the unfinished one.
bool SlabMemory::OpenBlock(Blocks* finished) {
  const bool huge = num_rows_ >= kManyRows;
  MappedMemory memory = MappedMemory::Allocate(kBlockBytes);
  if (memory.data() == nullptr) return false;
  if (!huge) UseSmallPages(memory);
  FinishBlock(finished);
  block_ = std::make_shared<MappedMemory>(std::move(memory));
  block_used_ = 0;
  block_is_huge_ = huge;
  return true;
}

void SlabMemory::FinishBlock(Blocks* finished) {
  if (block_ == nullptr) return;
  const std::shared_ptr<MappedMemory> block = std::exchange(block_, nullptr);
  const bool has_given = std::any_of(
      given_.begin(), given_.end(), [&](const Given& given) { return given.piece.block == block; });
  if (has_given) {
    ReleaseGiven(block);
  } else if (!block_is_huge_) {
    finished->push_back(block);
  }
}

void SlabMemory::Clear() {
  Blocks finished;
  {
    const std::lock_guard lock(mutex_);
    FinishBlock(&finished);
    num_rows_ = 0;
    given_.clear();
  }
  for (const auto& block : finished) MoveToHugePages(*block);
}

// Of a block on small pages, what is not used takes no memory.
uint64_t SlabMemory::unused_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t num_bytes = block_ != nullptr && block_is_huge_ ? kBlockBytes - block_used_ : 0;
  for (const Given& given : given_) num_bytes += given.kept_bytes;
  return num_bytes;
}

}  // namespace persia::store
