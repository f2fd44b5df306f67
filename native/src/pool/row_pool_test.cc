#include "pool/row_pool.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "pool/pmem_backing.h"
#include "pool/pool_file.h"
#include "pool/pool_tools.h"
#include "pool/workload_test_util.h"

namespace persia::pool {
namespace {

const Job kJob{.num_signs = 1000};

class RowPoolTest : public ::testing::TestWithParam<PoolKind> {
 protected:
  void SetUp() override {
    if (GetParam() == PoolKind::kPmem && !HasPmem()) GTEST_SKIP() << "built without libpmem";
  }

  PoolOptions Options(uint64_t size_bytes = 1 << 20) const {
    return {
        .kind = GetParam(), .size_bytes = size_bytes, .extent_bytes = 4096, .schema = "adagrad"};
  }
  void Create(uint64_t size_bytes = 1 << 20) {
    auto pool = RowPool::Create(directory_, Options(size_bytes));
    ASSERT_TRUE(pool.ok()) << pool.status().ToString();
    pool_ = std::move(*pool);
  }
  Status Reopen(const PoolOptions& options) {
    pool_.reset();
    found_ = std::make_unique<RecoveredRows>();
    auto pool = RowPool::Open(directory_, options, found_->Visitor());
    if (pool.ok()) pool_ = std::move(*pool);
    return pool.status();
  }
  Status Reopen() { return Reopen(Options()); }

  void DropPageCache() {
    const int fd = ::open((directory_ + "/rows.pool").c_str(), O_RDONLY);
    ASSERT_EQ(::fsync(fd), 0);
    ASSERT_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    ::close(fd);
  }
  StatusOr<uint64_t> Write(uint64_t sign, uint64_t version, uint64_t replaces = kNoAddress) {
    const std::vector<float> values = kJob.Values(sign, version);
    const RowWrite write{kJob.Head(sign, version), values.data(), replaces};
    uint64_t address = 0;
    PERSIA_RETURN_IF_ERROR(pool_->Write(std::span(&write, 1), std::span(&address, 1)));
    return address;
  }
  Status Remove(uint64_t address, uint64_t sign, uint64_t version) {
    const RowRemoval removal{address, sign, version};
    return pool_->Remove(std::span(&removal, 1));
  }
  Status Checkpoint(uint64_t batch) {
    PERSIA_RETURN_IF_ERROR(pool_->BeginCheckpoint(batch));
    return pool_->Commit(batch);
  }
  void Overwrite(uint64_t offset, const std::string& bytes) const {
    std::fstream file(directory_ + "/rows.pool", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset));
    file << bytes;
  }

  const PoolDirectory folder_;  // before the pool, which must have ended when it is removed
  const std::string& directory_ = folder_.path;
  std::unique_ptr<RowPool> pool_;
  std::unique_ptr<RecoveredRows> found_;
};

#define EXPECT_CODE(code_, ...)                             \
  do {                                                      \
    const Status status_ = (__VA_ARGS__);                   \
    EXPECT_EQ(status_.code(), code_) << status_.ToString(); \
  } while (false)

TEST_P(RowPoolTest, ComesBackAsOfItsCheckpoint) {
  Create();
  auto first = Write(1, 1);
  auto second = Write(2, 1);
  auto third = Write(3, 2);
  ASSERT_TRUE(Checkpoint(2).ok());
  ASSERT_TRUE(Write(1, 3, *first).ok());    // undone
  ASSERT_TRUE(Remove(*second, 2, 3).ok());  // undone
  ASSERT_TRUE(Write(4, 3).ok());            // undone
  EXPECT_EQ(pool_->stats().num_kept, 2u);
  ASSERT_TRUE(Reopen().ok());
  EXPECT_EQ(pool_->committed(), 2u);
  std::map<uint64_t, RecoveredRow> rows;
  for (const RecoveredRow& row : found_->rows()) rows[row.head.sign] = row;
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[1].head.version, 1u);
  EXPECT_EQ(rows[3].address, *third);
  std::vector<float> values(kJob.Values(2, 1).size());
  RowHead head;
  ASSERT_TRUE(pool_->Read(rows[2].address, 2, &head, values).ok());
  EXPECT_EQ(values, kJob.Values(2, 1));
  EXPECT_EQ(head.scalar, kJob.Head(2, 1).scalar);
}

