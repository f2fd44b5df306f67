// Header, footer and trailer of a checkpoint file; docs/checkpoint_format.md describes the bytes.
//
// A file is header, blocks (block.h), footer, trailer. It is written in one pass, so that what is
// known only at the end stands there: the footer lists the blocks, and the trailer, of fixed size
// at the very end, says where the footer is. A reader starts with the trailer, and knows by it that
// the file was not cut off.
//
// Each section has its own checksum and version. Whatever a reader gets, decoders never read beyond
// it, and say kCorruption rather than return something that contradicts itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/train_config.h"

namespace persia::checkpoint {

inline constexpr uint32_t kFormatVersion = 1;

// What the blocks of a file are. The numbers are in files.
enum class FileKind : uint32_t {
  kRows = 0,                // all of them
  kChanges = 1,             // rows and removals since the changes before
  kChangesFromNothing = 2,  // the same, after all rows were cleared
};

// What the first bytes of a file say. All parts of a snapshot have the same but for `part`, so that
// each part can tell whether the others belong to it.
struct FileHeader {
  uint64_t step = 0;      // updates that the store had applied at the snapshot point
  uint64_t num_rows = 0;  // of the whole store; of changes, with removals
  uint32_t part = 0;
  uint32_t num_parts = 1;
  uint32_t replica_index = 0;
  uint32_t replica_size = 1;
  FileKind kind = FileKind::kRows;
  // What the rows' state means. None: the store was never configured, and the file has no rows.
  std::optional<TrainConfig> config;
  uint32_t header_bytes = 0;  // set by decoding
};

// What the footer says of a block: enough to read the blocks of some virtual shards and no others.
struct BlockEntry {
  uint32_t virtual_shard;
  uint32_t num_rows;
  uint64_t offset;  // from the start of the file
  uint64_t length;
  uint64_t checksum;
};

// In bytes from the start of the file.
struct FooterPlace {
  uint64_t offset;
  uint64_t length;
};

// Of fixed size: a reader that knows the length of a file needs two reads to find every block, also
// in an object store.
inline constexpr size_t kTrailerBytes = 48;

std::vector<std::byte> EncodeHeader(const FileHeader& header);
std::vector<std::byte> EncodeFooter(std::span<const BlockEntry> blocks);
std::vector<std::byte> EncodeTrailer(FooterPlace footer, uint64_t num_rows);

// All decoders take bytes that start at a multiple of 8. kCorruption says what is wrong with them.
//
// `bytes`: the first bytes of a file, at least the whole header.
StatusOr<FileHeader> DecodeHeader(std::span<const std::byte> bytes);
StatusOr<FooterPlace> DecodeTrailer(std::span<const std::byte> bytes);
// Checks besides that blocks follow one another. The view points into `bytes`.
StatusOr<std::span<const BlockEntry>> DecodeFooter(std::span<const std::byte> bytes);

// The checksum of a section that holds it: XXH3 (64 bits) of all but the eight bytes at
// `checksum_offset`.
// XXH3 finds what storage and networks damage. It is no protection from forgery: signatures are
// (persia/storage/signing.py).
uint64_t Checksum(std::span<const std::byte> section, size_t checksum_offset);

// kCorruption: the version is another than this build reads; `what` begins the message.
Status CheckVersion(uint32_t version, const char* what);

}  // namespace persia::checkpoint
