// A process that trains a store with a tier is killed at random moments, recovery included. Each
// time the store must be that of its committed checkpoint, compared row by row with one in memory;
// what is evicted afterwards must be the same too.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>

#include "pool/pmem_backing.h"
#include "pool/pool_tools.h"
#include "store/tier_script_test_util.h"
#include "store/tier_test_util.h"

namespace persia::store {
namespace {

class TierCrashTest : public ::testing::TestWithParam<pool::PoolKind> {
 protected:
  StatusOr<std::unique_ptr<EmbeddingStore>> Open() const {
    auto store =
        EmbeddingStore::Open(Script::kOptions, directory_.Tier(Script::kCacheRows, GetParam()));
    if (store.ok()) PERSIA_RETURN_IF_ERROR((*store)->Configure(Script::Config()));
    return store;
  }
  // Until it is killed; exits only because of an error.
  [[noreturn]] void Work() const {
    auto store = Open();
    if (!store.ok()) Exit(store.status());
    std::mt19937_64 random(Script::BatchOf(**store));
    for (uint64_t batch = Script::BatchOf(**store) + 1;; ++batch) {
      if (const Status status = Script::Train(**store, batch); !status.ok()) Exit(status);
      if (random() % 4 != 0) continue;
      const Status status = (*store)->tier().RequestCheckpoint().status();
      if (!status.ok() && status.code() != StatusCode::kResourceExhausted) Exit(status);
    }
  }
  [[noreturn]] static void Exit(const Status& status) {
    const std::string message = status.ToString() + "\n";
    static_cast<void>(!::write(STDERR_FILENO, message.data(), message.size()));
    ::_exit(1);
  }
  uint64_t Committed() const {
    auto info = pool::InspectPool(directory_.path());
    return info.ok() ? info->committed : 0;
  }

  PoolDirectory directory_;
};

TEST_P(TierCrashTest, KilledAtAnyMomentItGoesBackToTheCheckpoint) {
  if (GetParam() == pool::PoolKind::kPmem && !pool::HasPmem()) GTEST_SKIP() << "without libpmem";
  const char* wanted = std::getenv("PERSIA_CRASH_ROUNDS");
  const int rounds = wanted == nullptr ? 10 : std::atoi(wanted);
  std::mt19937_64 random(7);
  ScriptModel model;
  uint64_t committed = 0, last_batch = 0;
  int num_advances = 0;
  for (int round = 0; round < rounds; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) Work();
    // Every other time not before it has come as far as a commit, however busy the machine is.
    if (round % 2 == 0) {
      ASSERT_TRUE(Eventually([&] { return Committed() > committed; }));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "round " << round << ": the process ended by itself";

    auto store = Open();
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    ASSERT_GE((*store)->tier().stats()->pool.committed, committed) << "a checkpoint is lost";
    committed = (*store)->tier().stats()->pool.committed;
    const uint64_t batch = Script::BatchOf(**store);
    ASSERT_EQ(Script::Rows(**store), model.RowsAt(batch)) << "round " << round;
    num_advances += batch > last_batch;
    last_batch = batch;
  }
  EXPECT_GT(num_advances, rounds / 4) << "the process was killed before it did anything";
}

INSTANTIATE_TEST_SUITE_P(Kinds, TierCrashTest,
                         ::testing::Values(pool::PoolKind::kFile, pool::PoolKind::kPmem),
                         [](const auto& kind) {
                           return kind.param == pool::PoolKind::kFile ? "file" : "pmem";
                         });

}  // namespace
}  // namespace persia::store
