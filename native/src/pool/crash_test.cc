// A process that works on a pool is killed at random moments, recovery included. Each time the rows
// must be those of the committed checkpoint, compared one by one with a model.
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <random>
#include <string>
#include <thread>

#include "pool/pmem_backing.h"
#include "pool/pool_tools.h"
#include "pool/row_pool.h"
#include "pool/workload_test_util.h"

namespace persia::pool {
namespace {

struct Way {
  const char* name;
  PoolKind kind;
  bool syncs;
};

class CrashTest : public ::testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    if (GetParam().kind == PoolKind::kPmem && !HasPmem()) GTEST_SKIP() << "built without libpmem";
    // Without real persistent memory, tmpfs is where pools of kind pmem are tried.
    const bool has_tmpfs = GetParam().kind == PoolKind::kPmem && ::access("/dev/shm", W_OK) == 0;
    std::string name = (has_tmpfs ? "/dev/shm/" : ::testing::TempDir()) + "pool_crash_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
    options_ = {.kind = GetParam().kind,
                .size_bytes = uint64_t{64} << 20,
                .extent_bytes = 64 << 10,
                .syncs = GetParam().syncs,
                .num_threads = 2};
  }
  void TearDown() override {
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }

  // Until it is killed; exits only because of an error.
  [[noreturn]] void Work(uint64_t random_seed) const {
    RecoveredRows found;
    auto pool = RowPool::Open(directory_, options_, found.Visitor());
    if (!pool.ok()) Exit(pool.status());
    JobRunner runner(job_, pool->get(), found, random_seed);
    for (;;) {
      const Status status = runner.RunBatch();
      if (!status.ok()) Exit(status);
    }
  }
  [[noreturn]] static void Exit(const Status& status) {
    const std::string message = status.ToString() + "\n";
    static_cast<void>(!::write(STDERR_FILENO, message.data(), message.size()));
    ::_exit(1);
  }

  void WaitForCommitAfter(uint64_t committed) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (std::chrono::steady_clock::now() < deadline) {
      auto info = InspectPool(directory_);
      if (info.ok() && info->committed > committed) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  const Job job_{.seed = 3, .num_signs = 400, .batch_size = 60};
  std::string directory_;
  PoolOptions options_;
};

TEST_P(CrashTest, KilledAtAnyMomentItGoesBackToTheCheckpoint) {
  const char* wanted = ::getenv("PERSIA_CRASH_ROUNDS");
  const int rounds = wanted == nullptr ? 20 : std::atoi(wanted);
  ASSERT_TRUE(RowPool::Create(directory_, options_).ok());
  std::mt19937_64 random(7);
  uint64_t committed = 0;
  int num_advances = 0;
  for (int round = 0; round < rounds; ++round) {
    const uint64_t seed = random();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) Work(seed);
    // Every other time not before it has come as far as a commit, however busy the machine is.
    if (round % 2 == 0) WaitForCommitAfter(committed);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 40'000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "round " << round << ": the process ended by itself";

    RecoveredRows found;
    auto pool = RowPool::Open(directory_, options_, found.Visitor());
    ASSERT_TRUE(pool.ok()) << pool.status().ToString();
    ASSERT_GE((*pool)->committed(), committed) << "a committed checkpoint is lost";
    ASSERT_TRUE(HoldsJob(**pool, found, job_)) << "round " << round;
    num_advances += (*pool)->committed() > committed;
    committed = (*pool)->committed();
    // Nothing but the rows themselves is in use: no cell is lost to a crash.
    uint64_t used = 0;
    for (const RecoveredRow& row : found.rows()) used += CellBytes(row.head.num_floats());
    ASSERT_EQ((*pool)->stats().used_bytes, used);
  }
  EXPECT_GT(num_advances, rounds / 4) << "the process was killed before it did anything";
  RecordProperty("committed", static_cast<int>(committed));
}

INSTANTIATE_TEST_SUITE_P(Kinds, CrashTest,
                         ::testing::Values(Way{"file", PoolKind::kFile, true},
                                           Way{"unsynced_file", PoolKind::kFile, false},
                                           Way{"pmem", PoolKind::kPmem, true}),
                         [](const auto& way) { return std::string(way.param.name); });

}  // namespace
}  // namespace persia::pool
