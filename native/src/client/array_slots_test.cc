// Slots whose rows are kept by ID (store/row_arrays.h): the same jobs with and without arrays have
// the same bits, rows, stamps and snapshots.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/embedding_bags_test_util.h"
#include "store/store_load.h"
#include "store/store_snapshot.h"

namespace persia::client {
namespace {

constexpr uint64_t kNumArrayIds = 200'000;  // four slabs of cells, the last one not whole

// Of single IDs and bags, alone and in a shared group, beside a slot that is no array.
std::vector<SlotConfig> ArraySlots(uint64_t num_array_ids, const SlotRowConfig& rows = {}) {
  std::vector<SlotConfig> slots = {
      {.name = "shared_a", .dim = 16, .group = 3},
      {.name = "hashed", .dim = 16, .group = 0},
      {.name = "single", .dim = 16, .group = 1},
      {.name = "shared_b", .dim = 16, .mean_scaling = true, .group = 3},
      {.name = "d3", .dim = 3, .group = 2},
      {.name = "d64", .dim = 64, .group = 4},
  };
  for (SlotConfig& slot : slots) {
    slot.num_array_ids = slot.group == 0 ? 0 : num_array_ids;
    slot.rows = rows;
  }
  return slots;
}

// Frequent IDs, IDs on both sides of the bound between two slabs, and the last one.
uint64_t RandomId(std::mt19937& rng) {
  switch (rng() % 4) {
    case 0: return 65'500 + rng() % 80;
    case 1: return kNumArrayIds - 1 - rng() % 3;
    default: return rng() % 40;
  }
}

// A large batch also has some of all IDs.
std::vector<SlotIds> RandomIds(std::mt19937& rng, size_t num_slots, size_t min_samples = 1) {
  std::vector<SlotIds> slots(num_slots, SlotIds(min_samples + rng() % 12));
  for (size_t slot = 0; slot < num_slots; ++slot) {
    slots[slot].resize(slots[0].size());
    const bool is_single = slot == 2 || rng() % 3 == 0;
    for (auto& ids : slots[slot]) {
      ids.resize(is_single ? 1 : rng() % 5);
      for (uint64_t& id : ids) {
        id = min_samples > 1 && rng() % 4 == 0 ? rng() % kNumArrayIds : RandomId(rng);
      }
    }
  }
  return slots;
}

// All that a snapshot has of the rows, by sign, as bytes.
std::map<uint64_t, std::string> Read(store::StoreSnapshot& snapshot) {
  std::map<uint64_t, std::string> rows;
  const auto add = [&](const store::RowHead& head, const float* values) {
    std::string bytes(head.num_floats() * sizeof(float), '\0');
    if (!bytes.empty()) std::memcpy(bytes.data(), values, bytes.size());
    bytes += " dim " + std::to_string(head.dim) + " age " + std::to_string(head.age) + " scalar " +
             std::to_string(head.scalar);
    EXPECT_TRUE(rows.emplace(head.sign, bytes).second) << "twice: " << head.sign;
  };
  for (uint32_t shard = 0; shard < snapshot.num_shards(); ++shard) {
    store::StoreSnapshot::Batch batch;
    for (bool has_more = true; has_more;) {
      has_more = Must(snapshot.Read(shard, 7, &batch));
      batch.read.ForEach(add);
      for (const store::RowRecords& saved : batch.saved) saved.ForEach(add);
    }
  }
  return rows;
}

std::unique_ptr<store::StoreSnapshot> Begin(EmbeddingBags& bags) {
  return Must(store::StoreSnapshot::Begin(bags.embedding_store(), {}));
}

// Two engines that get the same calls.
struct Pair {
  std::unique_ptr<EmbeddingBags> hash, array;

  Pair(EmbeddingBagsOptions options, const TrainConfig& config, const SlotRowConfig& rows = {}) {
    options.slots = ArraySlots(0, rows);
    hash = Make(options, config);
    options.slots = ArraySlots(kNumArrayIds, rows);
    array = Make(options, config);
  }

