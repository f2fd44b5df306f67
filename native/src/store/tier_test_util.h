// Directories for the pools of tests, and stores over them.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>

#include "base/eventually_test_util.h"
#include "store/embedding_store.h"

namespace persia::store {

class PoolDirectory {
 public:
  PoolDirectory() {
    std::string name = ::testing::TempDir() + "tier_XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~PoolDirectory() { std::filesystem::remove_all(path_); }
  PoolDirectory(const PoolDirectory&) = delete;
  PoolDirectory& operator=(const PoolDirectory&) = delete;

  const std::string& path() const { return path_; }
  TierOptions Tier(uint64_t cache_rows, pool::PoolKind kind = pool::PoolKind::kFile) const {
    return {.directory = path_,
            .pool = {.kind = kind,
                     .size_bytes = uint64_t{64} << 20,
                     .extent_bytes = 512 << 10,
                     .syncs = false,
                     .num_threads = 2},
            .cache_rows = cache_rows};
  }

 private:
  std::string path_;
};

inline bool IsCommitted(const EmbeddingStore& store, uint64_t batch) {
  return Eventually([&] { return store.tier().stats()->pool.committed >= batch; });
}

}  // namespace persia::store
