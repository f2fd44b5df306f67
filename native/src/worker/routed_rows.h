// RoutedRows: rows that were not looked up (pretrained ones), divided among the servers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "worker/row_service.h"

namespace persia::worker {

struct RoutedRows {
  std::vector<ServerBlocks> requests;    // by server
  std::vector<std::vector<float>> rows;  // by server
};

// Keeps the order of the signs within a server. kInvalidArgument: the counts do not agree.
StatusOr<RoutedRows> RouteRows(std::span<const ServerBlocks::Block> blocks,
                               std::span<const uint64_t> signs, std::span<const float> rows,
                               uint32_t num_servers);

}  // namespace persia::worker
