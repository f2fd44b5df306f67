// LookupPlan: what a batch asks of each server, and where every sign's row will be in the answers.
//
// Made once when a batch is looked up, used for the lookup, for pooling and
// for the gradients. IDs are deduplicated per feature group; signs are
// numbered over the whole batch, group after group, each group in the order
// of first appearance, so that the same batch always gives the same requests.
//
// Rows are used where the servers' answers lie. Within a server's answer they follow one another in
// the order of the numbers, so that a walk over the signs finds them all: see LocateRows().
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/placement.h"
#include "base/status.h"
#include "worker/bags.h"
#include "worker/row_service.h"
#include "worker/slot_table.h"
#include "worker/unique_keys.h"

namespace persia::worker {

// Views of the batch's bytes.
struct Feature {
  const SlotConfig* slot = nullptr;
  // [batch_size + 1]; sample s has ids[offsets[s] .. offsets[s + 1]).
  std::span<const uint32_t> offsets;
  std::span<const uint64_t> ids;
  std::span<const float> weights = {};  // one an ID; empty: all 1
  // Not empty: `ids` are distinct, and ID i is ids[numbers[i]]. The loader has numbered them.
  std::span<const uint32_t> numbers = {};

  size_t num_ids() const { return numbers.empty() ? ids.size() : numbers.size(); }
};

// Owns the bytes of a registered batch and its IDs, and is dropped once its plan is made.
// Move-only; the features are views of both, which a move leaves where they are.
class FeatureBatch {
 public:
  // `slots` must outlive the batch. Fails as DecodeIdFeatures does, and with kInvalidArgument on an
  // unknown feature, on weights for a raw slot or on more IDs than a batch can have.
  static StatusOr<FeatureBatch> Decode(Buffer bytes, const SlotTable& slots);

  uint32_t batch_size() const { return batch_size_; }
  std::span<const Feature> features() const { return features_; }
  // Of the message, and of the IDs that it has in fewer bytes.
  size_t size_bytes() const { return size_bytes_; }

 private:
  Buffer bytes_;
  std::vector<std::shared_ptr<const void>> ids_;
  size_t size_bytes_ = 0;
  uint32_t batch_size_ = 0;
  std::vector<Feature> features_;
};

// One feature of the batch. An *item* is what signs are summed for: in a pooled slot an ID, in a
// raw slot a distinct ID. Each item has num_buckets() signs, one after the other.
struct PlannedFeature {
  const SlotConfig* slot = nullptr;
  uint32_t group = 0;  // into LookupPlan::groups
  // [batch_size + 1], in IDs: all of the sample's, also those dropped.
  // Kept by value: the batch's bytes, which the decoded offsets view, are freed once the plan is
  // made.
  std::vector<uint32_t> offsets;
  bool has_one_id_each = false;        // every sample has exactly one ID
  std::vector<uint32_t> sign_numbers;  // [items x num_buckets]
  std::vector<uint32_t> index;         // raw: [batch_size x sample_fixed_size], 0 or 1 + item
  std::vector<float> weights;          // one an ID of a pooled slot; empty: all 1

  uint32_t num_items() const {
    return static_cast<uint32_t>(sign_numbers.size() / slot->num_buckets());
  }
  // Rows of the slot in the embeddings and in the gradients; a raw slot's row 0 is padding.
  uint32_t num_rows() const {
    return slot->embedding_summation ? static_cast<uint32_t>(offsets.size() - 1) : num_items() + 1;
  }
  // The samples of a pooled slot, the items of a raw one without its padding row. Views of this.
  Bags bags() const;
};

// A feature group of the batch: slots that share rows, and so share signs.
struct PlannedGroup {
  uint32_t dim = 0;
  uint32_t num_signs = 0;
  uint32_t mode = 0;
  uint32_t first_number = 0;  // its signs are numbered from here on
  uint32_t num_features = 0;
};

// Kept from the lookup to the return of the gradients: the same numbers index rows and sums.
// Nothing in it refers to a server's memory, so it survives a change of the servers
// (Reroute) and a repeated request. It belongs to the holder of the batch's guard (batch_table.h);
// a rank with consistency="exact" makes the same plan of the same batch, for one server.
struct LookupPlan {
  uint32_t batch_size = 0;
  std::vector<PlannedFeature> features;  // in the batch's order
  std::vector<PlannedGroup> groups;      // in the order of their first feature
  std::vector<uint16_t> server_of;       // by sign number
  std::vector<ServerBlocks> requests;    // by server; a block for each group that has signs there
  uint64_t num_ids = 0;
  Placement placement;  // that the signs are routed by

