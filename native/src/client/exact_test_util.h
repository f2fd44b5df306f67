// A rank with consistency="exact" for tests: batches in flight over sockets, and the whole rows of
// servers to compare.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "client/exact_rows.h"
#include "client/test_support.h"
#include "store/whole_rows.h"

namespace persia::client::testing {

inline TrainConfig Config(OptimizerKind kind) {
  TrainConfig config;
  config.initializer.seed = 7;
  config.optimizer = kOptimizers[static_cast<size_t>(kind)].defaults;
  config.optimizer.lr = 0.05f;
  return config;
}

// Of step `step`: now and then a slot gets no gradient, or one that is not finite.
inline void Disturb(uint32_t step, Gradients* gradients) {
  if (step % 7 == 3) {
    gradients->slots[step % gradients->slots.size()] = {
        .slot = gradients->slots[step % gradients->slots.size()].slot, .skipped = true};
  }
  if (step % 11 == 5 && !gradients->rows[0].empty()) {
    gradients->rows[0][0] = std::numeric_limits<float>::infinity();
  }
}

inline std::vector<std::byte> BatchOf(uint32_t step) { return Batch(step % 9, 8 + step % 5); }

inline std::vector<Snapshot> TrainSynchronously(Cluster& cluster, uint32_t num_steps) {
  std::vector<Snapshot> history;
  for (uint32_t step = 0; step < num_steps; ++step) {
    const auto result =
        Must(cluster.client().Lookup(cluster.Register(BatchOf(step)), true, Soon()));
    history.push_back(Take(result));
    Gradients gradients(result);
    Disturb(step, &gradients);
    Must(cluster.client().ReturnGradients(result.reference, 2.0f, gradients.slots, Soon()));
  }
  return history;
}

// Every whole row of the servers, by sign.
inline std::map<uint64_t, std::vector<uint32_t>> WholeRowsOf(Cluster& cluster,
                                                             const Placement& placement) {
  std::map<uint64_t, std::vector<uint32_t>> all;
  const auto slots = Slots();
  const auto table = Must(worker::SlotTable::Create(slots.feature_index_prefix_bit, slots.slots));
  for (const worker::SlotConfig& slot : table.slots()) {
    for (uint64_t id = 0; id < 100; ++id) {
      std::vector<uint64_t> signs(slot.num_buckets());
      table.MakeSigns(slot, {&id, 1}, signs.data());
      for (const uint64_t& sign : signs) {
        const uint32_t server = placement.ServerOf(SignHash(sign));
        const store::RowBlock block{slot.dim, {&sign, 1}};
        store::LookupReport report;
        const Buffer row = Must(store::LookupWholeRows(
            {&block, 1}, &cluster.server(server).embedding_store(), &report));
        const auto* bits = reinterpret_cast<const uint32_t*>(row.data());
        all[sign] = {bits, bits + row.size() / sizeof(float)};
      }
    }
  }
  return all;
}

// A rank with `in_flight` batches between lookup and update. Lookups arrive in any order; updates
// are returned late and side by side.
class ExactRank {
 public:
  ExactRank(Cluster& cluster, RemoteClient& client, uint32_t in_flight, uint32_t num_workers)
      : cluster_(cluster), client_(client), in_flight_(in_flight), num_workers_(num_workers) {}

  static void Begin(RemoteClient& client, uint64_t max_bytes = ExactRows::kMaxBytes,
                    uint64_t spare_bytes = HeldRows::kSpareBytes) {
    const auto slots = Slots();
    auto rows = Must(
        ExactRows::Create(slots.feature_index_prefix_bit, slots.slots, 0, max_bytes, spare_bytes));
    ASSERT_TRUE(client.BeginExact(std::move(rows)).ok());
  }

  std::vector<Snapshot> Train(uint32_t num_steps) {
    std::vector<Snapshot> history;
    for (uint32_t step = 0; step < num_steps; ++step) {
      while (next_lookup_ < num_steps && next_lookup_ < num_returned_ + in_flight_) LookUp();
      const BatchReference reference = Must(lookups_.front().get()).reference;
      lookups_.pop_front();
      auto trained = std::make_unique<Step>(Must(client_.PoolExact(reference)));
      history.push_back(Take(trained->pooled));
      Disturb(step, &trained->gradients);
      EXPECT_TRUE(client_.ApplyExact(reference, 2.0f, trained->gradients.slots).ok());
      waiting_.emplace_back(reference, std::move(trained));
      // As late as the bound allows, so that lookups miss as many updates as they may.
      if (step + 1 - num_returned_ >= in_flight_) Return(1 + random_() % ((in_flight_ + 1) / 2));
    }
    while (!waiting_.empty()) Return(waiting_.size());
    return history;
  }

 private:
  struct Step {
    explicit Step(LookupResult result) : pooled(std::move(result)), gradients(pooled) {}
    LookupResult pooled;  // which has the names of the slots
    Gradients gradients;
  };

  // Every third batch comes with its lookup, as in a rank without loaders.
  void LookUp() {
    const auto bytes = BatchOf(next_lookup_);
    const bool direct = next_lookup_ % 3 == 2;
    const uint32_t worker = next_lookup_ % num_workers_;
    const BatchReference reference =
        direct ? BatchReference{{}, worker} : cluster_.Register(bytes, worker);
    lookups_.push_back(std::async(std::launch::async, [this, reference, bytes] {
      return client_.LookupWhole(reference, bytes, Soon());
    }));
    ++next_lookup_;
  }
  void Return(size_t count) {
    std::vector<std::future<StatusOr<ReturnReport>>> calls;
    for (; count > 0 && !waiting_.empty(); --count, ++num_returned_) {
      auto& [reference, step] = waiting_.front();
      calls.push_back(std::async(std::launch::async, [this, reference = reference,
                                                      step = std::shared_ptr(std::move(step))] {
        return client_.ReturnGradients(reference, 2.0f, step->gradients.slots, Soon());
      }));
      waiting_.pop_front();
    }
    for (auto& call : calls) Must(call.get());
  }

  Cluster& cluster_;
  RemoteClient& client_;
  const uint32_t in_flight_, num_workers_;
  std::mt19937 random_{17};
  uint32_t next_lookup_ = 0, num_returned_ = 0;
  std::deque<std::future<StatusOr<LookupResult>>> lookups_;
  std::deque<std::pair<BatchReference, std::unique_ptr<Step>>> waiting_;
};

// A rank that has trained one of two batches in flight; the update of the first is not sent.
struct Interrupted {
  explicit Interrupted(Cluster& cluster, uint64_t max_bytes = 0) {
    RemoteClient& client = cluster.client();
    ExactRank::Begin(client, max_bytes);
    EXPECT_TRUE(client.Configure(Config(OptimizerKind::kAdam), false, Soon()).ok());
    first = cluster.Register(BatchOf(0));
    EXPECT_TRUE(client.LookupWhole(first, BatchOf(0), Soon()).ok());
    pooled = Must(client.PoolExact(first));
    gradients = std::make_unique<Gradients>(pooled);
    EXPECT_TRUE(client.ApplyExact(first, 1.0f, gradients->slots).ok());
  }
  BatchReference first;
  LookupResult pooled;
  std::unique_ptr<Gradients> gradients;
};

}  // namespace persia::client::testing
