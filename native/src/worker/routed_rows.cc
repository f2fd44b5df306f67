#include "worker/routed_rows.h"

#include <string>

#include "base/hash.h"

namespace persia::worker {

namespace {

Status CheckCounts(std::span<const ServerBlocks::Block> blocks, size_t num_signs,
                   size_t num_floats) {
  uint64_t signs = 0;
  uint64_t floats = 0;
  for (const ServerBlocks::Block& block : blocks) {
    signs += block.num_signs;
    floats += uint64_t{block.dim} * block.num_signs;
  }
  if (signs == num_signs && floats == num_floats) return Status::Ok();
  return InvalidArgument("blocks of " + std::to_string(signs) + " signs and " +
                         std::to_string(floats) + " floats came with " + std::to_string(num_signs) +
                         " signs and " + std::to_string(num_floats) + " floats");
}

}  // namespace

StatusOr<RoutedRows> RouteRows(std::span<const ServerBlocks::Block> blocks,
                               std::span<const uint64_t> signs, std::span<const float> rows,
                               uint32_t num_servers) {
  PERSIA_RETURN_IF_ERROR(CheckCounts(blocks, signs.size(), rows.size()));
  RoutedRows routed;
  routed.requests.resize(num_servers);
  routed.rows.resize(num_servers);
  size_t sign = 0;
  const float* row = rows.data();
  for (const ServerBlocks::Block& block : blocks) {
    std::vector<uint32_t> num_routed(num_servers, 0);
    for (uint32_t i = 0; i < block.num_signs; ++i, ++sign, row += block.dim) {
      const uint32_t server = ServerOf(SignHash(signs[sign]), num_servers);
      routed.requests[server].signs.push_back(signs[sign]);
      routed.rows[server].insert(routed.rows[server].end(), row, row + block.dim);
      ++num_routed[server];
    }
    for (uint32_t server = 0; server < num_servers; ++server) {
      if (num_routed[server] > 0) {
        routed.requests[server].blocks.push_back({block.dim, num_routed[server]});
      }
    }
  }
  return routed;
}

}  // namespace persia::worker