TEST_P(RowPoolTest, ToolsSeeWhatIsThere) {
  Create();
  auto first = Write(1, 1);
  ASSERT_TRUE(Write(2, 1).ok());
  ASSERT_TRUE(Checkpoint(1).ok());
  ASSERT_TRUE(Write(3, 2).ok());  // not of the checkpoint
  auto info = InspectPool(directory_);
  ASSERT_TRUE(info.ok()) << info.status().ToString();
  EXPECT_EQ(info->committed, 1u);
  EXPECT_EQ(info->num_rows, 2u);
  EXPECT_EQ(info->schema, "adagrad");
  EXPECT_CODE(StatusCode::kUnavailable, CheckPool(directory_).status());
  pool_.reset();
  auto report = CheckPool(directory_);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->num_living, 2u);
  EXPECT_EQ(report->num_ended, 1u);
  EXPECT_TRUE(report->is_whole());
  Overwrite(*first + sizeof(RowRecord), "damage");
  report = CheckPool(directory_);
  ASSERT_TRUE(report.ok());
  EXPECT_FALSE(report->is_whole());
  ASSERT_TRUE(GrowPool(directory_, 2 << 20).ok());
  EXPECT_EQ(InspectPool(directory_)->size_bytes, uint64_t{2} << 20);
}

TEST_P(RowPoolTest, WithoutACheckpointComesBackEmpty) {
  Create();
  ASSERT_TRUE(Write(1, 1).ok());
  ASSERT_TRUE(Reopen().ok());
  EXPECT_TRUE(found_->rows().empty());
  EXPECT_EQ(pool_->stats().used_bytes, 0u);
}

TEST_P(RowPoolTest, VersionsAreKeptForAllPendingCheckpoints) {
  Create();
  auto first = Write(1, 1);
  ASSERT_TRUE(pool_->BeginCheckpoint(1).ok());
  auto second = Write(1, 2, *first);
  ASSERT_TRUE(pool_->BeginCheckpoint(2).ok());
  auto third = Write(1, 3, *second);
  ASSERT_TRUE(Write(1, 4, *third).ok());  // no checkpoint has seen version 3
  EXPECT_EQ(pool_->stats().num_kept, 2u);
  EXPECT_EQ(pool_->oldest_pending(), 1u);
  EXPECT_EQ(pool_->last_checkpoint(), 2u);
  EXPECT_CODE(StatusCode::kInvalidArgument, pool_->Commit(2));  // 1 comes first
  ASSERT_TRUE(pool_->Commit(1).ok());
  EXPECT_EQ(pool_->stats().num_kept, 2u);
  ASSERT_TRUE(pool_->Commit(2).ok());
  EXPECT_EQ(pool_->stats().num_kept, 1u);
  ASSERT_TRUE(Checkpoint(4).ok());
  EXPECT_EQ(pool_->stats().num_kept, 0u);
  ASSERT_TRUE(Reopen().ok());
  ASSERT_EQ(found_->rows().size(), 1u);
  EXPECT_EQ(found_->rows()[0].head.version, 4u);
}

