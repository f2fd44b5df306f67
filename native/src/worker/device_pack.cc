#include "worker/device_pack.h"

#include <algorithm>
#include <cstring>

namespace persia::worker {
namespace {

constexpr uint64_t kAlignment = 64;  // enough for vector loads of a device

// Returns the place of the next array, and steps over it.
template <typename T>
uint64_t Take(uint64_t count, uint64_t* end) {
  const uint64_t place = *end;
  *end += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  return place;
}

// Blocks are few, one or two for each dim, so they are searched one after the other. Plain bags
// (one row each, without weights) need no offsets: mixed with others they would have to have some.
// A pack is made of a message of at most 1 GiB, so its counts fit in 32 bits.
void Join(const DistinctSlot& slot, uint32_t position, PackLayout* layout) {
  const bool plain = slot.bags().IsPlain();
  auto block = std::find_if(layout->blocks.begin(), layout->blocks.end(), [&](const auto& b) {
    return b.dim == slot.dim && (b.offsets == kNoPlace) == plain;
  });
  if (block == layout->blocks.end()) {
    block = layout->blocks.insert(block, {.dim = slot.dim, .first_rows = {0}});
    if (!plain) block->offsets = 0;  // its place follows
  }
  block->slots.push_back(position);
  block->first_rows.push_back(block->first_rows.back() + slot.num_rows);
  block->num_numbers += slot.numbers.size();
  if (!plain && slot.scaling != Scaling::kNone) block->factors = 0;
}

// Arrays of one block side by side, as the device reads them together. `offsets` and `factors` were
// marked by Join() where the block needs them.
void Place(uint32_t batch_size, PackedBlock* block, uint64_t* end) {
  const uint64_t num_bags = uint64_t{batch_size} * block->slots.size();
  block->rows = Take<float>(uint64_t{block->first_rows.back()} * block->dim, end);
  block->numbers = Take<int32_t>(block->num_numbers, end);
  if (block->offsets != kNoPlace) block->offsets = Take<int32_t>(num_bags + 1, end);
  if (block->factors != kNoPlace) block->factors = Take<float>(num_bags, end);
}

PackedSlot PlaceSlot(const SlotEmbedding& slot, uint32_t position, uint32_t batch_size,
                     uint64_t* end) {
  PackedSlot packed{.position = position};
  packed.rows = Take<float>(uint64_t{slot.num_rows} * slot.dim, end);
  if (slot.raw) packed.index = Take<int32_t>(uint64_t{batch_size} * slot.sample_fixed_size, end);
  return packed;
}

// One after the other through the arrays of a block.
class BlockFiller {
 public:
  BlockFiller(const PackedBlock& block, std::byte* out)
      : rows_(At<float>(block.rows, out)),
        numbers_(At<int32_t>(block.numbers, out)),
        offsets_(At<int32_t>(block.offsets, out)),
        factors_(At<float>(block.factors, out)) {
    if (offsets_ != nullptr) *offsets_++ = 0;
  }

  // Slots in the order of PackedBlock::slots. Numbers and offsets then count from the
  // block's first row and ID; a slot's own count from the slot's.
  void Add(const DistinctSlot& slot, const float* rows, uint32_t first_row) {
    rows_ = std::copy_n(rows, size_t{slot.num_rows} * slot.dim, rows_);
    for (const uint32_t number : slot.numbers) {
      *numbers_++ = static_cast<int32_t>(first_row + number);
    }
    const Bags bags = slot.bags();
    const auto begin = static_cast<int32_t>(num_numbers_);
    if (offsets_ != nullptr) {
      for (uint32_t bag = 0; bag < bags.num_bags; ++bag) {
        *offsets_++ = begin + static_cast<int32_t>(bags.End(bag));
      }
    }
    if (factors_ != nullptr) {
      for (uint32_t bag = 0; bag < bags.num_bags; ++bag) *factors_++ = bags.Factor(bag);
    }
    num_numbers_ += slot.numbers.size();
  }

 private:
  template <typename T>
  static T* At(uint64_t place, std::byte* out) {
    return place == kNoPlace ? nullptr : reinterpret_cast<T*>(out + place);
  }

  float* rows_;
  int32_t* numbers_;
  int32_t* offsets_;
  float* factors_;
  size_t num_numbers_ = 0;
};

}  // namespace

PackLayout LayOutPack(const LookupResult& result) {
  PackLayout layout{.batch_size = result.batch_size};
  for (uint32_t i = 0; i < result.slots.size(); ++i) {
    const SlotEmbedding& slot = result.slots[i];
    if (slot.absent) continue;
    if (slot.unpooled >= 0) {
      Join(result.unpooled[slot.unpooled], i, &layout);
    } else {
      layout.slots.push_back(PlaceSlot(slot, i, result.batch_size, &layout.size_bytes));
    }
  }
  for (PackedBlock& block : layout.blocks) Place(result.batch_size, &block, &layout.size_bytes);
  return layout;
}

void FillPack(const LookupResult& result, const PackLayout& layout, std::byte* out) {
  for (const PackedSlot& packed : layout.slots) {
    const SlotEmbedding& slot = result.slots[packed.position];
    std::copy_n(slot.rows, size_t{slot.num_rows} * slot.dim,
                reinterpret_cast<float*>(out + packed.rows));
    if (!slot.raw) continue;
    std::copy_n(slot.index, size_t{result.batch_size} * slot.sample_fixed_size,
                reinterpret_cast<int32_t*>(out + packed.index));
  }
  for (const PackedBlock& block : layout.blocks) {
    BlockFiller filler(block, out);
    for (size_t i = 0; i < block.slots.size(); ++i) {
      const SlotEmbedding& slot = result.slots[block.slots[i]];
      filler.Add(result.unpooled[slot.unpooled], slot.rows, block.first_rows[i]);
    }
  }
}

}  // namespace persia::worker
