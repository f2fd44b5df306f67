#include "checkpoint/file_format.h"

// All of the library is in its header.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

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

constexpr uint32_t kMaxHeaderBytes = 1 << 16;

// The sections' fixed parts, as docs/checkpoint_format.md has them. Members are aligned, so there
// is no padding to zero.
struct HeaderStart {
  uint64_t magic = kHeaderMagic;
  uint32_t version = kFormatVersion;
  uint32_t header_bytes = 0;  // with the config behind this and its padding
  uint64_t checksum = 0;
  uint64_t step = 0;
  uint64_t num_rows = 0;
  uint32_t part = 0;
  uint32_t num_parts = 0;
  uint32_t replica_index = 0;
  uint32_t replica_size = 0;
  uint32_t kind = 0;
  uint32_t config_bytes = 0;
};
static_assert(sizeof(HeaderStart) == 64);

struct FooterStart {
  uint64_t magic = kFooterMagic;
  uint32_t version = kFormatVersion;
  uint32_t reserved = 0;
  uint64_t checksum = 0;
  uint64_t num_blocks = 0;  // entries behind this
  uint64_t num_rows = 0;
};
static_assert(sizeof(FooterStart) == 40 && sizeof(BlockEntry) == 32);

struct Trailer {
  FooterPlace footer;
  uint64_t num_rows = 0;
  uint64_t checksum = 0;
  uint32_t version = kFormatVersion;
  uint32_t reserved = 0;
  uint64_t magic = kTrailerMagic;
};
static_assert(sizeof(Trailer) == kTrailerBytes);

// Whole words, so that blocks and footers are aligned in a file that is read or mapped as a whole.
constexpr size_t Padded(size_t num_bytes) { return (num_bytes + 7) / 8 * 8; }

// The bytes of a section: its fixed part and what follows that, with the checksum of both.
template <typename Start>
std::vector<std::byte> EncodeSection(const Start& start, std::span<const std::byte> rest) {
  std::vector<std::byte> bytes(Padded(sizeof(start) + rest.size()));
  std::memcpy(bytes.data(), &start, sizeof(start));
  if (!rest.empty()) std::memcpy(bytes.data() + sizeof(start), rest.data(), rest.size());
  const uint64_t checksum = Checksum(bytes, offsetof(Start, checksum));
  std::memcpy(bytes.data() + offsetof(Start, checksum), &checksum, sizeof(checksum));
  return bytes;
}

// After the version: another version may have its checksum elsewhere.
template <typename Start>
Status CheckChecksum(const Start& start, std::span<const std::byte> section, const char* what) {
  if (start.checksum == Checksum(section, offsetof(Start, checksum))) return Status::Ok();
  std::string message = what;
  message +=
      " of the checkpoint file has another checksum than its bytes: the file was damaged or cut "
      "off; use another copy or an older checkpoint";
  return Corruption(std::move(message));
}