// What a row was at a checkpoint, pending or committed, stays; what it was in between does not.
TEST_P(RowPoolTest, WritesOverVersionsThatNoCheckpointHas) {
  Create();
  const auto write = [this](uint64_t version, uint64_t replaces) {
    auto address = Write(1, version, replaces);
    EXPECT_TRUE(address.ok()) << address.status().ToString();
    return *address;
  };
  const uint64_t first = write(1, kNoAddress);
  EXPECT_EQ(write(2, first), first);
  ASSERT_TRUE(pool_->BeginCheckpoint(3).ok());
  const uint64_t fourth = write(4, first);
  EXPECT_NE(fourth, first);
  EXPECT_EQ(write(5, fourth), fourth);
  EXPECT_EQ(pool_->stats().num_kept, 1u);
  const auto version_when_opened = [&] {
    EXPECT_TRUE(Reopen().ok());
    EXPECT_EQ(found_->rows().size(), 1u);
    return found_->rows().begin()->head.version;
  };
  ASSERT_TRUE(pool_->Commit(3).ok());
  EXPECT_EQ(version_when_opened(), 2u);
  const uint64_t sixth = write(6, first);
  EXPECT_NE(sixth, first);
  EXPECT_EQ(write(7, sixth), sixth);
  ASSERT_TRUE(Checkpoint(7).ok());
  EXPECT_EQ(pool_->stats().num_kept, 0u);
  EXPECT_EQ(version_when_opened(), 7u);
  EXPECT_CODE(StatusCode::kCorruption, Write(1, 8, first).status());  // it has ended
}

TEST_P(RowPoolTest, RefusesCheckpointsOutOfOrderAndBeyondTheWindow) {
  Create();
  ASSERT_TRUE(Write(1, 5).ok());
  EXPECT_CODE(StatusCode::kInvalidArgument, pool_->BeginCheckpoint(4));  // batch 5 has begun
  for (uint64_t batch = 5; batch < 13; ++batch) ASSERT_TRUE(pool_->BeginCheckpoint(batch).ok());
  EXPECT_CODE(StatusCode::kResourceExhausted, pool_->BeginCheckpoint(13));
  ASSERT_TRUE(pool_->Commit(5).ok());
  EXPECT_CODE(StatusCode::kInternal, Write(2, 5).status());  // behind the committed one
  EXPECT_CODE(StatusCode::kInvalidArgument, pool_->BeginCheckpoint(12));
}

TEST_P(RowPoolTest, FullItRefusesWholeWritesAndGrowsWhenOpenedAnew) {
  const uint64_t one_extent = PoolHeader::kBytes + 4096;
  Create(one_extent);
  std::vector<uint64_t> addresses;
  for (uint64_t sign = 0;; sign += 3) {  // all of one size
    auto address = Write(sign, 1);
    if (!address.ok()) {
      EXPECT_CODE(StatusCode::kResourceExhausted, address.status());
      break;
    }
    addresses.push_back(*address);
  }
  ASSERT_GT(addresses.size(), 40u);
  ASSERT_TRUE(Remove(addresses[0], 0, 1).ok());
  const uint64_t used = pool_->stats().used_bytes;
  // There is room for one of the two.
  const std::vector<float> values = kJob.Values(0, 1);
  const RowWrite two[] = {{kJob.Head(3000, 1), values.data()}, {kJob.Head(3003, 1), values.data()}};
  uint64_t where[2];
  EXPECT_CODE(StatusCode::kResourceExhausted, pool_->Write(two, where));
  EXPECT_EQ(pool_->stats().used_bytes, used);
  EXPECT_TRUE(pool_->Write(std::span(two, 1), where).ok());
  ASSERT_TRUE(Checkpoint(1).ok());
  EXPECT_CODE(StatusCode::kInvalidArgument, Reopen(Options(one_extent - 1)));
  ASSERT_TRUE(Reopen(Options(2 * one_extent)).ok());
  EXPECT_EQ(found_->rows().size(), addresses.size());
  EXPECT_TRUE(Write(3003, 2).ok());
  ASSERT_TRUE(Reopen(Options(0)).ok());
  EXPECT_EQ(pool_->stats().max_bytes, 2 * one_extent);
}

