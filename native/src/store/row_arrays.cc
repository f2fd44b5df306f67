#include "store/row_arrays.h"

#include <cstring>
#include <iterator>

#include "store/row_policy.h"

namespace persia::store {

// exchange() decides which of two threads counts a page: pages are larger than rows, so shards
// share them.
void SparsePages::Count(size_t page) {
  if (is_used_[page].exchange(true, std::memory_order_relaxed)) return;
  const size_t begin = page * MappedMemory::kHugePageBytes;
  used_bytes_ += std::min(memory_.size() - begin, MappedMemory::kHugePageBytes);
}

// Addresses for all IDs at once, so that no row ever moves; memory is taken by the page that is
// written.
RowArray::RowArray(const RowArraySpec& spec, const RowShape& shape, uint32_t first_cell)
    : spec_(spec),
      shape_(shape),
      first_cell_(first_cell),
      stride_(shape.Stride()),
      values_(spec.num_ids * stride_ * sizeof(float)),
      scalars_(shape.has_scalar ? spec.num_ids * sizeof(uint32_t) : 1),
      states_(spec.num_ids * sizeof(IdState)) {}

void RowArray::InsertRow(uint64_t id, uint32_t stamp) {
  IdStateOf(id) = {kHasRow, stamp};
  CountIdState(id);
  values_.Use(id * stride_ * sizeof(float), stride_ * sizeof(float));
  if (shape_.has_scalar) scalars_.Use(id * sizeof(uint32_t), sizeof(uint32_t));
}

// Zeros are what lookups of an ID without a row read.
void RowArray::RemoveRow(uint64_t id) {
  IdStateOf(id) = {0, 0};
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
      return InvalidArgument("slots with index: array take ", num_slabs * RowArray::kSlabCells,
                             " cells or more, a multiple of ", RowArray::kSlabCells,
                             " each, and a store has ", RowArray::kMaxIds,
                             " for arrays; lower a cardinality, or leave index out of a slot");
    }
    RowArray& array = arrays->arrays_.emplace_back(spec, shape, first_cell);
    if (!array.has_memory()) {
      return ResourceExhausted("no addresses for an array with a cardinality of ", spec.num_ids,
                               " and dim ", spec.dim,
                               "; lower the cardinality, or leave index: array out");
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
// were. States are asked for ahead, because IDs are spread over the whole array.
void ArrayNumbers::Insert(RowArray* array, std::span<const uint64_t> ids, uint32_t* numbers) {
  constexpr size_t kAhead = 32;
  Reserve(count_ + ids.size());
  uint64_t* const known = ids_.data();
  const auto mask = static_cast<uint32_t>(ids_.size() - 1);
  auto count = static_cast<uint32_t>(count_);
  const auto number = [&](size_t i) {
    const uint64_t id = ids[i];
    RowArray::IdState& state = array->IdStateOf(id);
    const uint32_t last = state.number & ~RowArray::kHasRow;
    const bool is_known = (last < count) & (known[last & mask] == id);
    numbers[i] = is_known ? last : count;
    state.number = (state.number & RowArray::kHasRow) | numbers[i];
    known[count] = id;
    count += static_cast<uint32_t>(!is_known);
  };
  size_t i = 0;
  for (; i + kAhead < ids.size(); ++i) {
    __builtin_prefetch(&array->IdStateOf(ids[i + kAhead]), 0, 1);
    number(i);
  }
  for (; i < ids.size(); ++i) number(i);
  count_ = count;
}

}  // namespace persia::store
