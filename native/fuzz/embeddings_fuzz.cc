// DecodeEmbeddings: what it lets through lies inside the message, and no index points past the
// rows.
#include <cstdlib>

#include "aligned_input.h"
#include "worker/embeddings_message.h"

namespace persia::fuzz {
namespace {

void Read(const worker::SlotEmbedding& slot, uint32_t batch_size) {
  if (slot.absent) {
    if (slot.num_rows != 0 || slot.rows != nullptr || slot.index != nullptr) std::abort();
    return;
  }
  Touch(std::span(slot.rows, uint64_t{slot.num_rows} * slot.dim));
  if (!slot.raw) {
    if (slot.num_rows != batch_size) std::abort();
    return;
  }
  Touch(std::span(slot.sample_num_ids, batch_size));
  const uint64_t num_index = uint64_t{batch_size} * slot.sample_fixed_size;
  for (const int64_t row : std::span(slot.index, num_index)) {
    if (row < 0 || row >= int64_t{slot.num_rows}) std::abort();
  }
}

}  // namespace
}  // namespace persia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace persia;  // NOLINT: a fuzz target is one function
  auto result = worker::DecodeEmbeddings(0, fuzz::AlignedInput(data, size));
  if (!result.ok()) return 0;
  for (const worker::SlotEmbedding& slot : result->slots) fuzz::Read(slot, result->batch_size);
  return 0;
}
