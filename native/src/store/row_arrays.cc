#include "store/row_arrays.h"

#include <cstring>
#include <iterator>

#include "store/row_policy.h"

namespace persia::store {
namespace {

size_t PagesOf(size_t num_bytes) {
  return (num_bytes + MappedMemory::kHugePageBytes - 1) / MappedMemory::kHugePageBytes;
}

}  // namespace

RowArray::RowArray(const RowArraySpec& spec, const RowShape& shape, uint32_t first_cell)
    : spec_(spec),
      shape_(shape),
      first_cell_(first_cell),
      stride_(shape.Stride()),
      values_(MappedMemory::Allocate(spec.num_ids * stride_ * sizeof(float))),
      scalars_(MappedMemory::Allocate(shape.has_scalar ? spec.num_ids * sizeof(uint32_t) : 1)),
      places_(MappedMemory::Allocate(spec.num_ids * sizeof(Place))),
      used_pages_(PagesOf(spec.num_ids * stride_ * sizeof(float)) + 1) {}

void RowArray::Begin(uint64_t id, uint32_t stamp) {
  PlaceOf(id) = {kHasRow, stamp};
  // A page of rows brings its share of scalars and places with it.
  const size_t row_bytes = stride_ * sizeof(float);
  const size_t page = id * row_bytes / MappedMemory::kHugePageBytes;
  if (used_pages_[page].load(std::memory_order_relaxed)) return;
  if (used_pages_[page].exchange(true, std::memory_order_relaxed)) return;
  const size_t page_bytes = std::min(values_.size(), MappedMemory::kHugePageBytes);
  const size_t other_bytes = sizeof(Place) + (shape_.has_scalar ? sizeof(uint32_t) : 0);
  num_bytes_ += page_bytes + page_bytes / row_bytes * other_bytes;
}

// Zeros are what lookups of an ID without a row read.
void RowArray::End(uint64_t id) {
  PlaceOf(id) = {0, 0};
  std::memset(values(id), 0, stride_ * sizeof(float));
}

StatusOr<std::shared_ptr<RowArrays>> RowArrays::Make(std::span<const RowArraySpec> specs,
                                                     const RowPolicies& policies,
                                                     uint32_t tail_floats) {
  auto arrays = std::make_shared<RowArrays>();
  uint64_t num_slabs = 0;
  std::vector<RowArraySpec> sorted(specs.begin(), specs.end());
  std::ranges::sort(sorted, {}, &RowArraySpec::first_sign);
  for (const RowArraySpec& spec : sorted) {
    RowShape shape = policies.Of(spec.first_sign).ShapeFor(spec.dim);
    shape.tail_floats = tail_floats;
    const auto first_cell = static_cast<uint32_t>(num_slabs * RowArray::kSlabCells);
    num_slabs += (spec.num_ids + RowArray::kSlabCells - 1) / RowArray::kSlabCells;
    // Half of the cell numbers are left to rows outside arrays.
    if (num_slabs > RowArray::kMaxIds / RowArray::kSlabCells) {
      return InvalidArgument("slots with index: array have more than ", RowArray::kMaxIds,
                             " IDs together; lower a cardinality, or leave index out of a slot");
    }
    RowArray& array = arrays->arrays_.emplace_back(spec, shape, first_cell);
    const bool has_scalars = !shape.has_scalar || array.scalar(0) != nullptr;
    if (!array.has_memory() || !has_scalars) {
      return ResourceExhausted("no memory for an array of ", spec.num_ids, " rows of dim ",
                               spec.dim, "; lower its cardinality, or leave index: array out");
    }
    for (uint32_t i = 0; i < array.num_slabs(); ++i) {
      arrays->by_slab_.push_back({&array, first_cell});
    }
  }
  arrays->num_cells_ = static_cast<uint32_t>(num_slabs * RowArray::kSlabCells);
  return arrays;
}

RowArray* RowArrays::OfSign(uint64_t sign) {
  const auto next = std::ranges::upper_bound(
      arrays_, sign, {}, [](const RowArray& array) { return array.spec().first_sign; });
  if (next == arrays_.begin()) return nullptr;
  RowArray& array = *std::prev(next);
  return array.Contains(sign) ? &array : nullptr;
}

uint64_t RowArrays::memory_bytes() const {
  uint64_t num_bytes = 0;
  for (const RowArray& array : arrays_) num_bytes += sizeof(RowArray) + array.memory_bytes();
  return num_bytes;
}

// Whether an ID is new cannot be predicted, so there is no branch: each ID is written as if it
// were. Places are asked for ahead, because IDs are spread over the whole array.
void ArrayNumbers::Insert(RowArray* array, std::span<const uint64_t> ids, uint32_t* numbers) {
  constexpr size_t kAhead = 32;
  Reserve(count_ + ids.size());
  uint64_t* const known = ids_.data();
  const auto mask = static_cast<uint32_t>(ids_.size() - 1);
  auto count = static_cast<uint32_t>(count_);
  const auto number = [&](size_t i) {
    const uint64_t id = ids[i];
    RowArray::Place& place = array->PlaceOf(id);
    const uint32_t last = place.number & ~RowArray::kHasRow;
    const bool is_known = (last < count) & (known[last & mask] == id);
    numbers[i] = is_known ? last : count;
    place.number = (place.number & RowArray::kHasRow) | numbers[i];
    known[count] = id;
    count += static_cast<uint32_t>(!is_known);
  };
  size_t i = 0;
  for (; i + kAhead < ids.size(); ++i) {
    __builtin_prefetch(&array->PlaceOf(ids[i + kAhead]), 1);
    number(i);
  }
  for (; i < ids.size(); ++i) number(i);
  count_ = count;
}

}  // namespace persia::store
