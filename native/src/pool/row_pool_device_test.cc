// What a pool writes to its device, and what it says when the device fails.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "pool/pool_file.h"
#include "pool/pool_header.h"
#include "pool/row_pool.h"
#include "pool/workload_test_util.h"

namespace persia::pool {
namespace {

const Job kDeviceJob{.num_signs = 1000};

// A device that fails from some moment on, and counts what is written to it.
class FailingBacking final : public Backing {
 public:
  FailingBacking(std::unique_ptr<Backing> backing, const std::atomic<bool>* fails,
                 std::atomic<uint64_t>* written = nullptr)
      : backing_(std::move(backing)), fails_(*fails), written_(written) {}
  uint64_t size() const override { return backing_->size(); }
  Status Read(uint64_t offset, std::span<std::byte> out) const override {
    return backing_->Read(offset, out);
  }
  Status Write(uint64_t offset, std::span<const std::byte> bytes) override {
    if (written_ != nullptr) *written_ += bytes.size();
    return backing_->Write(offset, bytes);
  }
  void Drain() override {}
  Status Sync() override { return fails_ ? IOError("the device is broken") : backing_->Sync(); }
  Status Grow(uint64_t size) override { return backing_->Grow(size); }

 private:
  const std::unique_ptr<Backing> backing_;
  const std::atomic<bool>& fails_;
  std::atomic<uint64_t>* const written_;
};

// A pool that was cleared has as many extents as before, and hardly anything to recover.
TEST(RowPoolClearTest, OpenedAgainItWritesNothingOverItsExtents) {
  const PoolDirectory directory;
  const PoolOptions options{.size_bytes = 1 << 20, .extent_bytes = 4096};
  {
    auto pool = RowPool::Create(directory.path, options);
    ASSERT_TRUE(pool.ok());
    for (uint64_t sign = 0; sign < 1000; ++sign) {
      const std::vector<float> values = kDeviceJob.Values(sign, 1);
      const RowWrite write{kDeviceJob.Head(sign, 1), values.data()};
      uint64_t address = 0;
      ASSERT_TRUE((*pool)->Write(std::span(&write, 1), std::span(&address, 1)).ok());
    }
    ASSERT_GT((*pool)->stats().size_bytes, 20u * 4096);
    ASSERT_TRUE((*pool)->Clear().ok());
  }
  const std::atomic<bool> fails{false};
  for (int round = 0; round < 2; ++round) {
    std::atomic<uint64_t> written{0};
    auto file = PoolFile::Open(directory.path, PoolFile::Access::kExclusive, true);
    ASSERT_TRUE(file.ok());
    RecoveredRows found;
    auto pool =
        RowPool::Recover(std::make_unique<FailingBacking>(std::move(*file), &fails, &written),
                         options, found.Visitor());
    ASSERT_TRUE(pool.ok()) << pool.status().ToString();
    EXPECT_LE(written, PoolHeader::kCopyBytes);
    EXPECT_TRUE(found.rows().empty());
  }
}

// What a failed sync has lost, a later one does not report: so nothing is committed after it.
TEST(RowPoolFailureTest, AfterAFailedSyncNothingIsCommitted) {
  const PoolDirectory directory;
  std::atomic<bool> fails{false};
  auto file = PoolFile::Create(directory.path, true);
  ASSERT_TRUE(file.ok());
  const PoolOptions options{.size_bytes = 1 << 20, .extent_bytes = 4096};
  auto pool = RowPool::Format(std::make_unique<FailingBacking>(std::move(*file), &fails), options);
  ASSERT_TRUE(pool.ok());
  ASSERT_TRUE((*pool)->BeginCheckpoint(1).ok());
  fails = true;
  EXPECT_EQ((*pool)->Commit(1).code(), StatusCode::kIOError);
  fails = false;
  EXPECT_EQ((*pool)->Commit(1).code(), StatusCode::kIOError);
  EXPECT_EQ((*pool)->BeginCheckpoint(2).code(), StatusCode::kIOError);
  EXPECT_EQ((*pool)->committed(), 0u);
}

}  // namespace
}  // namespace persia::pool
