#include "checkpoint/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "checkpoint/checkpoint_test_util.h"
#include "store/row_policy.h"

namespace persia::checkpoint {
namespace {

using store::EmbeddingStore;
using store::Range;

constexpr OptimizerKind kKinds[] = {
    OptimizerKind::kSgd,      OptimizerKind::kAdagrad, OptimizerKind::kRowwiseAdagrad,
    OptimizerKind::kAdam,     OptimizerKind::kAdamW,   OptimizerKind::kRmsprop,
    OptimizerKind::kAdadelta, OptimizerKind::kAdamax,  OptimizerKind::kFtrl,
    OptimizerKind::kLion};
static_assert(std::size(kKinds) == kNumOptimizerKinds);

std::unique_ptr<EmbeddingStore> Unconfigured(EmbeddingStore::Options options) {
  return std::move(EmbeddingStore::Create(options)).value();
}

std::unique_ptr<Loader> BeginLoad(EmbeddingStore& store, const TrainConfig& config,
                                  Replica replica = {}, bool with_state = true) {
  auto loader =
      Loader::Begin(store, {.config = config, .with_state = with_state, .replica = replica});
  EXPECT_TRUE(loader.ok()) << loader.status().ToString();
  return std::move(loader).value();
}

void Load(EmbeddingStore& store, const TrainConfig& config, const std::vector<Bytes>& files,
          Replica replica = {}, bool with_state = true) {
  const auto loader = BeginLoad(store, config, replica, with_state);
  ASSERT_TRUE(loader->Replace().ok());
  for (const Bytes& file : files) {
    const Status status = loader->Add(BlocksOf(file)).status();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  loader->Commit();
}

// Trains some signs more often and later than others, of two dims.
void Train(EmbeddingStore& store) {
  std::mt19937_64 random(1);
  for (int batch = 0; batch < 30; ++batch) {
    const uint32_t dim = batch % 3 == 0 ? 3 : 8;
    const uint64_t begin = random() % 500 + (dim == 3 ? 10'000 : 0);
    const auto signs = Range(begin, begin + 300);
    std::vector<float> gradients(signs.size() * dim);
    for (float& g : gradients) g = static_cast<float>(random() % 1000) * 1e-3f - 0.5f;
    store::Lookup(store, signs, dim);
    store::Update(store, signs, dim, gradients);
  }
}

// A cluster that has loaded the files.
std::vector<std::unique_ptr<EmbeddingStore>> Cluster(uint32_t num_servers,
                                                     const TrainConfig& config,
                                                     const std::vector<Bytes>& files) {
  std::vector<std::unique_ptr<EmbeddingStore>> servers;
  for (uint32_t i = 0; i < num_servers; ++i) {
    servers.push_back(Unconfigured({.capacity = 10'000, .num_internal_shards = 1 + 2 * i}));
    Load(*servers.back(), config, files, {i, num_servers});
  }
  return servers;
}

std::vector<Bytes> FilesOf(const std::vector<std::unique_ptr<EmbeddingStore>>& servers) {
  std::vector<Bytes> files;
  for (uint32_t i = 0; i < servers.size(); ++i) {
    const auto snapshot = BeginSnapshot(
        *servers[i], {.num_parts = i + 1, .replica = {i, static_cast<uint32_t>(servers.size())}});
    for (Bytes& file : Files(*snapshot)) files.push_back(std::move(file));
  }
  return files;
}

TEST(Loader, MovesRowsToOtherNumbersOfServers) {
  for (const OptimizerKind kind : kKinds) {
    TrainConfig config = ConfigOf(kind);
    if (kind == OptimizerKind::kSgd) config.optimizer.momentum = 0.9f;
    const auto one = store::MakeStore({.capacity = 10'000, .num_internal_shards = 4}, config);
    Train(*one);
    const Rows before = RowsOf(*one);
    ASSERT_GT(before.size(), 500u);

    const auto three = Cluster(3, config, Files(*BeginSnapshot(*one)));
    const std::vector<Bytes> files = FilesOf(three);
    EXPECT_EQ(RowsOf(files), before);
    EXPECT_GT(three[1]->size(), 100u);
    const auto two = Cluster(2, config, files);
    EXPECT_EQ(RowsOf(FilesOf(two)), before);
    EXPECT_EQ(two[0]->config(), config);
  }
}

// Files are float32: rows of 16 bits go through stores of every type and come back as they were,
// with the state of their optimizer.
TEST(NarrowRowsLoader, MovesRowsBetweenTypes) {
  using store::RowDtype;
  for (const OptimizerKind kind : kKinds) {
    const TrainConfig config = ConfigOf(kind);
    for (const RowDtype dtype : {RowDtype::kFloat16, RowDtype::kBfloat16}) {
      const EmbeddingStore::Options narrow = {
          .capacity = 10'000, .num_internal_shards = 4, .row_dtype = dtype};
      const auto trained = store::MakeStore(narrow, config);
      Train(*trained);
      const Rows before = RowsOf(*trained);
      const auto wide = Unconfigured({.capacity = 10'000, .num_internal_shards = 2});
      Load(*wide, config, Files(*BeginSnapshot(*trained)));
      ASSERT_EQ(RowsOf(*wide), before);
      const auto back = Unconfigured(narrow);
      Load(*back, config, Files(*BeginSnapshot(*wide)));
      ASSERT_EQ(RowsOf(*back), before);
    }
  }
}

// A snapshot begun before rows change has them as they were.
TEST(NarrowRowsLoader, RowsAreSavedBeforeTheyChange) {
  const auto store = store::MakeStore(
      {.capacity = 2000, .num_internal_shards = 3, .row_dtype = store::RowDtype::kBfloat16},
      ConfigOf(OptimizerKind::kAdam));
  Train(*store);
  const Rows before = RowsOf(*store);
  auto snapshot = BeginSnapshot(*store, {.num_parts = 1});
  Train(*store);
  EXPECT_EQ(RowsOf(Files(*snapshot)), before);
  snapshot.reset();
  EXPECT_NE(RowsOf(*store), before);
}

// Feature groups 1 and 2 have optimizers of their own, with as much state as one another.
TrainConfig WithGroups(TrainConfig config) {
  config.feature_index_prefix_bit = 8;
  config.groups = {{1, config}, {2, config}};
  config.groups[0].rows.optimizer = ConfigOf(OptimizerKind::kAdagrad).optimizer;
  config.groups[1].rows.optimizer = ConfigOf(OptimizerKind::kRmsprop).optimizer;
  return config;
}

std::unique_ptr<EmbeddingStore> TrainedWithGroups(const TrainConfig& config) {
  auto store = store::MakeStore({.capacity = 10'000, .num_internal_shards = 4}, config);
  for (uint64_t group = 1; group <= 3; ++group) {
    for (const uint64_t begin : {0, 50, 200}) {
      const auto signs = Range((group << 56) + begin, (group << 56) + begin + 200);
      store::Lookup(*store, signs, 8);
      store::Update(*store, signs, 8, std::vector<float>(signs.size() * 8, 0.25f));
    }
  }
  return store;
}

TEST(Loader, GroupsKeepTheirOptimizers) {
  const TrainConfig config = WithGroups(ConfigOf(OptimizerKind::kAdam));
  ASSERT_TRUE(config.Validate().ok());
  const auto one = TrainedWithGroups(config);
  const Rows before = RowsOf(*one);
  ASSERT_EQ(before.size(), 1200u);
  std::set<size_t> sizes;
  for (const auto& [sign, row] : before) sizes.insert(row.values.size());
  EXPECT_EQ(sizes, (std::set<size_t>{16, 24}));  // Adagrad and RMSprop, Adam

  const auto two = Cluster(2, config, Files(*BeginSnapshot(*one)));
  EXPECT_EQ(RowsOf(FilesOf(two)), before);
  const auto inference = Unconfigured({.capacity = 10'000, .num_internal_shards = 2});
  Load(*inference, config, FilesOf(two), {}, /*with_state=*/false);
  EXPECT_EQ(inference->size(), before.size());
}

// Written without their state, rows can be served, and trained on with that of new rows.
TEST(Loader, RowsWithoutStateBeginAnew) {
  for (const OptimizerKind kind : kKinds) {
    const TrainConfig config = ConfigOf(kind);
    const auto trained = store::MakeStore({.capacity = 10'000}, config);
    Train(*trained);
    const Rows before = RowsOf(*trained);
    const auto files = Files(*BeginSnapshot(*trained, {.num_parts = 2, .with_state = false}));
    const auto served = Unconfigured({.capacity = 10'000});
    Load(*served, config, files, {}, /*with_state=*/false);
    EXPECT_EQ(served->size(), before.size());

    const auto store = Unconfigured({.capacity = 10'000});
    auto loader = Loader::Begin(*store, {.config = config, .fresh_state = true});
    ASSERT_TRUE(loader.ok());
    for (const Bytes& file : files) ASSERT_TRUE((*loader)->Verify(BlocksOf(file)).ok());
    ASSERT_TRUE((*loader)->Replace().ok());
    for (const Bytes& file : files) ASSERT_TRUE((*loader)->Add(BlocksOf(file)).ok());
    (*loader)->Commit();
    loader->reset();
    const Rows after = RowsOf(*store);
    ASSERT_EQ(after.size(), before.size());
    const store::RowPolicy rules(config);
    for (const auto& [sign, row] : after) {
      std::vector<float> values = before.at(sign).values;
      const size_t num_floats = values.size();
      values.resize(num_floats + 1);  // there is always a pointer to the state
      uint32_t scalar = 0;
      rules.InitializeState({.values = values.data(),
                             .state = values.data() + row.dim,
                             .scalar = &scalar,
                             .dim = row.dim});
      values.resize(num_floats);
      EXPECT_EQ(row.values, values) << "sign " << sign << ", kind " << static_cast<int>(kind);
      EXPECT_EQ(row.scalar, rules.ShapeFor(row.dim).has_scalar ? scalar : 0);
    }
    // Rows of one that has no state are those of all.
    const bool has_none = rules.ShapeFor(8).state_floats == 0 && !rules.ShapeFor(8).has_scalar;
    const auto other = Unconfigured({.capacity = 10'000});
    const auto strict = BeginLoad(*other, config);
    EXPECT_EQ(strict->Verify(BlocksOf(files[0])).ok(), has_none);
  }
}

// A group's capacity is of the servers that train, each with shards of its own.
TEST(Loader, WithoutStateKeepsRowsOfLimitedGroups) {
  TrainConfig config = WithGroups(ConfigOf(OptimizerKind::kAdam));
  config.min_norm = 0.5f;
  config.groups[0].rows.capacity = 40;
  config.groups[0].rows.time_to_live_sec = 60;
  config.groups[1].rows.min_norm = 0.5f;
  const auto trained = TrainedWithGroups(config);
  const auto files = Files(*BeginSnapshot(*trained));
  for (const uint32_t num_shards : {3u, 64u}) {  // uneven shares; more shards than the capacity
    const auto store = Unconfigured({.capacity = 10'000, .num_internal_shards = num_shards});
    Load(*store, config, files, {}, /*with_state=*/false);
    EXPECT_EQ(store->size(), trained->size());
    EXPECT_EQ(store->RemoveSmallRows().value(), 0u);
    const TrainConfig served = store->config().value();
    EXPECT_FALSE(served.HasMinNorm());
    for (const GroupConfig& group : served.groups) {
      EXPECT_EQ(group.rows.capacity, 0u);
      EXPECT_EQ(group.rows.time_to_live_sec, 0.0f);
    }
  }
}

// A row that a training lookup inserts between the clearing and the new rules has the old shape,
// and has the rules refused.
TEST(Loader, ReplacesRowsAndRulesInOneStep) {
  const TrainConfig small = ConfigOf(OptimizerKind::kSgd);
  const TrainConfig large = ConfigOf(OptimizerKind::kAdam);
  const auto store = store::MakeStore({.capacity = 10'000, .num_internal_shards = 64}, small);
  std::atomic<bool> ends = false;
  std::thread training([&] {
    for (uint64_t i = 0; !ends; i = (i + 16) % 4096) store::Lookup(*store, Range(i, i + 16), 8);
  });
  for (int i = 0; i < 300; ++i) {
    const Status status = BeginLoad(*store, i % 2 == 0 ? large : small)->Replace();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  ends = true;
  training.join();
}

// In the phase of checking: when all rows are still there, here and on other servers.
TEST(Loader, RefusesCapacitiesBelowTheShardsBeforeAnyRowGoes) {
  TrainConfig config = WithGroups(ConfigOf(OptimizerKind::kAdam));
  const auto store = store::MakeStore({.capacity = 10'000, .num_internal_shards = 16}, config);
  store::Lookup(*store, Range(0, 200), 8);
  config.groups[0].rows.capacity = 8;
  const Status refusal = Loader::Begin(*store, {.config = config}).status();
  EXPECT_EQ(refusal.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(refusal.message().find("capacity is 8"), std::string::npos) << refusal.ToString();
  EXPECT_EQ(store->size(), 200u);
  config.groups[0].rows.capacity = 16;
  EXPECT_TRUE(BeginLoad(*store, config)->Replace().ok()) << "the store is free again";
}

// A training script has given its config to the workers, which have added the groups.
TEST(Loader, TakesTheGroupsThatTheStoreIsConfiguredWith) {
  const TrainConfig of_script = ConfigOf(OptimizerKind::kAdam);
  const TrainConfig config = WithGroups(of_script);
  const auto trained = TrainedWithGroups(config);
  const auto files = Files(*BeginSnapshot(*trained));
  const auto configured = store::MakeStore({.capacity = 10'000, .num_internal_shards = 3}, config);
  Load(*configured, of_script, files);
  EXPECT_EQ(RowsOf(*configured), RowsOf(*trained));
  EXPECT_EQ(configured->config(), config);

  const auto never = Unconfigured({.capacity = 10'000, .num_internal_shards = 3});
  EXPECT_EQ(BeginLoad(*never, of_script)->Verify(BlocksOf(files[0])).status().code(),
            StatusCode::kInvalidArgument);
}

// The rows go on as if nothing had happened: same values, same order of eviction.
TEST(Loader, TrainingGoesOn) {
  for (const OptimizerKind kind : kKinds) {
    const TrainConfig config = ConfigOf(kind);
    const EmbeddingStore::Options options{.capacity = 1200, .num_internal_shards = 2};
    const auto first = store::MakeStore(options, config);
    Train(*first);
    const auto second = Unconfigured(options);
    Load(*second, config, Files(*BeginSnapshot(*first)));
    for (EmbeddingStore* store : {first.get(), second.get()}) {
      for (uint64_t i = 0; i < 10; ++i) {
        store::Lookup(*store, Range(50'000 + 70 * i, 50'070 + 70 * i), 8);
        store::Update(*store, Range(300, 600), 8, std::vector<float>(300 * 8, 0.125f));
      }
    }
    Rows rows = RowsOf(*second);
    EXPECT_EQ(rows, RowsOf(*first));
    EXPECT_LT(rows.size(), 1201u);
    EXPECT_EQ(rows.count(400) != 0, store::Has(*first, 400, 8));
  }
}

TEST(Loader, CountsRowsOfOtherServers) {
  const TrainConfig config = ConfigOf(OptimizerKind::kSgd);
  const auto all = store::MakeStore({.capacity = 10'000, .num_internal_shards = 4}, config);
  store::Lookup(*all, Range(0, 3000), 4);
  const auto files = Files(*BeginSnapshot(*all));
  const auto store = Unconfigured({.capacity = 10'000, .num_internal_shards = 2});
  const auto loader = BeginLoad(*store, config, {1, 4});
  ASSERT_TRUE(loader->Replace().ok());
  EXPECT_EQ(loader->Verify(BlocksOf(files[0])).value(), 3000u);
  EXPECT_EQ(store->size(), 0u);
  const uint64_t added = loader->Add(BlocksOf(files[0])).value();
  EXPECT_EQ(loader->num_rows(), added);
  EXPECT_EQ(loader->num_rows() + loader->num_foreign(), 3000u);
  EXPECT_NEAR(static_cast<double>(added), 750, 150);
  EXPECT_EQ(store->size(), added);
}

// Growing a step at a time would copy the index again and again.
TEST(Loader, MakesRoomForTheRowsThatWereVerified) {
  const TrainConfig config = ConfigOf(OptimizerKind::kSgd);
  const auto all = store::MakeStore({.capacity = 10'000, .num_internal_shards = 4}, config);
  store::Lookup(*all, Range(0, 3000), 4);
  const auto files = Files(*BeginSnapshot(*all));
  const auto store = Unconfigured({.capacity = 10'000, .num_internal_shards = 2});
  auto loader = BeginLoad(*store, config);
  ASSERT_TRUE(loader->Verify(BlocksOf(files[0])).ok());
  ASSERT_TRUE(loader->Replace().ok());
  EXPECT_GE(store->stats().memory_bytes, 3000 * 20u);
  EXPECT_EQ(loader->Add(BlocksOf(files[0])).value(), 3000u);
  loader.reset();
  EXPECT_EQ(RowsOf(*store), RowsOf(*all));
}

TEST(Loader, WithoutStateServesInferenceAlone) {
  const TrainConfig config = ConfigOf(OptimizerKind::kAdam);
  const auto trained = store::MakeStore({.capacity = 10'000, .num_internal_shards = 4}, config);
  Train(*trained);
  const auto store = Unconfigured({.capacity = 10'000, .num_internal_shards = 2});
  Load(*store, config, Files(*BeginSnapshot(*trained)), {}, /*with_state=*/false);
  EXPECT_EQ(store->size(), trained->size());
  EXPECT_EQ(store::Peek(*store, Range(100, 400), 8), store::Peek(*trained, Range(100, 400), 8));
  for (const auto& [sign, row] : RowsOf(*store)) EXPECT_EQ(row.values.size(), row.dim);
  EXPECT_EQ(store->Configure(config).code(), StatusCode::kFailedPrecondition);
}

// Which rows stay does not depend on the order in which they come.
TEST(Loader, KeepsTheNewestWhereThereIsNoRoom) {
  const TrainConfig config = ConfigOf(OptimizerKind::kSgd);
  const auto trained = store::MakeStore({.capacity = 10'000, .num_internal_shards = 1}, config);
  for (uint64_t i = 0; i < 20; ++i) store::Lookup(*trained, Range(100 * i, 100 * i + 100), 4);
  const auto files = Files(*BeginSnapshot(*trained));
  // The blocks one by one.
  std::vector<std::span<const std::byte>> blocks;
  const auto entries = DecodeFooter(FooterOf(files[0]));
  for (const BlockEntry& block : entries.value()) {
    blocks.push_back(std::span(files[0]).subspan(block.offset, block.length));
  }
  std::mt19937 random(3);
  Rows kept;
  for (int round = 0; round < 3; ++round) {
    const auto store = Unconfigured({.capacity = 500, .num_internal_shards = 1});
    const auto loader = BeginLoad(*store, config);
    ASSERT_TRUE(loader->Replace().ok());
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (const auto& block : blocks) ASSERT_TRUE(loader->Add(block).ok());
    loader->Commit();
    EXPECT_EQ(loader->num_evicted(), 1500u);
    EXPECT_EQ(store->size(), 500u);
    for (const uint64_t sign : Range(1500, 2000)) EXPECT_TRUE(store::Has(*store, sign)) << sign;
  }
}

TEST(Loader, ThreadsMayAddAtOnce) {
  const TrainConfig config = ConfigOf(OptimizerKind::kAdagrad);
  const auto trained = store::MakeStore({.capacity = 10'000, .num_internal_shards = 4}, config);
  Train(*trained);
  const auto files = Files(*BeginSnapshot(*trained, {.num_parts = 4}));
  const auto store = Unconfigured({.capacity = 10'000, .num_internal_shards = 3});
  {
    const auto loader = BeginLoad(*store, config);
    ASSERT_TRUE(loader->Replace().ok());
    std::vector<std::thread> threads;
    for (const Bytes& file : files) {
      threads.emplace_back([&] { EXPECT_TRUE(loader->Add(BlocksOf(file)).ok()); });
    }
    for (auto& thread : threads) thread.join();
    loader->Commit();
  }
  EXPECT_EQ(RowsOf(*store), RowsOf(*trained));
}

TEST(Loader, AddsToRowsThatAreThere) {
  const TrainConfig config = ConfigOf(OptimizerKind::kAdagrad);
  const auto trained = store::MakeStore({.capacity = 10'000, .num_internal_shards = 4}, config);
  store::Lookup(*trained, Range(0, 200), 8);
  store::Update(*trained, Range(0, 200), 8, std::vector<float>(1600, 1.0f));
  const auto files = Files(*BeginSnapshot(*trained));
  const auto store = store::MakeStore({.capacity = 10'000, .num_internal_shards = 4}, config);
  store::Lookup(*store, Range(100, 150), 8);
  store::Lookup(*store, Range(150, 300), 3);  // some of another dim
  {
    const auto loader = BeginLoad(*store, config);
    ASSERT_TRUE(loader->Add(BlocksOf(files[0])).ok());
    loader->Commit();
  }
  Rows rows = RowsOf(*store);
  EXPECT_EQ(rows.size(), 300u);
  const Rows loaded = RowsOf(files);
  for (const auto& [sign, row] : loaded) EXPECT_EQ(rows.at(sign).values, row.values) << sign;
  EXPECT_EQ(rows.at(250).dim, 3u);
}

TEST(Loader, RefusesOtherOptimizers) {
  const auto trained = store::MakeStore({.capacity = 1000, .num_internal_shards = 2},
                                        ConfigOf(OptimizerKind::kAdagrad));
  store::Lookup(*trained, Range(0, 100), 4);
  const auto files = Files(*BeginSnapshot(*trained));
  TrainConfig momentum = ConfigOf(OptimizerKind::kSgd);
  momentum.optimizer.momentum = 0.9f;  // as many floats, of another meaning
  for (const TrainConfig& config : {momentum, ConfigOf(OptimizerKind::kAdam)}) {
    const auto store = Unconfigured({.capacity = 1000, .num_internal_shards = 2});
    const auto loader = BeginLoad(*store, config);
    EXPECT_EQ(loader->Verify(BlocksOf(files[0])).status().code(), StatusCode::kInvalidArgument);
    ASSERT_TRUE(loader->Replace().ok());
    EXPECT_EQ(loader->Add(BlocksOf(files[0])).status().code(), StatusCode::kInvalidArgument);
  }
  const auto store = store::MakeStore({.capacity = 1000, .num_internal_shards = 2},
                                      ConfigOf(OptimizerKind::kAdam));
  const auto loader = BeginLoad(*store, ConfigOf(OptimizerKind::kAdagrad));
  EXPECT_EQ(loader->Add(BlocksOf(files[0])).status().code(), StatusCode::kFailedPrecondition);
}

TEST(Loader, NeedsAConfiguredStore) {
  const auto trained = store::MakeStore({.capacity = 1000, .num_internal_shards = 2});
  store::Lookup(*trained, Range(0, 100), 4);
  const auto files = Files(*BeginSnapshot(*trained));
  const auto store = Unconfigured({.capacity = 1000, .num_internal_shards = 2});
  const auto loader = BeginLoad(*store, store::SgdConfig());
  EXPECT_EQ(loader->Add(BlocksOf(files[0])).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(loader->Add({}).status().code(), StatusCode::kFailedPrecondition) << "also of no rows";
}

TEST(Loader, OneAtATimeAndNotDuringASnapshot) {
  const TrainConfig config = store::SgdConfig();
  const auto store = store::MakeStore({.capacity = 1000, .num_internal_shards = 2}, config);
  {
    const auto snapshot = BeginSnapshot(*store);
    EXPECT_EQ(Loader::Begin(*store, {.config = config}).status().code(),
              StatusCode::kFailedPrecondition);
  }
  const auto loader = BeginLoad(*store, config);
  EXPECT_EQ(Loader::Begin(*store, {.config = config}).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(Snapshot::Begin(*store, {}).status().code(), StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace persia::checkpoint
