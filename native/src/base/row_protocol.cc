#include "base/row_protocol.h"

#include <bit>
#include <string>

#include "base/bytes.h"

namespace persia {
namespace {

Status Malformed(const char* message, size_t size_bytes) {
  return Corruption(std::string(message) + " of " + std::to_string(size_bytes) +
                    " bytes is truncated or has bytes left over");
}

void PutBlockHeaders(ByteWriter& writer, std::span<const RowBlockHeader> blocks) {
  writer.Put(static_cast<uint32_t>(blocks.size()));
  writer.Put(uint32_t{0});
  writer.PutArray(blocks);
}

// Structure only: on failure the reader is not ok.
RowBlocksView GetBlocks(ByteReader& reader) {
  RowBlocksView view;
  const auto num_blocks = reader.Get<uint32_t>();
  reader.Get<uint32_t>();
  view.blocks = reader.GetArray<RowBlockHeader>(num_blocks);
  uint64_t num_signs = 0;  // at most 2^32 blocks of 2^32 signs, less one each: no overflow
  for (const RowBlockHeader& block : view.blocks) num_signs += block.num_signs;
  view.signs = reader.GetArray<uint64_t>(num_signs);
  return view;
}

// Values, once the structure holds.
Status CheckDims(RowBlocksView& view) {
  for (size_t i = 0; i < view.blocks.size(); ++i) {
    const RowBlockHeader& block = view.blocks[i];
    if (block.dim == 0 || block.dim > kMaxRowDim) {
      return InvalidArgument("block " + std::to_string(i) + ": dim is " +
                             std::to_string(block.dim) + "; it must be 1 to " +
                             std::to_string(kMaxRowDim));
    }
    view.num_floats += uint64_t{block.dim} * block.num_signs;
  }
  return Status::Ok();
}

// NaN and infinities are the floats with all exponent
// bits set; counted without a branch, to vectorise.
Status CheckFinite(const char* field, std::span<const float> values) {
  constexpr uint32_t kExponent = 0x7f800000;
  uint64_t num_bad = 0;
  for (const float value : values) {
    num_bad += (std::bit_cast<uint32_t>(value) & kExponent) == kExponent;
  }
  if (num_bad == 0) return Status::Ok();
  return InvalidArgument(std::string(field) + ": " + std::to_string(num_bad) + " of " +
                         std::to_string(values.size()) +
                         " values are NaN or infinite; skip such slots before sending");
}

// `blocks`, then as many floats as they call for, then the end.
StatusOr<std::span<const float>> GetRows(ByteReader& reader, RowBlocksView& blocks,
                                         const char* message, const char* field, size_t size) {
  blocks = GetBlocks(reader);
  if (!reader.ok()) return Malformed(message, size);
  PERSIA_RETURN_IF_ERROR(CheckDims(blocks));
  const auto rows = reader.GetArray<float>(blocks.num_floats);
  if (!reader.ok() || reader.remaining() != 0) return Malformed(message, size);
  PERSIA_RETURN_IF_ERROR(CheckFinite(field, rows));
  return rows;
}

// A reply that is one fixed structure.
template <typename T>
StatusOr<T> DecodeFixed(std::span<const std::byte> body, const char* message) {
  ByteReader reader(body);
  const T value = reader.Get<T>();
  if (!reader.ok() || reader.remaining() != 0) return Malformed(message, body.size());
  return value;
}

}  // namespace

std::span<const std::byte> ArrayPadding(uint64_t size_bytes) {
  static constexpr std::byte kZeros[8] = {};
  return {kZeros, (8 - size_bytes % 8) % 8};
}

std::vector<std::byte> EncodeConfigureRequest(const TrainConfig& config, bool replace) {
  ByteWriter writer;
  writer.Put(uint8_t{replace});
  writer.Align();
  const auto encoded = config.Encode();
  writer.PutBytes(encoded.data(), encoded.size());
  return writer.Release();
}

StatusOr<ConfigureRequest> DecodeConfigureRequest(std::span<const std::byte> body) {
  constexpr size_t kHeadBytes = 8;
  if (body.size() < kHeadBytes) return Malformed("a Configure request", body.size());
  const auto replace = static_cast<uint8_t>(body[0]);
  if (replace > 1) {
    return InvalidArgument("replace is " + std::to_string(replace) + "; it must be 0 or 1");
  }
  auto config = TrainConfig::Decode(body.subspan(kHeadBytes));
  if (!config.ok()) return config.status();
  return ConfigureRequest{replace == 1, *config};
}

std::vector<std::byte> EncodeLookupHead(bool train, std::span<const RowBlockHeader> blocks) {
  ByteWriter writer;
  writer.Put(uint32_t{train ? 0u : 1u});
  writer.Put(uint32_t{0});
  PutBlockHeaders(writer, blocks);
  return writer.Release();
}

std::vector<std::byte> EncodeUpdateHead(const UpdateRowsKey& key,
                                        std::span<const RowBlockHeader> blocks) {
  ByteWriter writer;
  writer.Put(key);
  PutBlockHeaders(writer, blocks);
  return writer.Release();
}

std::vector<std::byte> EncodeSetRowsHead(std::span<const RowBlockHeader> blocks) {
  ByteWriter writer;
  PutBlockHeaders(writer, blocks);
  return writer.Release();
}

StatusOr<LookupRowsRequest> DecodeLookupRequest(std::span<const std::byte> body) {
  ByteReader reader(body);
  const auto mode = reader.Get<uint32_t>();
  reader.Get<uint32_t>();
  LookupRowsRequest request;
  request.blocks = GetBlocks(reader);
  if (!reader.ok() || reader.remaining() != 0) {
    return Malformed("a LookupRows request", body.size());
  }
  if (mode > 1) {
    return InvalidArgument("mode is " + std::to_string(mode) +
                           "; it must be 0 (train) or 1 (inference)");
  }
  request.train = mode == 0;
  PERSIA_RETURN_IF_ERROR(CheckDims(request.blocks));
  return request;
}

StatusOr<UpdateRowsRequest> DecodeUpdateRequest(std::span<const std::byte> body) {
  ByteReader reader(body);
  UpdateRowsRequest request;
  request.key = reader.Get<UpdateRowsKey>();
  auto gradients =
      GetRows(reader, request.blocks, "an UpdateRows request", "gradients", body.size());
  if (!gradients.ok()) return gradients.status();
  request.gradients = *gradients;
  return request;
}

StatusOr<SetRowsRequest> DecodeSetRowsRequest(std::span<const std::byte> body) {
  ByteReader reader(body);
  SetRowsRequest request;
  auto rows = GetRows(reader, request.blocks, "a SetRows request", "rows", body.size());
  if (!rows.ok()) return rows.status();
  request.rows = *rows;
  return request;
}

StatusOr<PrefetchRowsRequest> DecodePrefetchRequest(std::span<const std::byte> body) {
  if (body.size() % sizeof(uint64_t) != 0) return Malformed("a PrefetchRows request", body.size());
  ByteReader reader(body);
  return PrefetchRowsRequest{reader.GetArray<uint64_t>(body.size() / sizeof(uint64_t))};
}

StatusOr<PingReply> DecodePingReply(std::span<const std::byte> body) {
  return DecodeFixed<PingReply>(body, "a Ping reply");
}

StatusOr<LookupRowsReply> DecodeLookupReply(std::span<const std::byte> body, uint64_t num_floats,
                                            std::span<const float>* rows) {
  ByteReader reader(body);
  const auto head = reader.Get<LookupRowsReply>();
  *rows = reader.GetArray<float>(num_floats);
  if (!reader.ok() || reader.remaining() != 0) return Malformed("a LookupRows reply", body.size());
  return head;
}

StatusOr<UpdateRowsReply> DecodeUpdateReply(std::span<const std::byte> body) {
  return DecodeFixed<UpdateRowsReply>(body, "an UpdateRows reply");
}

StatusOr<PrefetchRowsReply> DecodePrefetchReply(std::span<const std::byte> body) {
  return DecodeFixed<PrefetchRowsReply>(body, "a PrefetchRows reply");
}

}  // namespace persia
