// RouteRows: divides rows that a caller sets (pretrained ones) among the parameter servers.
//
// A lookup needs none of this: its rows are routed by the batch's LookupPlan, which also keeps
// where each answer belongs. Rows that are set have no answer to find again, so a plan would be
// wasted.
#pragma once

#include <cstdint>
#include <vector>

#include "base/placement.h"
#include "worker/row_service.h"

namespace persia::worker {

struct RoutedRows {
  std::vector<ServerBlocks> requests;    // by server
  std::vector<std::vector<float>> rows;  // by server; one row a sign, in the order of its signs
};

// `row`: the rows of all blocks, one after the other. The order of the signs within a server is
// kept: entry i of a server's rows belongs to its sign i.
RoutedRows RouteRows(const SignBlocks& blocks, const float* row, const Placement& placement);

}  // namespace persia::worker
