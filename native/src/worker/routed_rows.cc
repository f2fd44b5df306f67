#include "worker/routed_rows.h"

#include "base/hash.h"

namespace persia::worker {

RoutedRows RouteRows(const SignBlocks& blocks, const float* row, const Placement& placement) {
  const uint32_t num_servers = placement.num_servers();
  RoutedRows routed;
  routed.requests.resize(num_servers);
  routed.rows.resize(num_servers);
  size_t sign = 0;
  for (const SignBlock& block : blocks.blocks) {
    std::vector<uint32_t> num_routed(num_servers, 0);
    for (uint32_t i = 0; i < block.num_signs; ++i, ++sign, row += block.dim) {
      const uint32_t server = placement.ServerOf(SignHash(blocks.signs[sign]));
      routed.requests[server].signs.push_back(blocks.signs[sign]);
      routed.rows[server].insert(routed.rows[server].end(), row, row + block.dim);
      ++num_routed[server];
    }
    for (uint32_t server = 0; server < num_servers; ++server) {
      if (num_routed[server] == 0) continue;
      routed.requests[server].blocks.push_back({block.dim, num_routed[server]});
    }
  }
  return routed;
}

}  // namespace persia::worker
