// Header, footer and trailer of checkpoint files: the first byte chooses the decoder, and whether
// the checksum is put right first.
#include <cstdlib>
#include <cstring>

#include "aligned_input.h"
#include "base/hash.h"
#include "checkpoint/file_format.h"

namespace persia::fuzz {
namespace {

void CorrectChecksum(Buffer* input, size_t section_bytes, size_t offset) {
  if (section_bytes > input->size() || section_bytes < offset + 8) return;
  const uint64_t checksum = checkpoint::Checksum(input->span().first(section_bytes), offset);
  std::memcpy(input->data() + offset, &checksum, sizeof(checksum));
}

void Header(Buffer* input, bool corrects) {
  uint32_t bytes = 0;
  if (corrects && input->size() >= 16) std::memcpy(&bytes, input->data() + 12, sizeof(bytes));
  CorrectChecksum(input, bytes, 16);
  auto header = checkpoint::DecodeHeader(input->span());
  if (header.ok() && header->header_bytes > input->size()) std::abort();
  if (header.ok() && header->config.has_value() && !header->config->Validate().ok()) std::abort();
}

void Footer(Buffer* input, bool corrects) {
  if (corrects) CorrectChecksum(input, input->size(), 16);
  auto blocks = checkpoint::DecodeFooter(input->span());
  if (!blocks.ok()) return;
  for (const auto& block : blocks.value()) {
    if (block.virtual_shard >= kNumVirtualShards) std::abort();
    if (block.offset + block.length < block.offset) std::abort();
  }
}

void Trailer(Buffer* input, bool corrects) {
  if (corrects) CorrectChecksum(input, input->size(), 24);
  if (checkpoint::DecodeTrailer(input->span()).ok() && input->size() != checkpoint::kTrailerBytes) {
    std::abort();
  }
}

}  // namespace
}  // namespace persia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return -1;
  persia::Buffer input = persia::fuzz::AlignedInput(data + 1, size - 1);
  const bool corrects = data[0] % 2 == 1;
  switch (data[0] / 2 % 3) {
    case 0: persia::fuzz::Header(&input, corrects); break;
    case 1: persia::fuzz::Footer(&input, corrects); break;
    default: persia::fuzz::Trailer(&input, corrects); break;
  }
  return 0;
}
