#include "checkpoint/file_format.h"

// All of the library is in its header.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/hash.h"

namespace persia::checkpoint {
namespace {

constexpr uint64_t Magic(std::string_view text) {
  uint64_t magic = 0;
  for (size_t i = 0; i < sizeof(magic); ++i) {
    magic |= uint64_t{static_cast<unsigned char>(text[i])} << (8 * i);
  }
  return magic;
}

// Little-endian, like all numbers of the file: readable in a hex dump.
constexpr uint64_t kHeaderMagic = Magic("PERSIACK");
constexpr uint64_t kFooterMagic = Magic("PERSIAFT");
constexpr uint64_t kTrailerMagic = Magic("PERSIAND");

// Sizes, and offsets of checksums within their sections, as docs/checkpoint_format.md has them.
constexpr size_t kHeaderFixedBytes = 64;
constexpr size_t kHeaderChecksum = 16;
constexpr uint32_t kMaxHeaderBytes = 1 << 16;
constexpr size_t kFooterFixedBytes = 40;
constexpr size_t kFooterChecksum = 16;
constexpr size_t kTrailerChecksum = 24;
static_assert(sizeof(BlockEntry) == 32);

void PutChecksum(std::vector<std::byte>* section, size_t offset) {
  const uint64_t checksum = Checksum(*section, offset);
  std::memcpy(section->data() + offset, &checksum, sizeof(checksum));
}

// After the version: another version may have its checksum elsewhere.
Status CheckChecksum(std::span<const std::byte> section, size_t offset, const char* what) {
  uint64_t stored = 0;
  std::memcpy(&stored, section.data() + offset, sizeof(stored));
  if (stored == Checksum(section, offset)) return Status::Ok();
  return Corruption(std::string(what) +
                    " of the checkpoint file has another checksum than its bytes: the file was "
                    "damaged or cut off; use another copy or an older checkpoint");
}

Status CheckStart(std::span<const std::byte> bytes, size_t min_bytes, uint64_t magic,
                  const char* what) {
  uint64_t found = 0;
  if (bytes.size() >= sizeof(found)) std::memcpy(&found, bytes.data(), sizeof(found));
  if (bytes.size() >= min_bytes && found == magic) return Status::Ok();
  return Corruption(std::string("these ") + std::to_string(bytes.size()) + " bytes are not " +
                    what + " of a persia checkpoint file: it was cut off, or is another file");
}

}  // namespace

uint64_t Checksum(std::span<const std::byte> section, size_t checksum_offset) {
  const auto behind = section.subspan(checksum_offset + sizeof(uint64_t));
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, section.data(), checksum_offset);
  XXH3_64bits_update(&state, behind.data(), behind.size());
  return XXH3_64bits_digest(&state);
}

Status CheckVersion(uint32_t version, const char* what) {
  if (version == kFormatVersion) return Status::Ok();
  return Corruption(std::string(what) + " of the checkpoint file has format version " +
                    std::to_string(version) + "; this persia reads version " +
                    std::to_string(kFormatVersion) +
                    (version > kFormatVersion ? ": use a newer persia" : ""));
}

std::vector<std::byte> EncodeHeader(const FileHeader& header) {
  std::vector<std::byte> config;
  if (header.config.has_value()) config = header.config->Encode();
  const size_t config_end = kHeaderFixedBytes + config.size();
  ByteWriter writer;
  writer.Put(kHeaderMagic);
  writer.Put(kFormatVersion);
  writer.Put(static_cast<uint32_t>((config_end + 7) / 8 * 8));
  writer.Put(uint64_t{0});
  writer.Put(header.step);
  writer.Put(header.num_rows);
  for (uint32_t value :
       {header.part, header.num_parts, header.replica_index, header.replica_size,
        static_cast<uint32_t>(header.kind), static_cast<uint32_t>(config.size())}) {
    writer.Put(value);
  }
  writer.PutArray(std::span<const std::byte>(config));
  std::vector<std::byte> bytes = writer.Release();
  PutChecksum(&bytes, kHeaderChecksum);
  return bytes;
}

StatusOr<FileHeader> DecodeHeader(std::span<const std::byte> bytes) {
  PERSIA_RETURN_IF_ERROR(CheckStart(bytes, kHeaderFixedBytes, kHeaderMagic, "the header"));
  ByteReader reader(bytes);
  reader.Get<uint64_t>();
  PERSIA_RETURN_IF_ERROR(CheckVersion(reader.Get<uint32_t>(), "the header"));
  FileHeader header;
  header.header_bytes = reader.Get<uint32_t>();
  // Before anything is read at an offset that depends on it.
  if (header.header_bytes < kHeaderFixedBytes || header.header_bytes > kMaxHeaderBytes ||
      header.header_bytes > bytes.size()) {
    return Corruption("the header of the checkpoint file says that it has " +
                      std::to_string(header.header_bytes) + " bytes; given are the first " +
                      std::to_string(bytes.size()) + " of the file");
  }
  PERSIA_RETURN_IF_ERROR(
      CheckChecksum(bytes.first(header.header_bytes), kHeaderChecksum, "the header"));
  reader.Get<uint64_t>();
  header.step = reader.Get<uint64_t>();
  header.num_rows = reader.Get<uint64_t>();
  for (uint32_t* value :
       {&header.part, &header.num_parts, &header.replica_index, &header.replica_size}) {
    *value = reader.Get<uint32_t>();
  }
  const auto kind = reader.Get<uint32_t>();
  if (kind > static_cast<uint32_t>(FileKind::kChangesFromNothing)) {
    return Corruption("the header of the checkpoint file has kind " + std::to_string(kind) +
                      "; known are 0 (rows), 1 (changes) and 2 (changes from nothing)");
  }
  header.kind = static_cast<FileKind>(kind);
  const auto config_bytes = reader.Get<uint32_t>();
  if (config_bytes > header.header_bytes - kHeaderFixedBytes) {
    return Corruption("the header of the checkpoint file has a train config of " +
                      std::to_string(config_bytes) + " bytes, beyond its own end");
  }
  // A store that was never configured has no rows, and its file no config.
  if (config_bytes == 0) return header;
  auto config = TrainConfig::Decode(bytes.subspan(kHeaderFixedBytes, config_bytes));
  if (!config.ok()) return config.status();
  header.config = std::move(config).value();
  return header;
}