// The fixed part of a section that begins with `bytes`; a magic number tells what they are.
template <typename Start>
StatusOr<Start> DecodeStart(std::span<const std::byte> bytes, const char* what) {
  constexpr uint64_t kExpected = Start{}.magic;
  Start start{};
  if (bytes.size() >= sizeof(start)) std::memcpy(&start, bytes.data(), sizeof(start));
  if (bytes.size() >= sizeof(start) && start.magic == kExpected) return start;
  return Corruption("these ", bytes.size(), " bytes are not ", what,
                    " of a persia checkpoint file: it was cut off, or is another file");
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

// Corruption and not a precondition: to the reader of the file, both mean to look for another one.
Status CheckVersion(uint32_t version, const char* what) {
  if (version == kFormatVersion) return Status::Ok();
  return Corruption(what, " of the checkpoint file has format version ", version,
                    "; this persia reads version ", kFormatVersion,
                    version > kFormatVersion ? ": use a newer persia" : "");
}

std::vector<std::byte> EncodeHeader(const FileHeader& header) {
  std::vector<std::byte> config;
  if (header.config.has_value()) config = header.config->Encode();
  const size_t header_bytes = Padded(sizeof(HeaderStart) + config.size());
  const HeaderStart start{.header_bytes = static_cast<uint32_t>(header_bytes),
                          .step = header.step,
                          .num_rows = header.num_rows,
                          .part = header.part,
                          .num_parts = header.num_parts,
                          .replica_index = header.replica_index,
                          .replica_size = header.replica_size,
                          .kind = static_cast<uint32_t>(header.kind),
                          .config_bytes = static_cast<uint32_t>(config.size())};
  return EncodeSection(start, config);
}

StatusOr<FileHeader> DecodeHeader(std::span<const std::byte> bytes) {
  PERSIA_ASSIGN_OR_RETURN(const auto start, DecodeStart<HeaderStart>(bytes, "the header"));
  PERSIA_RETURN_IF_ERROR(CheckVersion(start.version, "the header"));
  // Before anything is read at an offset that depends on it.
  if (start.header_bytes < sizeof(start) || start.header_bytes > kMaxHeaderBytes ||
      start.header_bytes > bytes.size()) {
    return Corruption("the header of the checkpoint file says that it has ", start.header_bytes,
                      " bytes; given are the first ", bytes.size(), " of the file");
  }
  PERSIA_RETURN_IF_ERROR(CheckChecksum(start, bytes.first(start.header_bytes), "the header"));
  if (start.kind > static_cast<uint32_t>(FileKind::kChangesFromNothing)) {
    return Corruption("the header of the checkpoint file has kind ", start.kind,
                      "; known are 0 (rows), 1 (changes) and 2 (changes from nothing)");
  }
  if (start.config_bytes > start.header_bytes - sizeof(start)) {
    return Corruption("the header of the checkpoint file has a train config of ",
                      start.config_bytes, " bytes, beyond its own end");
  }
  FileHeader header{.step = start.step,
                    .num_rows = start.num_rows,
                    .part = start.part,
                    .num_parts = start.num_parts,
                    .replica_index = start.replica_index,
                    .replica_size = start.replica_size,
                    .kind = static_cast<FileKind>(start.kind),
                    .config = {},
                    .header_bytes = start.header_bytes};
  // A store that was never configured has no rows, and its file no config.
  if (start.config_bytes == 0) return header;
  PERSIA_ASSIGN_OR_RETURN(header.config,
                          TrainConfig::Decode(bytes.subspan(sizeof(start), start.config_bytes)));
  return header;
}

// The sum of rows is there so that a reader of footers alone can compare it with the header.
std::vector<std::byte> EncodeFooter(std::span<const BlockEntry> blocks) {
  FooterStart start{.num_blocks = blocks.size()};
  for (const BlockEntry& block : blocks) start.num_rows += block.num_rows;
  return EncodeSection(start, std::as_bytes(blocks));
}

// Blocks must follow one another: loaders read them in long chunks.
StatusOr<std::span<const BlockEntry>> DecodeFooter(std::span<const std::byte> bytes) {
  PERSIA_ASSIGN_OR_RETURN(const auto start, DecodeStart<FooterStart>(bytes, "the footer"));
  PERSIA_RETURN_IF_ERROR(CheckVersion(start.version, "the footer"));
  PERSIA_RETURN_IF_ERROR(CheckChecksum(start, bytes, "the footer"));
  ByteReader reader(bytes.subspan(sizeof(start)));
  const auto blocks = reader.GetArray<BlockEntry>(start.num_blocks);
  if (!reader.ok() || reader.remaining() != 0) {
    return Corruption("the footer of the checkpoint file says that it has ", start.num_blocks,
                      " blocks, but is ", bytes.size(), " bytes long");
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
    return Corruption("the footer of the checkpoint file has a wrong entry for block ", i,
                      ": virtual shard ", block.virtual_shard, ", offset ", block.offset,
                      ", length ", block.length);
  }
  if (sum == start.num_rows) return blocks;
  return Corruption("the footer of the checkpoint file says that there are ", start.num_rows,
                    " rows, but its blocks have ", sum);
}

std::vector<std::byte> EncodeTrailer(FooterPlace footer, uint64_t num_rows) {
  return EncodeSection(Trailer{.footer = footer, .num_rows = num_rows}, {});
}

// The magic is at the very end, so that a file that was cut off is recognised as such.
StatusOr<FooterPlace> DecodeTrailer(std::span<const std::byte> bytes) {
  if (bytes.size() != kTrailerBytes) {
    return Corruption("the trailer of a checkpoint file has ", kTrailerBytes, " bytes; given are ",
                      bytes.size());
  }
  PERSIA_ASSIGN_OR_RETURN(const auto trailer, DecodeStart<Trailer>(bytes, "the end"));
  PERSIA_RETURN_IF_ERROR(CheckVersion(trailer.version, "the trailer"));
  PERSIA_RETURN_IF_ERROR(CheckChecksum(trailer, bytes, "the trailer"));
  return trailer.footer;
}

}  // namespace persia::checkpoint