TEST_P(RowPoolTest, SaysWhyItCannotBeOpened) {
  EXPECT_CODE(StatusCode::kNotFound, Reopen());
  EXPECT_CODE(StatusCode::kInvalidArgument, RowPool::Create(directory_, Options(4096)).status());
  EXPECT_CODE(StatusCode::kNotFound, RowPool::Create(directory_ + "/nowhere", Options()).status());
  Create();
  EXPECT_CODE(StatusCode::kFailedPrecondition, RowPool::Create(directory_, Options()).status());
  RecoveredRows found;
  EXPECT_CODE(StatusCode::kUnavailable,
              RowPool::Open(directory_, Options(), found.Visitor()).status());
  PoolOptions options = Options();
  options.schema = "adam";
  EXPECT_CODE(StatusCode::kFailedPrecondition, Reopen(options));
  for (const uint64_t copy : {uint64_t{0}, PoolHeader::kCopyBytes}) Overwrite(copy + 8, "\x09");
  EXPECT_CODE(StatusCode::kFailedPrecondition, Reopen());  // format version 9
  for (const uint64_t copy : {uint64_t{0}, PoolHeader::kCopyBytes}) Overwrite(copy, "garbage");
  EXPECT_CODE(StatusCode::kCorruption, Reopen());
}

TEST_P(RowPoolTest, SchemaMayComeLater) {
  PoolOptions options = Options();
  options.schema.clear();
  auto pool = RowPool::Create(directory_, options);
  ASSERT_TRUE(pool.ok());
  pool->reset();
  ASSERT_TRUE(Reopen().ok());  // adagrad
  PoolOptions other = Options();
  other.schema = "adam";
  EXPECT_CODE(StatusCode::kFailedPrecondition, Reopen(other));
  EXPECT_TRUE(Reopen(options).ok());
  other.schema.assign(PoolHeader::kMaxSchemaBytes + 1, 'x');
  EXPECT_CODE(StatusCode::kFailedPrecondition, Reopen(other));
}

TEST_P(RowPoolTest, OneDamagedCopyOfTheHeaderDoesNotMatter) {
  Create();
  ASSERT_TRUE(Write(1, 1).ok());
  ASSERT_TRUE(Checkpoint(1).ok());
  for (const uint64_t copy : {uint64_t{0}, PoolHeader::kCopyBytes}) {
    ASSERT_TRUE(Reopen().ok());  // writes both, in turns
    ASSERT_TRUE(Reopen().ok());
    pool_.reset();
    Overwrite(copy + 100, "damage");
    ASSERT_TRUE(Reopen().ok());
    EXPECT_EQ(found_->rows().size(), 1u);
  }
}

TEST_P(RowPoolTest, DamagedAndMissingRowsAreSeen) {
  Create();
  auto address = Write(1, 1);
  auto other = Write(2, 1);
  ASSERT_TRUE(Checkpoint(1).ok());
  Overwrite(*address + sizeof(RowRecord), "damage");
  RowHead head;
  std::vector<float> values(kJob.Head(1, 1).num_floats());
  EXPECT_CODE(StatusCode::kCorruption, pool_->Read(*address, 1, &head, values));
  EXPECT_CODE(StatusCode::kCorruption, pool_->Read(*other, 1, &head, values));  // of sign 2
  EXPECT_CODE(StatusCode::kCorruption, Reopen());                               // a row is missing
  std::filesystem::resize_file(directory_ + "/rows.pool", PoolHeader::kBytes + 100);
  EXPECT_CODE(StatusCode::kCorruption, Reopen());
}