  void Train(std::mt19937& rng, size_t min_samples = 1) {
    const auto ids = RandomIds(rng, 6, min_samples);
    const PooledBags a = client::Train(*hash, ids), b = client::Train(*array, ids);
    ASSERT_TRUE(SameBits(Values(a), Values(b)));
    std::vector<float> gradients(Values(a).size());
    for (float& gradient : gradients) gradient = static_cast<float>(rng() % 1000) / 500 - 1;
    const UpdateReport x = Must(hash->Update(*a.batch, gradients));
    const UpdateReport y = Must(array->Update(*b.batch, gradients));
    ASSERT_EQ(x.num_updated, y.num_updated);
    ASSERT_EQ(x.num_missing, y.num_missing);
    const auto others = RandomIds(rng, 6, min_samples);
    ASSERT_TRUE(SameBits(Infer(*hash, others), Infer(*array, others)));
  }

  void ExpectEqual() {
    const auto a = hash->stats(), b = array->stats();
    ASSERT_EQ(a.num_rows, b.num_rows);
    ASSERT_EQ(a.lookups.num_evicted, b.lookups.num_evicted);
    ASSERT_EQ(a.lookups.num_unadmitted, b.lookups.num_unadmitted);
    ASSERT_EQ(Read(*Begin(*hash)), Read(*Begin(*array)));
  }
};

void ExpectSameJob(EmbeddingBagsOptions options, const TrainConfig& config, int num_steps = 60) {
  Pair pair(std::move(options), config);
  std::mt19937 rng(7);
  for (int step = 0; step < num_steps; ++step) {
    ASSERT_NO_FATAL_FAILURE(pair.Train(rng)) << "step " << step;
    if (step % 10 != 9) continue;
    ASSERT_NO_FATAL_FAILURE(pair.ExpectEqual()) << "step " << step;
  }
}

TEST(ArraySlotsTest, TheSameRowsAsByHash) {
  for (const auto kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad,
                          OptimizerKind::kRowwiseAdagrad, OptimizerKind::kAdam}) {
    TrainConfig config = Sgd();
    config.optimizer.kind = kind;
    for (const auto dtype : {store::RowDtype::kFloat32, store::RowDtype::kBfloat16}) {
      EmbeddingBagsOptions options = Options({}, 2);
      options.store.row_dtype = dtype;
      options.store.counts_updates = kind == OptimizerKind::kAdam;
      ASSERT_NO_FATAL_FAILURE(ExpectSameJob(std::move(options), config));
    }
  }
}

// Threads divide batches from 4,096 IDs on. Rows are evicted as well.
TEST(ArraySlotsTest, TheSameRowsWithThreads) {
  constexpr size_t kManySamples = 1000;
  std::mt19937 rng(7);
  ASSERT_GT(Flatten(RandomIds(rng, 6, kManySamples)).values.size(), 4096u);
  Pair pair(Options({}, 4, 20'000, 4), Sgd());
  for (int step = 0; step < 12; ++step) {
    ASSERT_NO_FATAL_FAILURE(pair.Train(rng, kManySamples)) << "step " << step;
  }
  ASSERT_NO_FATAL_FAILURE(pair.ExpectEqual());
  EXPECT_GT(pair.array->stats().lookups.num_evicted, 0u);
}

TEST(ArraySlotsTest, TheSameRowsAreEvicted) {
  ASSERT_NO_FATAL_FAILURE(ExpectSameJob(Options({}, 2, 400, 1), Sgd(), 200));
  Pair pair(Options({}, 2, 400, 1), Sgd());
  std::mt19937 rng(7);
  for (int step = 0; step < 100; ++step) ASSERT_NO_FATAL_FAILURE(pair.Train(rng));
  EXPECT_GT(pair.array->stats().lookups.num_evicted, 500u);
  SlotRowConfig rows;
  rows.capacity = 70;
  Pair limited(Options({}, 2, 1'000'000, 1), Sgd(), rows);
  for (int step = 0; step < 100; ++step) ASSERT_NO_FATAL_FAILURE(limited.Train(rng));
  ASSERT_NO_FATAL_FAILURE(limited.ExpectEqual());
  EXPECT_GT(limited.array->stats().lookups.num_evicted, 500u);
}

TEST(ArraySlotsTest, TheSameSignsAreAdmitted) {
  TrainConfig config = Sgd();
  config.admit_after = 3;
  config.admit_probability = 0.5f;
  ASSERT_NO_FATAL_FAILURE(ExpectSameJob(Options({}), config));
}

// A row is in use by the stamp in its array, which the index has only a copy of.
TEST(ArraySlotsTest, ARowInUseStaysWhenOthersExpire) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kTimeToLive = std::chrono::milliseconds(400);
  TrainConfig config = SgdFromZero();
  config.time_to_live_sec = 0.4f;
  // If the machine stops this process for so long that the row is not in use: once more.
  for (int attempt = 0; attempt < 50; ++attempt) {
    const auto bags = Make(Options(ArraySlots(kNumArrayIds), 1, 1'000'000, 1), config);
    const std::vector<SlotIds> both(6, {{1}, {2}}), one(6, {{1}});
    Clock::duration longest{};  // between two uses
    auto last = Clock::now();
    const PooledBags pooled = Train(*bags, both);
    ASSERT_TRUE(bags->Update(*pooled.batch, std::vector<float>(Values(pooled).size(), -1.0f)).ok());
    for (int i = 0; i < 2000 && bags->stats().lookups.num_expired < 5; ++i) {
      Train(*bags, one);
      const auto now = Clock::now();
      longest = std::max(longest, now - last);
      last = now;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    if (longest > kTimeToLive / 2) continue;
    EXPECT_EQ(bags->stats().lookups.num_expired, 5u);  // ID 2, of each group
    EXPECT_EQ(bags->stats().num_rows, 5u);
    EXPECT_EQ(Infer(*bags, one)[32], 1.0f);  // of slot "single"
    EXPECT_EQ(Infer(*bags, std::vector<SlotIds>(6, {{2}}))[32], 0.0f);
    return;
  }
  FAIL() << "the machine stopped this process for 0.2 s in each of 50 attempts";
}

// Rows are saved for a snapshot before they are touched, updated, evicted or cleared.
TEST(ArraySlotsTest, ASnapshotHasTheRowsOfItsBeginning) {
  for (const bool clears : {false, true}) {
    Pair pair(Options({}, 1, 450, 2), Sgd());
    std::mt19937 rng(11);
    for (int step = 0; step < 30; ++step) ASSERT_NO_FATAL_FAILURE(pair.Train(rng));
    const auto expected = Read(*Begin(*pair.array));
    EXPECT_GT(expected.size(), 200u);
    const auto a = Begin(*pair.hash), b = Begin(*pair.array);
    const auto ids = RandomIds(rng, 6);
    const auto x = client::Train(*pair.hash, ids), y = client::Train(*pair.array, ids);
    for (int step = 0; step < 30; ++step) ASSERT_NO_FATAL_FAILURE(pair.Train(rng));
    if (clears) {
      pair.hash->Clear();
      pair.array->Clear();
      EXPECT_EQ(pair.array->stats().num_rows, 0u);
      for (const float value : Infer(*pair.array, RandomIds(rng, 6))) ASSERT_EQ(value, 0.0f);
    }
    const std::vector<float> gradients(Values(y).size(), 1.0f);
    const UpdateReport late = Must(pair.array->Update(*y.batch, gradients));
    EXPECT_EQ(Must(pair.hash->Update(*x.batch, gradients)).num_updated, late.num_updated);
    EXPECT_EQ(Read(*b), expected);
    EXPECT_EQ(Read(*a), expected);
  }
}

// All rows go at once: a snapshot takes the arrays over with the index. So it needs no room for
// their copies, no row is among the changes, and the store has its memory back.
TEST(ArraySlotsTest, AClearDuringASnapshotCopiesNoRows) {
  constexpr uint64_t kNumRows = 60'000;  // 5 MB in a snapshot
  std::vector<SlotConfig> slots = {{.name = "a", .dim = 16, .group = 0, .num_array_ids = kNumRows}};
  const auto bags = Make(Options(slots), Sgd());
  std::vector<uint64_t> ids(kNumRows);
  std::iota(ids.begin(), ids.end(), 0);
  Train(*bags, {{ids}});
  const auto expected = Read(*Begin(*bags));
  ASSERT_EQ(expected.size(), kNumRows);
  const uint64_t full_bytes = bags->stats().memory_bytes;
  ASSERT_TRUE(bags->embedding_store().TrackChanges(1'000'000).ok());
  auto snapshot =
      Must(store::StoreSnapshot::Begin(bags->embedding_store(), {.max_waiting_bytes = 256u << 10}));
  bags->Clear();
  EXPECT_EQ(bags->embedding_store().change_status().num_rows, 0u);
  EXPECT_EQ(bags->stats().num_rows, 0u);
  EXPECT_EQ(Infer(*bags, {{{7}}}), std::vector<float>(16, 0.0f));
  Train(*bags, {{{7}}});
  EXPECT_EQ(Read(*snapshot), expected);
  snapshot.reset();
  ASSERT_TRUE(bags->embedding_store().TrackChanges(0).ok());
  bags->Clear();
  EXPECT_LT(bags->stats().memory_bytes, full_bytes / 4);
}

// Rows that are set, loaded or looked up through the store are the same rows.
TEST(ArraySlotsTest, OtherCallsUseTheSameRows) {
  Pair pair(Options({}, 1, 450, 2), Sgd());
  std::mt19937 rng(5);
  const std::vector<uint64_t> ids = {3, 65'535, 65'536, kNumArrayIds - 1};
  const std::vector<float> rows(ids.size() * 16, 0.25f);
  for (int step = 0; step < 20; ++step) {
    for (EmbeddingBags* bags : {pair.hash.get(), pair.array.get()}) {
      ASSERT_TRUE(bags->SetRows(2, ids, rows).ok());
      const uint64_t sign = (uint64_t{2} << 56) + 65'540;  // of slot "single"
      std::vector<float> row(16);
      const store::RowBlock block = {.dim = 16, .signs = {&sign, 1}};
      ASSERT_TRUE(bags->embedding_store().Lookup({&block, 1}, LookupMode::kTrain, row.data()).ok());
    }
    ASSERT_NO_FATAL_FAILURE(pair.Train(rng));
  }
  ASSERT_NO_FATAL_FAILURE(pair.ExpectEqual());
}

TEST(ArraySlotsTest, LoadedRowsAreFound) {
  const auto bags = Make(Options(ArraySlots(kNumArrayIds)), SgdFromZero());
  const std::vector<uint64_t> signs = {(uint64_t{2} << 56) + 65'536, (uint64_t{2} << 56) + 1};
  const std::vector<float> rows(2 * 16, 0.5f);
  const std::vector<uint32_t> ages = {0, 5};
  {
    const auto load = Must(store::StoreLoad::Begin(bags->embedding_store()));
    const Status status =
        load->Add({.dim = 16, .signs = signs, .ages = ages, .embeddings = rows.data()});
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  std::vector<SlotIds> batch(6, {{}});
  batch[2] = {{65'536, 1}};
  const auto values = Infer(*bags, batch);
  EXPECT_EQ(values[32], 1.0f);
}

TEST(ArraySlotsTest, AnIdBeyondTheBoundIsRefusedBeforeAnythingIsUsed) {
  const auto bags = Make(Options(ArraySlots(kNumArrayIds)), SgdFromZero());
  for (const uint64_t id : {kNumArrayIds, ~uint64_t{0}}) {
    std::vector<SlotIds> batch(6, {{1}});
    batch[2] = {{id}};
    const FlatBatch flat = Flatten(batch);
    for (const LookupMode mode : {LookupMode::kTrain, LookupMode::kInference}) {
      const Status status = bags->Lookup(flat.values, flat.lengths, mode).status();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(status.ToString().find("slot 'single' has the ID " + std::to_string(id)),
                std::string::npos)
          << status.ToString();
    }
    EXPECT_FALSE(bags->SetRows(2, {&id, 1}, std::vector<float>(16)).ok());
  }
  EXPECT_EQ(bags->stats().num_rows, 0u);
}

TEST(ArraySlotsTest, SlotsThatCannotBeArraysAreRefused) {
  const std::vector<std::vector<SlotConfig>> refused = {
      {{.name = "a", .dim = 4, .group = 0, .num_array_ids = uint64_t{1} << 40}},
      {{.name = "a",
        .dim = 4,
        .hash_stack_rounds = 2,
        .hash_stack_size = 9,
        .group = 0,
        .num_array_ids = 7}},
      {{.name = "a", .dim = 4, .group = 0, .num_array_ids = 7},
       {.name = "b", .dim = 4, .group = 0, .num_array_ids = 8}},
  };
  for (const auto& slots : refused) {
    const Status status = EmbeddingBags::Create(Options(slots)).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.ToString();
    EXPECT_NE(status.ToString().find("array"), std::string::npos) << status.ToString();
  }
}

constexpr uint64_t kMany = 16'000'000;  // IDs: 1 GB of rows, 128 MB of IdStates

// One slot with so many IDs, and rows only for those that `config` admits.
std::unique_ptr<EmbeddingBags> MakeMany(const TrainConfig& config) {
  std::vector<SlotConfig> slots = {{.name = "a", .dim = 16, .group = 0, .num_array_ids = kMany}};
  return Make(Options(slots), config);
}

// Of this process.
uint64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// An array takes memory by the huge page, once its rows are inserted.
TEST(ArraySlotsTest, MemoryIsThatOfTheRowsInUse) {
  const uint64_t resident_before = ResidentBytes();
  const auto bags = MakeMany(Sgd());
  EXPECT_LT(bags->stats().memory_bytes, 5u << 20);
  Train(*bags, {{{0}, {kMany - 1}}});
  const uint64_t two_rows = bags->stats().memory_bytes;
  EXPECT_GE(two_rows, 4u << 20);
  EXPECT_LT(two_rows, 12u << 20);
  Train(*bags, {{{1}, {kMany - 2}}});
  EXPECT_LT(bags->stats().memory_bytes, two_rows + (1u << 20));
  EXPECT_LT(ResidentBytes(), resident_before + (100u << 20));
}

// What an ID without a row takes is its IdState's page. The store's memory counts it.
TEST(ArraySlotsTest, MemoryOfIdsWithoutRowsCounts) {
  TrainConfig config = Sgd();
  config.admit_after = 2;
  const auto bags = MakeMany(config);
  const uint64_t before = bags->stats().memory_bytes;
  constexpr uint64_t kStep = (2u << 20) / 8;  // IDs of a page
  SlotIds spread;
  for (uint64_t id = 0; id < kMany; id += kStep) spread.push_back({id});
  const uint64_t resident_before = ResidentBytes();
  Train(*bags, {spread});
  EXPECT_EQ(bags->stats().num_rows, 0u);
  const uint64_t counted = bags->stats().memory_bytes - before;
  EXPECT_GE(counted, kMany * 8);
  EXPECT_LT(counted, kMany * 8 + (4u << 20));
  EXPECT_LT(ResidentBytes(), resident_before + counted + (32u << 20));
  Train(*bags, {spread});  // now with rows
  EXPECT_GT(bags->stats().memory_bytes - before, counted + spread.size() * (1u << 20));
}

}  // namespace
}  // namespace persia::client
