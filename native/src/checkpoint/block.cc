#include "checkpoint/block.h"

#include <zstd.h>

#include <cstring>
#include <string>

#include "base/hash.h"
#include "checkpoint/byte_planes.h"
#include "checkpoint/file_format.h"
#include "store/types.h"

namespace persia::checkpoint {
namespace {

using store::kMaxDim;

constexpr uint32_t kMagic = 0x4b4c4250;  // "PBLK"
// Of the columns, so that a damaged length never asks for more memory. A block is a row or more
// and otherwise far smaller.
constexpr uint64_t kMaxColumnsBytes = uint64_t{64} << 20;
constexpr size_t kChecksumOffset = 8;
// Exponents are all there is to find, and the fastest levels find them: slower ones gain a
// hundredth.
constexpr int kCompressionLevel = -1;

// As in the file (docs/checkpoint_format.md). Members are aligned, so there is no padding to zero.
// Little-endian, as every processor that this is built for: heads are copied, not encoded.
struct Head {
  uint32_t magic = kMagic;
  uint16_t version = kFormatVersion;
  uint8_t kind = 0;
  uint8_t optimizer = 0;
  uint64_t checksum = 0;
  uint32_t virtual_shard = 0;
  uint32_t dim = 0;
  uint32_t state_floats = 0;
  uint32_t num_rows = 0;
  uint8_t has_scalar = 0;
  uint8_t embedding_type = 0;
  uint16_t reserved = 0;
  uint32_t payload_bytes = 0;
  uint64_t columns_bytes = 0;