TEST_P(RowPoolTest, AMillionRemovalsLeaveNothingBehind) {
  Create();
  constexpr uint64_t kRows = 1000, kBatches = 1000;
  std::vector<std::vector<float>> values;
  std::vector<RowWrite> writes(kRows);
  std::vector<RowRemoval> removals(kRows);
  std::vector<uint64_t> addresses(kRows);
  for (uint64_t sign = 0; sign < kRows; ++sign) values.push_back(kJob.Values(sign, 1));
  uint64_t most_bytes = 0;
  for (uint64_t batch = 1; batch <= kBatches; ++batch) {
    for (uint64_t i = 0; i < kRows; ++i) writes[i] = {kJob.Head(i, batch), values[i].data()};
    ASSERT_TRUE(pool_->Write(writes, addresses).ok());
    for (uint64_t i = 0; i < kRows; ++i) removals[i] = {addresses[i], i, batch};
    ASSERT_TRUE(pool_->Remove(removals).ok());
    if (batch % 100 == 0) {
      ASSERT_TRUE(Checkpoint(batch).ok());
    }
    if (batch == 100) most_bytes = pool_->stats().size_bytes;
  }
  EXPECT_EQ(pool_->stats().used_bytes, 0u);
  EXPECT_EQ(pool_->stats().num_kept, 0u);
  EXPECT_EQ(pool_->stats().size_bytes, most_bytes);
}

TEST_P(RowPoolTest, ThreadsWriteWhileCheckpointsAreCommitted) {
  Create(uint64_t{4} << 20);
  constexpr uint64_t kThreads = 4, kRounds = 50;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    const uint64_t version = round;
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        const uint64_t base = thread * 100;
        for (uint64_t sign = base; sign < base + 20; ++sign) {
          auto address = Write(sign, version);
          ASSERT_TRUE(address.ok()) << address.status().ToString();
          auto again = Write(sign, version, *address);
          ASSERT_TRUE(again.ok());
          if (sign % 2 == 0 || round < kRounds) {
            ASSERT_TRUE(Remove(*again, sign, version).ok());
          }
        }
      });
    }
    if (const auto pending = pool_->oldest_pending()) {
      EXPECT_TRUE(pool_->Commit(*pending).ok());
    }
    static_cast<void>(pool_->stats());
    for (std::thread& thread : threads) thread.join();
    ASSERT_TRUE(pool_->BeginCheckpoint(round).ok());
  }
  ASSERT_TRUE(pool_->Commit(kRounds).ok());
  ASSERT_TRUE(Reopen(Options(0)).ok());
  EXPECT_EQ(found_->rows().size(), kThreads * 10);
}

// For ThreadSanitizer as much as for the values.
TEST_P(RowPoolTest, ReadsWhileItGrows) {
  Create();
  auto first = Write(0, 1);
  ASSERT_TRUE(first.ok());
  const uint64_t address = *first;
  const std::vector<float> expected = kJob.Values(0, 1);
  const uint64_t size = pool_->stats().size_bytes;
  std::atomic<bool> is_done = false;
  std::thread reader([&] {
    do {
      RowHead head;
      std::vector<float> values(expected.size());
      const Status status = pool_->Read(address, 0, &head, values);
      EXPECT_TRUE(status.ok()) << status.ToString();
      EXPECT_EQ(values, expected);
    } while (!is_done);
  });
  for (uint64_t sign = 1; sign < 1000; ++sign) EXPECT_TRUE(Write(sign, 1).ok());
  is_done = true;
  reader.join();
  EXPECT_GT(pool_->stats().size_bytes, size);
}

// Rows may reach the device, and the header of their extent may not.
TEST_P(RowPoolTest, RowsOfAnExtentWithoutAHeaderStayLostWhenItIsUsedAgain) {
  Create();
  for (uint64_t sign = 0; sign < 30; sign += 3) ASSERT_TRUE(Write(sign, 1).ok());
  pool_.reset();
  Overwrite(PoolHeader::kBytes, std::string(ExtentHeader::kBytes, '\0'));
  ASSERT_TRUE(Reopen().ok());
  auto address = Write(300, 1);
  ASSERT_TRUE(address.ok());
  EXPECT_LT(*address, PoolHeader::kBytes + 4096) << "the same extent";
  ASSERT_TRUE(Checkpoint(1).ok());
  const Status status = Reopen();
  ASSERT_TRUE(status.ok()) << status.ToString();
  ASSERT_EQ(found_->rows().size(), 1u);
  EXPECT_EQ(found_->rows()[0].head.sign, 300u);
}

