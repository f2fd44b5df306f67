#include "base/row_protocol.h"

#include <bit>
#include <random>
#include <string>
#include <utility>

#include "base/bytes.h"

namespace persia {
namespace {

Status Truncated(size_t size_bytes) {
  return Corruption("its ", size_bytes, " bytes are truncated or have bytes left over");
}

// The head, and behind it the blocks' signs from where they lie.
Segments WithBlocks(ByteWriter head, const SignBlocks& blocks) {
  head.Put(static_cast<uint32_t>(blocks.blocks.size()));
  head.Put(uint32_t{0});
  head.PutArray(blocks.blocks);
  Segments segments;
  segments.AddOwned(head.Release());
  segments.AddView(std::as_bytes(blocks.signs));
  return segments;
}

// Checks the structure only: on failure the reader is not ok.
// The views point into the reader's bytes. Block counts are checked by the size of the array that
// they announce, before anything is added up.
SignBlocks GetBlocks(ByteReader& reader) {
  SignBlocks view;
  const auto num_blocks = reader.Get<uint32_t>();
  reader.Get<uint32_t>();
  view.blocks = reader.GetArray<SignBlock>(num_blocks);
  uint64_t num_signs = 0;  // at most 2^32 blocks of 2^32 signs, less one each: no overflow
  for (const SignBlock& block : view.blocks) num_signs += block.num_signs;
  view.signs = reader.GetArray<uint64_t>(num_signs);
  return view;
}

// Checks the values, once the structure holds.
Status CheckDims(const SignBlocks& view) {
  for (size_t i = 0; i < view.blocks.size(); ++i) {
    const uint32_t dim = view.blocks[i].dim;
    if (dim > 0 && dim <= kMaxRowDim) continue;
    return InvalidArgument("block ", i, ": dim is ", dim, "; it must be 1 to ", kMaxRowDim);
  }
  return Status::Ok();
}

// NaN and infinities are the floats with all exponent bits set; counted without a branch, so that
// the loop is vectorised.
Status CheckFinite(const char* field, std::span<const float> values) {
  constexpr uint32_t kExponent = 0x7f800000;
  uint64_t num_bad = 0;
  for (const float value : values) {
    num_bad += (std::bit_cast<uint32_t>(value) & kExponent) == kExponent;
  }
  if (num_bad == 0) return Status::Ok();
  return InvalidArgument(field, ": ", num_bad, " of ", values.size(),
                         " values are NaN or infinite; skip such slots before sending");
}

// Reads `blocks`, then as many floats as they call for, then the end.
Status GetRows(ByteReader& reader, const char* field, size_t size_bytes, SignBlocks* blocks,
               std::span<const float>* rows) {
  *blocks = GetBlocks(reader);
  if (!reader.ok()) return Truncated(size_bytes);
  PERSIA_RETURN_IF_ERROR(CheckDims(*blocks));
  *rows = reader.GetArray<float>(blocks->num_floats());
  if (!reader.ok() || reader.remaining() != 0) return Truncated(size_bytes);
  return CheckFinite(field, *rows);
}

}  // namespace

uint64_t DrawIncarnation() {
  // From the system: two servers that start at the same moment must not draw the same number.
  std::random_device device;
  uint64_t incarnation = 0;
  while (incarnation == 0) incarnation = (uint64_t{device()} << 32) | device();
  return incarnation;
}

Segments ConfigureRequest::Encode() && {
  ByteWriter writer;
  writer.Put(uint8_t{replace});
  writer.Align();
  const auto encoded = config.Encode();
  writer.PutBytes(encoded.data(), encoded.size());
  Segments segments;
  segments.AddOwned(writer.Release());
  return segments;
}

StatusOr<ConfigureRequest> ConfigureRequest::Decode(std::span<const std::byte> body) {
  constexpr size_t kHeadBytes = 8;
  if (body.size() < kHeadBytes) return Truncated(body.size());
  // The seven bytes behind it are reserved, and ignored: the config begins at a multiple of 8.
  const auto replace = static_cast<uint8_t>(body[0]);
  if (replace > 1) {
    return InvalidArgument("replace is ", replace, "; it must be 0 or 1");
  }
  PERSIA_ASSIGN_OR_RETURN(TrainConfig config, TrainConfig::Decode(body.subspan(kHeadBytes)));
  return ConfigureRequest{std::move(config), replace == 1};
}

Segments ReplicateRequest::Encode() && {
  ByteWriter head;
  head.Put(primary);
  head.Put(standby);
  head.Put(kind);
  head.Put(method);
  head.Put(number);
  Segments segments;
  segments.AddOwned(head.Release());
  segments.AddView(body);
  return segments;
}

StatusOr<ReplicateRequest> ReplicateRequest::Decode(std::span<const std::byte> body) {
  ByteReader reader(body);
  ReplicateRequest request;
  request.primary = reader.Get<uint64_t>();
  request.standby = reader.Get<uint64_t>();
  const auto kind = reader.Get<uint32_t>();
  request.method = reader.Get<uint32_t>();
  request.number = reader.Get<uint64_t>();
  if (!reader.ok()) return Truncated(body.size());
  if (kind > static_cast<uint32_t>(ReplicateKind::kCopyEnd)) {
    return InvalidArgument("kind is ", kind, "; it must be below 6");
  }
  if (request.method > 255) {
    return InvalidArgument("method is ", request.method, "; it must be below 256");
  }
  request.kind = static_cast<ReplicateKind>(kind);
  request.body = body.last(reader.remaining());
  return request;
}

Segments LookupRowsRequest::Encode() && {
  ByteWriter head;
  head.Put(uint32_t{train ? 0u : 1u});
  head.Put(uint32_t{0});
  return WithBlocks(std::move(head), blocks);
}

StatusOr<LookupRowsRequest> LookupRowsRequest::Decode(std::span<const std::byte> body) {
  ByteReader reader(body);
  const auto mode = reader.Get<uint32_t>();
  reader.Get<uint32_t>();
  const SignBlocks blocks = GetBlocks(reader);
  if (!reader.ok() || reader.remaining() != 0) return Truncated(body.size());
  if (mode > 1) {
    return InvalidArgument("mode is ", mode, "; it must be 0 (train) or 1 (inference)");
  }
  PERSIA_RETURN_IF_ERROR(CheckDims(blocks));
  return LookupRowsRequest{mode == 0, blocks};
}

Segments ServerRows::Encode() && {
  ByteWriter head;
  head.Put(stamp);
  head.Put(uint64_t{rows.size()});
  Segments segments;
  segments.AddOwned(head.Release());
  segments.AddArray(rows);
  // The rows are sent from here, after the handler has returned.
  segments.owned.push_back(std::make_shared<const Buffer>(std::move(storage)));
  return segments;
}

StatusOr<ServerRows> ServerRows::Decode(Buffer body) {
  ServerRows answer;
  ByteReader reader(std::as_const(body).span());
  answer.stamp = reader.Get<LookupStamp>();
  const auto num_floats = reader.Get<uint64_t>();
  answer.rows = reader.GetArray<float>(num_floats);
  if (!reader.ok() || reader.remaining() != 0) return Truncated(body.size());
  answer.storage = std::move(body);  // its bytes stay where they are
  return answer;
}

Segments UpdateRowsRequest::Encode() && {
  ByteWriter head;
  head.Put(key);
  head.Put(lookup);
  Segments segments = WithBlocks(std::move(head), blocks);
  segments.AddArray(gradients);
  return segments;
}

// Checked whole before the store sees any of it: an update with an infinity in it would spoil rows
// for good.
StatusOr<UpdateRowsRequest> UpdateRowsRequest::Decode(std::span<const std::byte> body) {
  ByteReader reader(body);
  UpdateRowsRequest request;
  request.key = reader.Get<BatchKey>();
  request.lookup = reader.Get<LookupStamp>();
  PERSIA_RETURN_IF_ERROR(
      GetRows(reader, "gradients", body.size(), &request.blocks, &request.gradients));
  return request;
}

Segments SetRowsRequest::Encode() && {
  Segments segments = WithBlocks(ByteWriter(), blocks);
  segments.AddArray(rows);
  return segments;
}

StatusOr<SetRowsRequest> SetRowsRequest::Decode(std::span<const std::byte> body) {
  ByteReader reader(body);
  SetRowsRequest request;
  PERSIA_RETURN_IF_ERROR(GetRows(reader, "rows", body.size(), &request.blocks, &request.rows));
  return request;
}

}  // namespace persia
