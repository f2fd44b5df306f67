#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

namespace persia {
namespace {

TEST(ThreadPoolTest, DoesEachPieceOnceWhateverTheNumberOfThreads) {
  for (const uint32_t num_threads : {1u, 2u, 5u}) {
    ThreadPool pool(num_threads);
    EXPECT_EQ(pool.num_threads(), num_threads);
    for (size_t round = 0; round < 500; ++round) {
      std::vector<int> done(round % 40, 0);  // written without locks: by one thread each
      pool.For(done.size(), [&](size_t i) { ++done[i]; });
      EXPECT_EQ(done, std::vector<int>(done.size(), 1));
    }
  }
}

TEST(ThreadPoolTest, MayBeDestroyedInAForkedProcess) {
  auto* pool = new ThreadPool(3);
  pool->For(10, [](size_t) {});
  const pid_t child = fork();
  if (child == 0) {
    delete pool;
    _exit(7);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
  delete pool;
}

TEST(ThreadPoolTest, EndsWithoutEverHavingWorked) { ThreadPool pool(3); }

}  // namespace
}  // namespace persia
