// Exact training against synchronous training, over sockets: with batches in flight, rows and
// optimizer state must be equal to the last bit.
#include "client/exact_rows.h"

#include <gtest/gtest.h>

#include <cmath>
#include <deque>
#include <future>
#include <limits>
#include <memory>
#include <random>

#include "client/test_support.h"
#include "store/whole_rows.h"

namespace persia::client {
namespace {

using testing::Batch;
using testing::Cluster;
using testing::Gradients;
using testing::Must;
using testing::Snapshot;
using testing::Soon;
using testing::Take;

TrainConfig Config(OptimizerKind kind) {
  TrainConfig config = testing::Adam();
  config.optimizer.kind = kind;
  return config;
}

// Of step `step`: now and then a slot gets no gradient, or one that is not finite.
void Disturb(uint32_t step, Gradients* gradients) {
  if (step % 7 == 3) {
    gradients->slots[step % gradients->slots.size()] = {
        .slot = gradients->slots[step % gradients->slots.size()].slot, .skipped = true};
  }
  if (step % 11 == 5 && !gradients->rows[0].empty()) {
    gradients->rows[0][0] = std::numeric_limits<float>::infinity();
  }
}

std::vector<std::byte> BatchOf(uint32_t step) { return Batch(step % 9, 8 + step % 5); }

std::vector<Snapshot> TrainSynchronously(Cluster& cluster, uint32_t num_steps) {
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
std::map<uint64_t, std::vector<uint32_t>> WholeRowsOf(Cluster& cluster, uint32_t num_servers) {
  std::map<uint64_t, std::vector<uint32_t>> all;
  const auto slots = testing::Slots();
  const auto table = Must(worker::SlotTable::Create(slots.feature_index_prefix_bit, slots.slots));
  for (const worker::SlotConfig& slot : table.slots()) {
    for (uint64_t id = 0; id < 100; ++id) {
      std::vector<uint64_t> signs(slot.num_buckets());
      table.MakeSigns(slot, {&id, 1}, signs.data());
      for (const uint64_t& sign : signs) {
        const uint32_t server = ServerOf(SignHash(sign), num_servers);
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

  static void Begin(RemoteClient& client) {
    const auto slots = testing::Slots();
    auto rows = Must(ExactRows::Create(slots.feature_index_prefix_bit, slots.slots, 0));
    ASSERT_TRUE(client.BeginExact(std::move(rows)).ok());
  }

  std::vector<Snapshot> Train(uint32_t num_steps) {
    std::vector<Snapshot> history;
    for (uint32_t step = 0; step < num_steps; ++step) {
      while (next_lookup_ < num_steps && next_lookup_ < num_returned_ + in_flight_) LookUp();
      const BatchReference reference = Must(lookups_.front().get()).reference;
      lookups_.pop_front();
      const auto pooled = Must(client_.PoolExact(reference));
      history.push_back(Take(pooled));
      auto gradients = std::make_unique<Gradients>(pooled);
      Disturb(step, gradients.get());
      EXPECT_TRUE(client_.ApplyExact(reference, 2.0f, gradients->slots).ok());
      waiting_.emplace_back(reference, std::move(gradients));
      // As late as the bound allows, so that lookups miss as many updates as they may.
      if (step + 1 - num_returned_ >= in_flight_) Return(1 + random_() % ((in_flight_ + 1) / 2));
    }
    while (!waiting_.empty()) Return(waiting_.size());
    return history;
  }

 private:
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
      auto& [reference, gradients] = waiting_.front();
      calls.push_back(std::async(
          std::launch::async,
          [this, reference = reference, gradients = std::shared_ptr(std::move(gradients))] {
            return client_.ReturnGradients(reference, 2.0f, gradients->slots, Soon());
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
  std::deque<std::pair<BatchReference, std::unique_ptr<Gradients>>> waiting_;
};

void ExpectExact(OptimizerKind kind, uint32_t in_flight, uint32_t num_servers,
                 uint32_t num_workers) {
  constexpr uint32_t kNumSteps = 60;
  Cluster plain(num_servers), exact(num_servers, num_workers);
  ASSERT_TRUE(plain.client().Configure(Config(kind), false, Soon()).ok());
  ExactRank::Begin(exact.client());
  ASSERT_TRUE(exact.client().Configure(Config(kind), false, Soon()).ok());
  const auto expected = TrainSynchronously(plain, kNumSteps);
  ExactRank rank(exact, exact.client(), in_flight, num_workers);
  EXPECT_EQ(rank.Train(kNumSteps), expected);
  EXPECT_EQ(WholeRowsOf(exact, num_servers), WholeRowsOf(plain, num_servers));
  const Metrics metrics = exact.client().exact_rows()->metrics();
  EXPECT_EQ(metrics["num_held_rows"], 0u);
  EXPECT_GT(metrics["num_replayed_rows"], 0u);
  if (in_flight > 4) {
    EXPECT_GT(metrics["num_spared_rows"], metrics["num_fetched_rows"]);
  }
}

TEST(ExactRowsTest, EqualsSynchronousTrainingToTheLastBit) {
  for (const uint32_t in_flight : {1, 2, 4, 16}) {
    SCOPED_TRACE(in_flight);
    ExpectExact(OptimizerKind::kAdam, in_flight, /*num_servers=*/2, /*num_workers=*/1);
  }
}

TEST(ExactRowsTest, WithEachOptimizer) {
  for (uint8_t number = 0; number < kNumOptimizerKinds; ++number) {
    const auto kind = static_cast<OptimizerKind>(number);
    SCOPED_TRACE(static_cast<int>(kind));
    ExpectExact(kind, 8, 3, 1);
  }
}

TEST(ExactRowsTest, WithSeveralWorkers) { ExpectExact(OptimizerKind::kAdam, 8, 2, 3); }

}  // namespace
}  // namespace persia::client
