// A store with a tier that tests train and open again.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "pool/pool_tools.h"
#include "store/store_tier.h"
#include "store/tier_script_test_util.h"
#include "store/tier_test_util.h"

namespace persia::store {

class TierTest : public ::testing::Test {
 protected:
  void Open() {
    store_.reset();
    auto store = EmbeddingStore::Open(Script::kOptions, directory_.Tier(Script::kCacheRows));
    ASSERT_TRUE(store.ok()) << store.status().ToString();
    store_ = std::move(*store);
  }
  void Create() {
    Open();
    ASSERT_TRUE(store_->Configure(Script::Config()).ok());
  }
  Status StatusOfOpen(const TierOptions& options) {
    store_.reset();
    return EmbeddingStore::Open(Script::kOptions, options).status();
  }
  void Train(uint64_t first, uint64_t last) {
    for (uint64_t batch = first; batch <= last; ++batch) {
      const Status status = Script::Train(*store_, batch);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }
  void Checkpoint() {
    // Others may be pending, as many as may be.
    StatusOr<uint64_t> batch = uint64_t{0};
    ASSERT_TRUE(Eventually([&] {
      batch = store_->tier().RequestCheckpoint();
      return batch.status().code() != StatusCode::kResourceExhausted;
    }));
    ASSERT_TRUE(batch.ok()) << batch.status().ToString();
    ASSERT_TRUE(IsCommitted(*store_, *batch));
  }

  PoolDirectory directory_;
  std::unique_ptr<EmbeddingStore> store_;
};

// Waits until the held checkpoint is in the pool.
inline pool::PreparedCheckpoint PreparedOf(const EmbeddingStore& store, uint64_t number) {
  std::optional<pool::PreparedCheckpoint> prepared;
  EXPECT_TRUE(Eventually([&] {
    auto found = store.tier().PreparedCheckpoint(number);
    EXPECT_TRUE(found.ok()) << found.status().ToString();
    if (found.ok()) prepared = *found;
    return !found.ok() || prepared.has_value();
  }));
  return prepared.value_or(pool::PreparedCheckpoint());
}

}  // namespace persia::store