  uint32_t num_signs() const { return static_cast<uint32_t>(server_of.size()); }
};

// Routes the plan's signs to other servers. Their numbers stay.
// For batches in flight while a job is resized: rows and gradients of the batch are indexed by the
// numbers, and must find the same signs afterwards.
void Reroute(const Placement& placement, LookupPlan* plan);

// Makes plans; keeps its memory from one to the next. Not thread-safe.
// One for each thread that plans (thread_local in EmbeddingWorker::Plan), as its tables reach the
// size of the largest batch, and clearing them costs less than making them.
class LookupPlanner {
 public:
  // `counters` of the same slots, where the batch is to be counted.
  LookupPlan Make(const FeatureBatch& batch, const SlotTable& slots, const Placement& placement,
                  SlotCounters* counters = nullptr);

 private:
  void PlanFeature(const Feature& feature, uint32_t batch_size, uint32_t first_number,
                   const SlotTable& slots, PlannedFeature* planned);
  // Makes signs of `ids`, and numbers them in their group.
  void NumberSigns(const SlotConfig& slot, std::span<const uint64_t> ids, const SlotTable& slots,
                   std::vector<uint32_t>* numbers);
  // For raw slots, whose rows are sent once for each distinct ID, and which tell by an index which
  // of them a sample has.
  std::span<const uint64_t> KeepDistinct(const Feature& feature, uint32_t batch_size,
                                         std::vector<uint32_t>* index);
  // Appends the group's signs to the requests of their servers. After its last feature: a group is
  // routed once, however many slots share it.
  void RouteGroup(const SlotConfig& leader, uint32_t num_features, LookupPlan* plan);

  UniqueKeys signs_;         // of one group
  UniqueKeys distinct_ids_;  // of one raw slot
  std::vector<uint64_t> feature_signs_;
  std::vector<uint32_t> distinct_numbers_;  // of the signs of a feature's distinct IDs
  std::vector<uint32_t> num_routed_;        // by server, of one group
};

// Which of a plan's signs a step is about; called with each sign's group and number.
struct AllSigns {
  bool operator()(const PlannedGroup& /*group*/, uint32_t /*number*/) const { return true; }
};
struct SignsOfSlots {
  SlotMask slots;
  bool operator()(const PlannedGroup& group, uint32_t /*number*/) const {
    return Includes(slots, group.mode);
  }
};

// The plan's requests, limited to the signs that `keep` returns true for. Those stay in the order
// of their numbers, so that LocateRows() with the same `keep` finds their rows.
// For a lookup of some slots, and for the rows that a rank does not hold. One walk over all signs,
// as a request must tell which dims its signs have, block by block.
template <typename Keep>
std::vector<ServerBlocks> SelectRequests(const LookupPlan& plan, Keep keep) {
  const size_t num_servers = plan.requests.size();
  std::vector<ServerBlocks> kept(num_servers);
  std::vector<size_t> next(num_servers, 0);  // into the plan's signs
  std::vector<uint32_t> num_kept(num_servers);
  for (size_t i = 0; i < num_servers; ++i) kept[i].signs.reserve(plan.requests[i].signs.size());
  uint32_t number = 0;
  for (const PlannedGroup& group : plan.groups) {
    num_kept.assign(num_servers, 0);
    for (uint32_t i = 0; i < group.num_signs; ++i, ++number) {
      const uint16_t server = plan.server_of[number];
      const uint64_t sign = plan.requests[server].signs[next[server]++];
      if (!keep(group, number)) continue;
      kept[server].signs.push_back(sign);
      ++num_kept[server];
    }
    for (size_t server = 0; server < num_servers; ++server) {
      if (num_kept[server] != 0) kept[server].blocks.push_back({group.dim, num_kept[server]});
    }
  }
  return kept;
}

// (*rows)[n] becomes the place of sign number n's row, given where each server's rows begin. Signs
// that `keep` left out of the request have no row: theirs stay null.
// Walks the signs in the order in which RouteGroup() routed them. A change of one order without the
// other would give rows of other signs, which no check would notice.
template <typename Float, typename Keep = AllSigns>
void LocateRows(const LookupPlan& plan, std::vector<Float*> begin_by_server,
                std::vector<Float*>* rows, Keep keep = {}) {
  rows->assign(plan.num_signs(), nullptr);
  uint32_t number = 0;
  for (const PlannedGroup& group : plan.groups) {
    for (uint32_t i = 0; i < group.num_signs; ++i, ++number) {
      if (!keep(group, number)) continue;
      Float*& next = begin_by_server[plan.server_of[number]];
      (*rows)[number] = next;
      next += group.dim;
    }
  }
}

}  // namespace persia::worker
