#include "pool/pool_header.h"

#include <bit>
#include <cstring>
#include <random>
#include <span>

// All of the library is in its header.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace persia::pool {
namespace {

constexpr uint64_t kMagic = 0x4c4f4f5041535250;        // "PRSAPOOL"
constexpr uint64_t kExtentMagic = 0x544e545841535250;  // "PRSAXTNT"
constexpr uint32_t kFormatVersion = 3;

static_assert(std::endian::native == std::endian::little, "pools are used in place");

// A copy of the header as the file has it. Unused bytes are zero and checked like all others.
struct Copy {
  uint64_t magic;
  uint32_t format_version;
  uint32_t schema_bytes;
  uint64_t check;  // of what follows
  PoolState state;
  char schema[PoolHeader::kMaxSchemaBytes];
  char unused[PoolHeader::kCopyBytes - 10 * sizeof(uint64_t) - PoolHeader::kMaxSchemaBytes];
};
static_assert(sizeof(Copy) == PoolHeader::kCopyBytes);

constexpr size_t kCheckedFrom = offsetof(Copy, state);

// The length of the schema stands before the checked bytes, so it is the seed.
uint64_t CheckOf(const Copy& copy) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&copy);
  return XXH3_64bits_withSeed(bytes + kCheckedFrom, sizeof(Copy) - kCheckedFrom, copy.schema_bytes);
}

// The version before the checksum: another version may compute it otherwise.
StatusOr<PoolHeader> Decode(const Copy& copy) {
  if (copy.magic != kMagic) return Corruption("the file is no pool of persia");
  if (copy.format_version != kFormatVersion) {
    return FailedPrecondition("the pool has format version ", copy.format_version,
                              ", and this build reads version ", kFormatVersion,
                              "; export it to a checkpoint with the build that wrote it");
  }
  if (copy.check != CheckOf(copy) || copy.schema_bytes > PoolHeader::kMaxSchemaBytes) {
    return Corruption("the pool's header is damaged; remove the pool and load a checkpoint");
  }
  return PoolHeader{copy.state, std::string(copy.schema, copy.schema_bytes)};
}

StatusOr<PoolHeader> ReadCopy(const Backing& backing, uint64_t number) {
  Copy copy;
  PERSIA_RETURN_IF_ERROR(
      backing.Read(number * PoolHeader::kCopyBytes, std::as_writable_bytes(std::span(&copy, 1))));
  return Decode(copy);
}

// The header of an extent as the file has it.
struct Extent {
  uint64_t magic;
  uint64_t cell_bytes;
  uint64_t id;
  uint64_t check;
  uint64_t unused[4];
};
static_assert(sizeof(Extent) == ExtentHeader::kBytes);

// The filling and the place are the seed: neither a header of cleared rows nor one that was copied
// to another place of the file is valid.
uint64_t CheckOf(const Extent& extent, uint64_t filling_id, uint64_t offset) {
  return XXH3_64bits_withSeed(&extent, offsetof(Extent, check), filling_id ^ offset);
}

}  // namespace

StatusOr<PoolHeader> ReadHeader(const Backing& backing) {
  if (backing.size() < PoolHeader::kBytes) {
    return Corruption("a pool has at least ", PoolHeader::kBytes, " bytes, and this file has ",
                      backing.size());
  }
  auto first = ReadCopy(backing, 0);
  auto second = ReadCopy(backing, 1);
  if (first.ok() && second.ok()) return first->sequence > second->sequence ? first : second;
  if (first.ok()) return first;
  if (second.ok()) return second;
  // A copy that is only half there may seem to be of another version: not if the other is whole.
  return first.status().code() == StatusCode::kFailedPrecondition ? first : second;
}

Status WriteHeader(PoolHeader* header, Backing* backing) {
  ++header->sequence;
  Copy copy{};
  copy.magic = kMagic;
  copy.format_version = kFormatVersion;
  copy.schema_bytes = static_cast<uint32_t>(header->schema.size());
  copy.state = *header;
  std::memcpy(copy.schema, header->schema.data(), header->schema.size());
  copy.check = CheckOf(copy);
  PERSIA_RETURN_IF_ERROR(backing->Write(header->sequence % 2 * PoolHeader::kCopyBytes,
                                        std::as_bytes(std::span(&copy, 1))));
  backing->Drain();
  return Status::Ok();
}

// Less would void extents that have rows.
Status RaiseSize(uint64_t size_bytes, PoolHeader* header) {
  if (size_bytes < header->size_bytes) {
    return InvalidArgument("size_bytes is ", size_bytes, ", and the pool was made with ",
                           header->size_bytes, "; pools only grow");
  }
  header->size_bytes = size_bytes;
  return Status::Ok();
}

uint64_t DrawId() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

Status WriteExtentHeader(uint64_t filling_id, uint64_t offset, const ExtentHeader& header,
                         Backing* backing) {
  Extent extent{.magic = kExtentMagic,
                .cell_bytes = header.cell_bytes,
                .id = header.id,
                .check = 0,
                .unused = {}};
  extent.check = CheckOf(extent, filling_id, offset);
  PERSIA_RETURN_IF_ERROR(backing->Write(offset, std::as_bytes(std::span(&extent, 1))));
  backing->Drain();
  return Status::Ok();
}

StatusOr<std::optional<ExtentHeader>> ReadExtentHeader(uint64_t filling_id, uint64_t offset,
                                                       const Backing& backing) {
  Extent extent;
  PERSIA_RETURN_IF_ERROR(backing.Read(offset, std::as_writable_bytes(std::span(&extent, 1))));
  if (extent.magic != kExtentMagic || extent.check != CheckOf(extent, filling_id, offset)) {
    return std::optional<ExtentHeader>();
  }
  return std::optional(ExtentHeader{static_cast<uint32_t>(extent.cell_bytes), extent.id});
}

}  // namespace persia::pool