std::vector<std::byte> EncodeFooter(std::span<const BlockEntry> blocks) {
  uint64_t num_rows = 0;
  for (const BlockEntry& block : blocks) num_rows += block.num_rows;
  ByteWriter writer;
  writer.Put(kFooterMagic);
  writer.Put(kFormatVersion);
  writer.Put(uint32_t{0});
  writer.Put(uint64_t{0});
  writer.Put(uint64_t{blocks.size()});
  writer.Put(num_rows);
  writer.PutArray(blocks);
  std::vector<std::byte> bytes = writer.Release();
  PutChecksum(&bytes, kFooterChecksum);
  return bytes;
}

// Blocks must follow one another: loaders read them in long chunks.
StatusOr<std::span<const BlockEntry>> DecodeFooter(std::span<const std::byte> bytes) {
  PERSIA_RETURN_IF_ERROR(CheckStart(bytes, kFooterFixedBytes, kFooterMagic, "the footer"));
  ByteReader reader(bytes);
  reader.Get<uint64_t>();
  PERSIA_RETURN_IF_ERROR(CheckVersion(reader.Get<uint32_t>(), "the footer"));
  PERSIA_RETURN_IF_ERROR(CheckChecksum(bytes, kFooterChecksum, "the footer"));
  reader.Get<uint32_t>();
  reader.Get<uint64_t>();
  const auto num_blocks = reader.Get<uint64_t>();
  const auto num_rows = reader.Get<uint64_t>();
  const auto blocks = reader.GetArray<BlockEntry>(num_blocks);
  if (!reader.ok() || reader.remaining() != 0) {
    return Corruption("the footer of the checkpoint file says that it has " +
                      std::to_string(num_blocks) + " blocks, but is " +
                      std::to_string(bytes.size()) + " bytes long");
  }
  uint64_t sum = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const BlockEntry& block = blocks[i];
    sum += block.num_rows;
    const bool follows = i == 0 || (block.offset == blocks[i - 1].offset + blocks[i - 1].length);
    // The last condition keeps sums of offset and length from overflowing in callers.
    if (follows && block.virtual_shard < kNumVirtualShards &&
        block.length <= UINT64_MAX - block.offset) {
      continue;
    }
    return Corruption("the footer of the checkpoint file has a wrong entry for block " +
                      std::to_string(i) + ": virtual shard " + std::to_string(block.virtual_shard) +
                      ", offset " + std::to_string(block.offset) + ", length " +
                      std::to_string(block.length));
  }
  if (sum == num_rows) return blocks;
  return Corruption("the footer of the checkpoint file says that there are " +
                    std::to_string(num_rows) + " rows, but its blocks have " + std::to_string(sum));
}

std::vector<std::byte> EncodeTrailer(FooterPlace footer, uint64_t num_rows) {
  ByteWriter writer;
  writer.Put(footer.offset);
  writer.Put(footer.length);
  writer.Put(num_rows);
  writer.Put(uint64_t{0});
  writer.Put(kFormatVersion);
  writer.Put(uint32_t{0});
  writer.Put(kTrailerMagic);
  std::vector<std::byte> bytes = writer.Release();
  PutChecksum(&bytes, kTrailerChecksum);
  return bytes;
}

// The magic is at the very end, so that a file that was cut off is recognised as such.
StatusOr<FooterPlace> DecodeTrailer(std::span<const std::byte> bytes) {
  if (bytes.size() != kTrailerBytes) {
    return Corruption("the trailer of a checkpoint file has " + std::to_string(kTrailerBytes) +
                      " bytes; given are " + std::to_string(bytes.size()));
  }
  PERSIA_RETURN_IF_ERROR(CheckStart(bytes.subspan(kTrailerBytes - sizeof(kTrailerMagic)),
                                    sizeof(kTrailerMagic), kTrailerMagic, "the end"));
  ByteReader reader(bytes);
  const FooterPlace footer{reader.Get<uint64_t>(), reader.Get<uint64_t>()};
  reader.Get<uint64_t>();
  reader.Get<uint64_t>();
  PERSIA_RETURN_IF_ERROR(CheckVersion(reader.Get<uint32_t>(), "the trailer"));
  PERSIA_RETURN_IF_ERROR(CheckChecksum(bytes, kTrailerChecksum, "the trailer"));
  return footer;
}

}  // namespace persia::checkpoint
