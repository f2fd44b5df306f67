// Short forms of the store's calls, for its tests.
//
// With PERSIA_TEST_TIER=1 in the environment MakeStore() puts a tier beneath each store, with room
// for a few of its rows in memory: ctest runs the suite a second time that way.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "store/embedding_store.h"
#include "store/tier_test_util.h"

namespace persia::store {

inline std::vector<uint64_t> Range(uint64_t begin, uint64_t end) {
  std::vector<uint64_t> signs(end - begin);
  std::iota(signs.begin(), signs.end(), begin);
  return signs;
}

inline TrainConfig SgdConfig(float lr = 1.0f) {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kSgd;
  config.optimizer.lr = lr;
  return config;
}

// Whether MakeStore() makes stores over a tier.
inline bool IsOverATier() { return std::getenv("PERSIA_TEST_TIER") != nullptr; }

inline std::unique_ptr<EmbeddingStore> MakeStore(EmbeddingStore::Options options,
                                                 const TrainConfig& config = SgdConfig()) {
  static std::list<PoolDirectory> directories;
  const uint64_t cache_rows = std::clamp<uint64_t>(
      options.capacity / 8, options.num_internal_shards, options.num_internal_shards * 16);
  auto store = IsOverATier()
                   ? EmbeddingStore::Open(options, directories.emplace_back().Tier(cache_rows))
                   : EmbeddingStore::Create(options);
  EXPECT_TRUE(store.ok()) << store.status().ToString();
  EXPECT_TRUE(store.value()->Configure(config).ok());
  return std::move(store).value();
}

// One block; the rows, row-major.
inline std::vector<float> Lookup(EmbeddingStore& store, const std::vector<uint64_t>& signs,
                                 uint32_t dim, LookupMode mode = LookupMode::kTrain,
                                 LookupReport* report = nullptr) {
  std::vector<float> rows(signs.size() * dim, -77.0f);  // nothing may be left unwritten
  const RowBlock block = {.dim = dim, .signs = signs};
  const Status status = store.Lookup({&block, 1}, mode, rows.data(), report);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return rows;
}

inline std::vector<float> Peek(EmbeddingStore& store, const std::vector<uint64_t>& signs,
                               uint32_t dim) {
  return Lookup(store, signs, dim, LookupMode::kInference);
}

inline UpdateReport Update(EmbeddingStore& store, const std::vector<uint64_t>& signs, uint32_t dim,
                           const std::vector<float>& gradients) {
  UpdateReport report;
  const RowBlock block = {.dim = dim, .signs = signs};
  const Status status = store.Update({&block, 1}, gradients.data(), &report);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return report;
}

inline Status SetRows(EmbeddingStore& store, const std::vector<uint64_t>& signs, uint32_t dim,
                      const std::vector<float>& rows) {
  const RowBlock block = {.dim = dim, .signs = signs};
  return store.SetRows({&block, 1}, rows.data());
}

// Whether the sign has a row of this dim; rows must not be all zeros.
inline bool Has(EmbeddingStore& store, uint64_t sign, uint32_t dim = 4) {
  LookupReport report;
  Lookup(store, {sign}, dim, LookupMode::kInference, &report);
  return report.num_missing == 0;
}

}  // namespace persia::store
