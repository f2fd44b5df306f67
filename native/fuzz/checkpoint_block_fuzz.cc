// Blocks of checkpoint files. The checksum is put right first, or nothing would get past it; the
// first byte says whether, and whether the rest is the columns themselves, to be compressed here.
#include <zstd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "aligned_input.h"
#include "base/hash.h"
#include "checkpoint/block.h"
#include "checkpoint/file_format.h"

namespace persia::fuzz {
namespace {

constexpr size_t kHeadBytes = 48, kChecksumOffset = 8, kPayloadBytesOffset = 36;

std::vector<std::byte> MakeBlock(uint8_t choice, const uint8_t* data, size_t size) {
  std::vector<std::byte> block(size);
  if (size > 0) std::memcpy(block.data(), data, size);
  if (size < kHeadBytes) return block;
  if (choice % 4 == 2) {
    std::vector<std::byte> packed(kHeadBytes + ZSTD_compressBound(size - kHeadBytes));
    std::memcpy(packed.data(), data, kHeadBytes);
    const auto bytes =
        static_cast<uint32_t>(ZSTD_compress(packed.data() + kHeadBytes, packed.size() - kHeadBytes,
                                            data + kHeadBytes, size - kHeadBytes, 1));
    std::memcpy(packed.data() + kPayloadBytesOffset, &bytes, sizeof(bytes));
    packed.resize((kHeadBytes + bytes + 7) / 8 * 8);
    block = packed;
  }
  if (choice % 4 != 0) {
    const uint64_t checksum = checkpoint::Checksum(block, kChecksumOffset);
    std::memcpy(block.data() + kChecksumOffset, &checksum, sizeof(checksum));
  }
  return block;
}

void Check(const checkpoint::BlockRows& rows) {
  const size_t count = rows.signs.size();
  const bool has_rows = rows.shape.kind == checkpoint::BlockKind::kRows;
  if (count == 0 || rows.ages.size() != (has_rows ? count : 0)) std::abort();
  if (rows.scalars.size() != (rows.shape.has_scalar ? count : 0)) std::abort();
  if (rows.values.size() != count * rows.shape.row_floats()) std::abort();
  for (uint64_t sign : rows.signs) {
    if (VirtualShard(SignHash(sign)) != rows.shape.virtual_shard) std::abort();
  }
  // What was let through is encoded and decoded to the same again.
  std::vector<std::byte> bytes;
  if (!checkpoint::BlockEncoder().Encode(rows, &bytes).ok()) std::abort();
  checkpoint::BlockRows again;
  checkpoint::BlockDecoder decoder(bytes);
  if (!decoder.Next(&again).ok() || !decoder.AtEnd()) std::abort();
  if (again.shape != rows.shape || again.signs != rows.signs || again.ages != rows.ages) {
    std::abort();
  }
}

}  // namespace
}  // namespace persia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return -1;
  const auto block = persia::fuzz::MakeBlock(data[0], data + 1, size - 1);
  const persia::Buffer input =
      persia::fuzz::AlignedInput(reinterpret_cast<const uint8_t*>(block.data()), block.size());
  persia::checkpoint::BlockRows rows;
  persia::checkpoint::BlockDecoder decoder(input.span());
  while (!decoder.AtEnd() && decoder.Next(&rows).ok()) persia::fuzz::Check(rows);
  return 0;
}
