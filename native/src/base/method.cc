#include "base/method.h"

namespace persia {

// In memory of its own, because the vector of views may be copied and moved while they point to it.
void Segments::AddOwned(std::vector<std::byte> bytes) {
  auto kept = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  views.emplace_back(*kept);
  owned.push_back(std::move(kept));
}

void Segments::AddOwned(Buffer buffer) {
  auto kept = std::make_shared<const Buffer>(std::move(buffer));
  views.push_back(kept->span());
  owned.push_back(std::move(kept));
}

void Segments::AddPadding(uint64_t size_bytes) {
  // Static, because the view outlives this call.
  static constexpr std::byte kZeros[8] = {};
  views.push_back({kZeros, (8 - size_bytes % 8) % 8});
}

uint64_t Segments::size_bytes() const {
  uint64_t size = 0;
  for (const auto& view : views) size += view.size();
  return size;
}

namespace internal {

Status WrongSize(size_t size_bytes, size_t expected_bytes) {
  return Corruption("it has ", size_bytes, " bytes instead of ", expected_bytes);
}

Status NotOfElements(size_t size_bytes, size_t element_bytes) {
  return Corruption("its ", size_bytes, " bytes are not a multiple of ", element_bytes);
}

}  // namespace internal
}  // namespace persia
