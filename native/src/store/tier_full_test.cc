// Stores whose pool has no room: who is told, what is tried again, and that nothing else suffers.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>

#include "store/store_load.h"
#include "store/store_test_util.h"
#include "store/tier_test_util.h"

namespace persia::store {
namespace {

using std::chrono::milliseconds;

// No file of the process grows beyond so many bytes, as if the device were full, until the end.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(uint64_t bytes) : old_handler_(::signal(SIGXFSZ, SIG_IGN)) {
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit_), 0);
    const rlimit limit = {.rlim_cur = bytes, .rlim_max = old_limit_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~FileSizeLimit() {
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit_), 0);
    ::signal(SIGXFSZ, old_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  using Handler = void (*)(int);
  const Handler old_handler_;
  rlimit old_limit_{};
};

constexpr uint32_t kDim = 4;
constexpr uint64_t kCacheRows = 100;

// Rows of 64 bytes in extents of 63, which begin at 0; each step adds 1.
class FullTierTest : public ::testing::Test {
 protected:
  void SetUp() override { Open(); }
  void Open() {
    store_.reset();
    TierOptions tier = directory_.Tier(kCacheRows);
    tier.pool.extent_bytes = 4096;
    auto store = EmbeddingStore::Open({.capacity = 200, .num_internal_shards = 1}, tier);
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
    TrainConfig config = SgdConfig(1.0f);
    config.initializer = {.lower = 0.0f, .upper = 0.0f, .seed = 0};
    config.weight_bound = 0.0f;
    ASSERT_TRUE(store_->Configure(config).ok());
  }
  // Rows 0 to 199 are in the pool, the newer half of them in the cache as well; there is room for
  // 252 less 200.
  void FillAndCommit() {
    Lookup(*store_, Range(0, 100), kDim);
    Lookup(*store_, Range(100, 200), kDim);
    auto batch = store_->tier().RequestCheckpoint();
    ASSERT_TRUE(batch.ok());
    ASSERT_TRUE(store_->tier().WaitCheckpoint(*batch, milliseconds(60'000)).ok());
    ASSERT_TRUE(Eventually([&] { return store_->tier().stats()->num_hot <= kCacheRows; }));
  }
  std::unique_ptr<FileSizeLimit> FillTheDevice() const {
    return std::make_unique<FileSizeLimit>(
        std::filesystem::file_size(directory_.path() + "/rows.pool"));
  }
  // As a device does that returns something else than what was written: behind the pool's header.
  void DamageRows() const {
    const std::string path = directory_.path() + "/rows.pool";
    const std::string garbage(std::filesystem::file_size(path) - pool::PoolHeader::kBytes, 'x');
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    ASSERT_TRUE(file.seekp(pool::PoolHeader::kBytes).write(garbage.data(), garbage.size()).flush());
  }
  Status Step(uint64_t begin, uint64_t end) {
    const auto signs = Range(begin, end);
    const std::vector<float> gradients(signs.size() * kDim, -1.0f);
    const RowBlock block = {.dim = kDim, .signs = signs};
    return store_->Update({&block, 1}, gradients.data());
  }
  void ExpectSteps(uint64_t begin, uint64_t end, float steps) {
    EXPECT_EQ(Peek(*store_, Range(begin, end), kDim),
              std::vector<float>((end - begin) * kDim, steps));
  }

  PoolDirectory directory_;
  std::unique_ptr<EmbeddingStore> store_;
};

TEST_F(FullTierTest, ACheckpointWithoutRoomSaysSoAndIsTriedAgain) {
  FillAndCommit();
  const uint64_t committed = store_->tier().stats()->pool.committed;
  auto full = FillTheDevice();
  ASSERT_TRUE(Step(100, 200).ok());
  auto batch = store_->tier().RequestCheckpoint();
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(store_->tier().WaitCheckpoint(*batch, milliseconds(60'000)).code(),
            StatusCode::kResourceExhausted);
  const TierStats stats = *store_->tier().stats();
  EXPECT_EQ(stats.last_error.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(stats.pool.committed, committed);
  EXPECT_EQ(stats.pool.num_pending, 1u);
  ExpectSteps(100, 200, 1);

  full.reset();
  EXPECT_TRUE(IsCommitted(*store_, *batch));
  EXPECT_TRUE(store_->tier().WaitCheckpoint(*batch, milliseconds(0)).ok());
  EXPECT_TRUE(Eventually([&] { return store_->tier().stats()->last_error.ok(); }));
  Open();
  EXPECT_EQ(store_->size(), 200u);
  ExpectSteps(0, 100, 0);
  ExpectSteps(100, 200, 1);
}

TEST_F(FullTierTest, ADroppedCheckpointWantsNoRoom) {
  FillAndCommit();
  auto full = FillTheDevice();
  ASSERT_TRUE(Step(100, 200).ok());
  auto number = store_->tier().RequestCheckpoint(/*held=*/true);
  ASSERT_TRUE(number.ok());
  EXPECT_EQ(Step(100, 200).code(), StatusCode::kResourceExhausted);
  ASSERT_TRUE(store_->tier().DropCheckpoint(*number).ok());
  EXPECT_EQ(store_->tier().WaitCheckpoint(*number, milliseconds(60'000)).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Step(100, 200).ok());
  ExpectSteps(100, 200, 2);
}

TEST_F(FullTierTest, WaitsForCheckpointsThatThereAreAndNoLonger) {
  EXPECT_EQ(store_->tier().WaitCheckpoint(1'000'000, milliseconds(60'000)).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->tier().WaitCheckpoint(0, milliseconds(60'000)).code(),
            StatusCode::kFailedPrecondition);
  FillAndCommit();
  const uint64_t committed = store_->tier().stats()->pool.committed;
  EXPECT_TRUE(store_->tier().WaitCheckpoint(committed, milliseconds(0)).ok());
  store_->Clear();
  EXPECT_EQ(store_->tier().WaitCheckpoint(committed, milliseconds(60'000)).code(),
            StatusCode::kFailedPrecondition);
  auto in_memory = EmbeddingStore::Create({.capacity = 10, .num_internal_shards = 1});
  EXPECT_EQ((*in_memory)->tier().WaitCheckpoint(1, milliseconds(0)).code(),
            StatusCode::kFailedPrecondition);
}

// Its old version is wanted by the checkpoint, and there is no room for that.
TEST_F(FullTierTest, ARemovalWithoutRoomFailsAlone) {
  FillAndCommit();
  auto full = FillTheDevice();
  ASSERT_TRUE(Step(100, 200).ok());
  ASSERT_TRUE(store_->tier().RequestCheckpoint().ok());
  const auto removed = Range(100, 200), made = Range(1000, 1199);
  {
    auto load = StoreLoad::Begin(*store_);
    ASSERT_TRUE(load.ok());
    Changes changes;
    changes.removals.push_back(removed);
    EXPECT_EQ((*load)->Apply(changes).code(), StatusCode::kResourceExhausted);
  }
  EXPECT_GT(store_->size(), 100u);
  EXPECT_LT(store_->size(), 200u);
  ExpectSteps(0, 100, 0);  // inference goes on
  // An eviction fails its lookup.
  const RowBlock block = {.dim = kDim, .signs = made};
  std::vector<float> rows(made.size() * kDim);
  EXPECT_EQ(store_->Lookup({&block, 1}, LookupMode::kTrain, rows.data()).code(),
            StatusCode::kResourceExhausted);
  full.reset();
  EXPECT_TRUE(Eventually(
      [&] { return store_->Lookup({&block, 1}, LookupMode::kTrain, rows.data()).ok(); }));
  EXPECT_EQ(store_->size(), 200u);
}

TEST_F(FullTierTest, AnUpdateThatFailsHasAppliedNothing) {
  FillAndCommit();
  auto full = FillTheDevice();
  ASSERT_TRUE(Step(100, 200).ok());
  // These come into the cache beside the others, which changed and cannot leave it.
  EXPECT_TRUE(Step(0, 100).ok()) << "applied, and said to have failed";
  EXPECT_EQ(Step(0, 200).code(), StatusCode::kResourceExhausted);
  ExpectSteps(0, 200, 1);
  full.reset();
  EXPECT_TRUE(Eventually([&] { return Step(0, 200).ok(); }));
  ExpectSteps(0, 200, 2);
}

// Rows that are in memory have their gradients when the first one in the pool cannot be read.
TEST_F(FullTierTest, NoCheckpointHasAPartOfAnUpdate) {
  FillAndCommit();
  const std::string pool = directory_.path() + "/rows.pool", whole = pool + ".whole";
  std::filesystem::copy_file(pool, whole);
  DamageRows();
  const Status status = Step(0, 200);
  EXPECT_EQ(status.code(), StatusCode::kIOError) << status.ToString();
  EXPECT_NE(status.message().find("half way"), std::string::npos) << status.ToString();
  EXPECT_EQ(Step(100, 200).ToString(), status.ToString());
  EXPECT_EQ(store_->tier().RequestCheckpoint().status().ToString(), status.ToString());
  store_.reset();
  std::filesystem::rename(whole, pool);
  Open();
  ExpectSteps(0, 200, 0);
}

TEST_F(FullTierTest, AnUpdateThatACheckpointIsInTheWayOfHasAppliedNothing) {
  FillAndCommit();
  auto full = FillTheDevice();
  ASSERT_TRUE(Step(100, 200).ok());
  ASSERT_TRUE(store_->tier().RequestCheckpoint().ok());
  EXPECT_EQ(Step(100, 200).code(), StatusCode::kResourceExhausted);
  ExpectSteps(100, 200, 1);
  full.reset();
  EXPECT_TRUE(Eventually([&] { return Step(100, 200).ok(); }));
  ExpectSteps(100, 200, 2);
}

TEST_F(FullTierTest, ARowWiderThanAnExtentIsRefusedWhenItIsMade) {
  constexpr uint32_t kWide = 1100;
  std::vector<float> row(kWide, 1.0f);
  const std::vector<uint64_t> signs = {1};
  const std::vector<uint32_t> ages = {0};
  const RowBlock block = {.dim = kWide, .signs = signs};
  EXPECT_EQ(store_->Lookup({&block, 1}, LookupMode::kTrain, row.data()).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->SetRows({&block, 1}, row.data()).code(), StatusCode::kInvalidArgument);
  {
    auto load = StoreLoad::Begin(*store_);
    ASSERT_TRUE(load.ok());
    EXPECT_EQ(
        (*load)->Add({.dim = kWide, .signs = signs, .ages = ages, .embeddings = row.data()}).code(),
        StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(store_->size(), 0u);
  FillAndCommit();
}

TEST_F(FullTierTest, CountsTheMemoryOfFreeCellsAndKeptVersions) {
  FillAndCommit();
  const uint64_t before = store_->stats().memory_bytes;
  ASSERT_TRUE(Step(100, 200).ok());
  auto batch = store_->tier().RequestCheckpoint();
  ASSERT_TRUE(batch.ok());
  ASSERT_TRUE(store_->tier().WaitCheckpoint(*batch, milliseconds(60'000)).ok());
  // The cells of the versions before are free.
  EXPECT_GE(store_->tier().stats()->pool.memory_bytes, 100 * sizeof(uint64_t));
  EXPECT_GE(store_->stats().memory_bytes, before + 100 * sizeof(uint64_t));
}

}  // namespace
}  // namespace persia::store
