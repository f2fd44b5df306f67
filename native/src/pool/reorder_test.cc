// What a power failure may leave of a pool: everything up to the last Sync(), and of the stores
// since then any part, in any order, 8 bytes at a time. Processors reorder less, and so do disks.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "pool/row_pool.h"
#include "pool/workload_test_util.h"

namespace persia::pool {
namespace {

using Image = std::vector<std::byte>;

// Remembers what each word of 8 bytes has been since the last Sync.
class RecordingBacking final : public Backing {
 public:
  // `after_store` is called after each Write(), Grow() and Sync().
  RecordingBacking(Image image, std::function<void()> after_store)
      : durable_(image), bytes_(std::move(image)), after_store_(std::move(after_store)) {}

  uint64_t size() const override { return bytes_.size(); }
  Status Read(uint64_t offset, std::span<std::byte> out) const override {
    if (offset + out.size() > bytes_.size()) return Corruption("read behind the end");
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
    return Status::Ok();
  }
  Status Write(uint64_t offset, std::span<const std::byte> bytes) override {
    if (offset % 8 != 0 || bytes.size() % 8 != 0) return Internal("not whole words");
    if (offset + bytes.size() > bytes_.size()) return Internal("write behind the end");
    std::memcpy(bytes_.data() + offset, bytes.data(), bytes.size());
    for (size_t place = 0; place < bytes.size(); place += 8) {
      uint64_t word;
      std::memcpy(&word, bytes.data() + place, 8);
      stores_[offset + place].push_back(word);
    }
    after_store_();
    return Status::Ok();
  }
  void Drain() override {}
  Status Sync() override {
    durable_ = bytes_;
    stores_.clear();
    after_store_();
    return Status::Ok();
  }
  Status Grow(uint64_t size) override {
    bytes_.resize(size);
    after_store_();
    return Status::Ok();
  }

  // Each word that was stored is as it was at the last Sync, with probability `lost`, or any of the
  // values stored since.
  Image AfterFailure(double lost, std::mt19937_64& random) const {
    Image image = durable_;
    // A file's new size may have got there before the Sync or not; what is stored there needs it.
    if (random() % 2 == 0 || !stores_.empty()) image.resize(bytes_.size());
    std::bernoulli_distribution is_lost(lost);
    for (const auto& [offset, words] : stores_) {
      if (is_lost(random)) continue;
      const uint64_t word = words[random() % words.size()];
      std::memcpy(image.data() + offset, &word, 8);
    }
    return image;
  }

 private:
  Image durable_;
  Image bytes_;
  std::map<uint64_t, std::vector<uint64_t>> stores_;
  const std::function<void()> after_store_;
};

const PoolOptions kOptions{.size_bytes = 1 << 20, .extent_bytes = 4096};

// Fails and recovers at random moments; counts them.
class Failures {
 public:
  Failures(const Job& job, uint64_t seed, int depth) : job_(job), random_(seed), depth_(depth) {}

  // The checkpoint that must be there: the last one committed, or that which was being.
  std::function<uint64_t()> committed = [] { return 0; };
  std::function<uint64_t()> committing = [] { return 0; };

  void MayHappen(const RecordingBacking& backing) {
    if (random_() % 4 != 0) return;
    static constexpr double kLost[] = {0, 0.1, 0.5, 0.9, 1};
    Recover(backing.AfterFailure(kLost[random_() % 5], random_));
  }
  uint64_t count() const { return count_; }
  uint64_t num_nested() const { return num_nested_; }

 private:
  void Recover(Image image) {
    ++count_;
    // Recovery may itself be cut short, and again.
    Failures nested(job_, random_(), depth_ - 1);
    nested.committed = committed;
    nested.committing = committing;
    RecordingBacking* recording = nullptr;
    auto backing = std::make_unique<RecordingBacking>(std::move(image), [&] {
      if (depth_ > 0) nested.MayHappen(*recording);
    });
    recording = backing.get();
    RecoveredRows found;
    auto pool = RowPool::Recover(std::move(backing), kOptions, found.Visitor());
    ASSERT_TRUE(pool.ok()) << pool.status().ToString();
    const uint64_t at = (*pool)->committed();
    ASSERT_TRUE(at == committed() || at == committing()) << at << " " << committed();
    ASSERT_TRUE(HoldsJob(**pool, found, job_));
    // What was undone stays undone when training continues from there.
    if (depth_ == 0 || random_() % 8 != 0) {
      num_nested_ += nested.count();
      return;
    }
    JobRunner runner(job_, pool->get(), found, random_());
    uint64_t last = at;
    nested.committed = [&] { return last; };
    nested.committing = [&] { return runner.committing(); };
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(runner.RunBatch().ok());
      last = (*pool)->committed();
    }
    num_nested_ += nested.count();
  }

  const Job job_;
  std::mt19937_64 random_;
  const int depth_;
  uint64_t count_ = 0;
  uint64_t num_nested_ = 0;
};

class ReorderTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(ReorderTest, AnyPartOfTheStoresSinceTheLastSyncRecovers) {
  const Job job{.seed = GetParam()};
  Failures failures(job, GetParam(), 1);
  RecordingBacking* recording = nullptr;
  bool is_formatted = false;
  auto backing = std::make_unique<RecordingBacking>(Image(), [&] {
    if (is_formatted) failures.MayHappen(*recording);
  });
  recording = backing.get();
  auto pool = RowPool::Format(std::move(backing), kOptions);
  ASSERT_TRUE(pool.ok()) << pool.status().ToString();
  is_formatted = true;
  JobRunner runner(job, pool->get(), RecoveredRows(), GetParam());
  uint64_t committed = 0;
  failures.committed = [&] { return committed; };
  failures.committing = [&] { return runner.committing(); };
  for (int i = 0; i < 60 && !HasFatalFailure(); ++i) {
    ASSERT_TRUE(runner.RunBatch().ok());
    committed = (*pool)->committed();
  }
  EXPECT_GT(committed, 20u);
  EXPECT_GT(failures.count(), 100u);
  EXPECT_GT(failures.num_nested(), 100u);
}

TEST_P(ReorderTest, ClearedItIsThePoolBeforeOrAnEmptyOne) {
  const Job job{.seed = GetParam()};
  Failures failures(job, GetParam(), 1);
  RecordingBacking* recording = nullptr;
  bool is_watched = false;
  auto backing = std::make_unique<RecordingBacking>(Image(), [&] {
    if (is_watched) failures.MayHappen(*recording);
  });
  recording = backing.get();
  auto pool = RowPool::Format(std::move(backing), kOptions);
  ASSERT_TRUE(pool.ok()) << pool.status().ToString();
  uint64_t committed = 0;
  failures.committed = [&] { return committed; };
  for (int round = 0; round < 8 && !HasFatalFailure(); ++round) {
    JobRunner runner(job, pool->get(), RecoveredRows(), GetParam());
    failures.committing = [&] { return runner.committing(); };
    for (int i = 0; i < 12; ++i) {
      ASSERT_TRUE(runner.RunBatch().ok());
      committed = (*pool)->committed();
    }
    ASSERT_GT(committed, 0u);
    is_watched = true;
    ASSERT_TRUE((*pool)->Clear().ok());
    committed = 0;
    EXPECT_EQ((*pool)->stats().used_bytes, 0u);
  }
  EXPECT_GT(failures.count(), 50u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, ReorderTest, ::testing::Range<uint64_t>(1, 9));

}  // namespace
}  // namespace persia::pool