TEST_P(RowPoolTest, KnowsWhetherCheckpointsHaveRows) {
  Create();
  EXPECT_FALSE(pool_->HasRowsInCheckpoints());
  auto address = Write(1, 1);
  ASSERT_TRUE(address.ok());
  EXPECT_FALSE(pool_->HasRowsInCheckpoints()) << "nothing brings it back";
  ASSERT_TRUE(pool_->BeginCheckpoint(1).ok());
  EXPECT_TRUE(pool_->HasRowsInCheckpoints());
  ASSERT_TRUE(Remove(*address, 1, 2).ok());
  ASSERT_TRUE(pool_->Commit(1).ok());
  EXPECT_TRUE(pool_->HasRowsInCheckpoints());
  ASSERT_TRUE(Checkpoint(2).ok());
  EXPECT_FALSE(pool_->HasRowsInCheckpoints());
}

TEST_P(RowPoolTest, CountsTheMemoryOfFreeCellsAndKeptVersions) {
  Create();
  constexpr uint64_t kRows = 1000;
  std::vector<uint64_t> addresses;
  for (uint64_t sign = 0; sign < kRows; ++sign) addresses.push_back(Write(sign, 1).value());
  ASSERT_TRUE(Checkpoint(1).ok());
  const uint64_t before = pool_->stats().memory_bytes;
  for (uint64_t sign = 0; sign < kRows; ++sign) {
    ASSERT_TRUE(Remove(addresses[sign], sign, 2).ok());
  }
  EXPECT_GE(pool_->stats().memory_bytes, before + kRows * 3 * sizeof(uint64_t));
  ASSERT_TRUE(Checkpoint(2).ok());
  EXPECT_GE(pool_->stats().memory_bytes, kRows * sizeof(uint64_t));
}

// From the device as well as from the page cache.
TEST_P(RowPoolTest, ReadsManyRowsAtOnce) {
  Create();
  std::vector<uint64_t> addresses(300);
  std::vector<std::vector<float>> values(addresses.size());
  std::vector<RowRead> reads;
  for (uint64_t sign = 0; sign < addresses.size(); ++sign) {
    addresses[sign] = Write(sign, 1).value();
    values[sign].resize(kJob.Head(sign, 1).num_floats());
    reads.push_back({.address = addresses[sign], .sign = sign, .values = values[sign]});
  }
  reads[7].sign = 8;                             // another row's place
  reads[9].address = uint64_t{1} << 40;          // none: behind the end
  reads[11].values = reads[11].values.first(1);  // another size
  for (const bool is_cached : {true, false}) {
    if (!is_cached) DropPageCache();
    for (const bool is_past_the_end : {true, false}) {
      const std::span some = std::span(reads).subspan(is_past_the_end ? 0 : 10);
      pool_->ReadMany(some);
      for (const RowRead& read : some) {
        const bool is_wrong = is_past_the_end || &read == &reads[11];
        ASSERT_EQ(read.is_found, !is_wrong) << read.sign;
        if (is_wrong) continue;
        EXPECT_EQ(read.head.version, 1u);
        EXPECT_EQ(std::vector<float>(read.values.begin(), read.values.end()),
                  kJob.Values(read.sign, 1));
      }
    }
  }
  reads[9].address = addresses[9];
  reads[9].is_found = false;
  pool_->ReadMany(reads);
  for (uint64_t sign = 0; sign < reads.size(); ++sign) {
    EXPECT_EQ(reads[sign].is_found, sign != 7 && sign != 11) << sign;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, RowPoolTest, ::testing::Values(PoolKind::kFile, PoolKind::kPmem),
                         [](const auto& kind) {
                           return std::string(kind.param == PoolKind::kFile ? "file" : "pmem");
                         });

}  // namespace
}  // namespace persia::pool