  uint64_t row_bytes() const {
    if (kind == static_cast<uint8_t>(BlockKind::kRemovals)) return sizeof(uint64_t);
    return sizeof(uint64_t) + sizeof(uint32_t) * (uint64_t{1} + has_scalar + dim + state_floats);
  }
  uint64_t padded_bytes() const { return (sizeof(Head) + uint64_t{payload_bytes} + 7) / 8 * 8; }
};
static_assert(sizeof(Head) == 48);

// An empty vector has no address that memcpy() may be given.
template <typename T>
std::byte* Put(const std::vector<T>& values, std::byte* out) {
  const size_t bytes = values.size() * sizeof(T);
  if (bytes > 0) std::memcpy(out, values.data(), bytes);
  return out + bytes;
}

template <typename T>
const std::byte* Take(const std::byte* in, size_t count, std::vector<T>* values) {
  values->resize(count);
  if (count > 0) std::memcpy(values->data(), in, count * sizeof(T));
  return in + count * sizeof(T);
}

// Column by column: like values beside each other compress better.
void PutColumns(const BlockRows& rows, std::byte* out) {
  const size_t num_embedding = rows.signs.size() * rows.shape.dim;
  out = Put(rows.signs, out);
  out = Put(rows.ages, out);
  out = Put(rows.scalars, out);
  SplitIntoPlanes(rows.embeddings(), num_embedding, out);
  SplitIntoPlanes(rows.state(), rows.values.size() - num_embedding,
                  out + num_embedding * sizeof(float));
}

// Sizes were checked by IsSound() against the bytes there are.
void TakeColumns(const Head& head, const std::byte* in, BlockRows* rows) {
  const size_t num_rows = head.num_rows;
  const bool has_rows = rows->shape.kind == BlockKind::kRows;
  in = Take(in, num_rows, &rows->signs);
  in = Take(in, has_rows ? num_rows : 0, &rows->ages);
  in = Take(in, head.has_scalar != 0 ? num_rows : 0, &rows->scalars);
  const size_t num_embedding = num_rows * head.dim;
  const size_t num_state = num_rows * head.state_floats;
  rows->values.resize(num_embedding + num_state);
  JoinPlanes(in, num_embedding, rows->values.data());
  JoinPlanes(in + num_embedding * sizeof(float), num_state, rows->values.data() + num_embedding);
}

// For messages about damaged blocks.
std::string Describe(const Head& head) {
  return Concat("virtual shard ", head.virtual_shard, ", dim ", head.dim, ", state floats ",
                head.state_floats, ", rows ", head.num_rows, ", optimizer kind ", head.optimizer,
                ", bytes of columns ", head.columns_bytes);
}

// Whether the fields make sense with one another; sizes are safe to use afterwards.
// Before anything is computed from them. The products fit 64 bits, as each factor is bounded first.
bool IsSound(const Head& head) {
  if (head.virtual_shard >= kNumVirtualShards || head.num_rows == 0) return false;
  if (head.has_scalar > 1 || head.embedding_type != 0 || head.reserved != 0) return false;
  const bool is_removal = head.kind == static_cast<uint8_t>(BlockKind::kRemovals);
  if (is_removal && (head.dim != 0 || head.state_floats != 0 || head.has_scalar != 0)) return false;
  if (!is_removal && (head.kind != static_cast<uint8_t>(BlockKind::kRows) || head.dim == 0 ||
                      head.dim > kMaxDim || head.state_floats > 4 * kMaxDim)) {
    return false;
  }
  return head.columns_bytes <= kMaxColumnsBytes &&
         head.columns_bytes == head.num_rows * head.row_bytes();
}

}  // namespace

void BlockEncoder::Free::operator()(ZSTD_CCtx_s* context) const { ZSTD_freeCCtx(context); }

Status BlockEncoder::Encode(const BlockRows& rows, std::vector<std::byte>* out) {
  if (context_ == nullptr) context_.reset(ZSTD_createCCtx());
  if (context_ == nullptr) return ResourceExhausted("no memory to compress rows");
  const BlockShape& shape = rows.shape;
  Head head;
  head.kind = static_cast<uint8_t>(shape.kind);
  head.optimizer = static_cast<uint8_t>(shape.optimizer);
  head.virtual_shard = shape.virtual_shard;
  head.dim = shape.dim;
  head.state_floats = shape.state_floats;
  head.has_scalar = shape.has_scalar ? 1 : 0;
  head.num_rows = static_cast<uint32_t>(rows.signs.size());
  head.columns_bytes = head.num_rows * head.row_bytes();
  columns_.resize(head.columns_bytes);
  PutColumns(rows, columns_.data());

  const size_t begin = out->size();
  out->resize(begin + sizeof(head) + ZSTD_compressBound(columns_.size()));
  const size_t compressed = ZSTD_compressCCtx(context_.get(), out->data() + begin + sizeof(head),
                                              out->size() - begin - sizeof(head), columns_.data(),
                                              columns_.size(), kCompressionLevel);
  if (ZSTD_isError(compressed) != 0) {
    return Internal("rows could not be compressed: ", ZSTD_getErrorName(compressed));
  }
  head.payload_bytes = static_cast<uint32_t>(compressed);
  const size_t end = begin + sizeof(head) + compressed;
  out->resize(begin + head.padded_bytes());
  // Defined bytes, as the checksum covers them.
  std::memset(out->data() + end, 0, out->size() - end);
  std::memcpy(out->data() + begin, &head, sizeof(head));
  const uint64_t checksum = Checksum(std::span(*out).subspan(begin), kChecksumOffset);
  std::memcpy(out->data() + begin + kChecksumOffset, &checksum, sizeof(checksum));
  return Status::Ok();
}

Status BlockDecoder::Next(BlockRows* rows) {
  const std::string name = "block " + std::to_string(number_++) + " of the chunk";
  Head head;
  if (rest_.size() < sizeof(head)) {
    return Corruption(name, " is cut off after ", rest_.size(), " bytes");
  }
  std::memcpy(&head, rest_.data(), sizeof(head));
  if (head.magic != kMagic) {
    return Corruption(name,
                      " does not begin like a block of a persia checkpoint: give whole "
                      "blocks, from the offsets of the footer");
  }
  PERSIA_RETURN_IF_ERROR(CheckVersion(head.version, name.c_str()));
  if (head.padded_bytes() > rest_.size()) {
    return Corruption(name, " has ", head.padded_bytes(), " bytes, but ", rest_.size(),
                      " are left of the chunk");
  }
  const auto block = rest_.first(head.padded_bytes());
  if (head.checksum != Checksum(block, kChecksumOffset)) {
    return Corruption(name, " (virtual shard ", head.virtual_shard,
                      ") has another checksum than its bytes: the file was damaged; use another "
                      "copy or an older checkpoint");
  }
  // After the checksum: what is unsound then was written so, and is not damage.
  if (!IsSound(head)) return Corruption(name, " contradicts itself: ", Describe(head));
  columns_.resize(head.columns_bytes);
  // Fails rather than writes beyond the columns, whatever the payload is.
  const size_t size = ZSTD_decompress(columns_.data(), columns_.size(), block.data() + sizeof(head),
                                      head.payload_bytes);
  if (ZSTD_isError(size) != 0 || size != columns_.size()) {
    return Corruption(name, " does not decompress to its columns: ", Describe(head));
  }
  rows->shape = {.kind = static_cast<BlockKind>(head.kind),
                 .optimizer = static_cast<OptimizerKind>(head.optimizer),
                 .virtual_shard = head.virtual_shard,
                 .dim = head.dim,
                 .state_floats = head.state_floats,
                 .has_scalar = head.has_scalar != 0};
  TakeColumns(head, columns_.data(), rows);
  for (const uint64_t sign : rows->signs) {
    if (VirtualShard(SignHash(sign)) == head.virtual_shard) continue;
    return Corruption(name, " has sign ", sign, ", which does not belong to ", "its virtual shard ",
                      head.virtual_shard);
  }
  rest_ = rest_.subspan(block.size());
  return Status::Ok();
}

uint64_t ChecksumOfBlock(std::span<const std::byte> block) {
  uint64_t checksum = 0;
  std::memcpy(&checksum, block.data() + kChecksumOffset, sizeof(checksum));
  return checksum;
}

}  // namespace persia::checkpoint
