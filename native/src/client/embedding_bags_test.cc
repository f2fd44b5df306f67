// EmbeddingBags: against a plain model in double precision, against EmbeddedClient bit for bit, and
// against itself with other numbers of threads and other ways through the engine.
#include "client/embedding_bags.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <span>
#include <string>

#include "client/embedding_bags_test_util.h"
#include "worker/slot_table.h"

namespace persia::client {
namespace {

using worker::SlotEmbedding;

std::vector<float> RandomGradient(std::mt19937& rng, size_t size) {
  std::normal_distribution<float> normal;
  std::vector<float> gradient(size);
  for (float& g : gradient) g = normal(rng);
  return gradient;
}

// What EmbeddingBags should do, in double precision and one ID after the other. Initial values come
// from a store of its own, as they depend on seed and sign alone.
class Model {
 public:
  Model(const std::vector<SlotConfig>& slots, const TrainConfig& config)
      : slots_(slots),
        table_(Must(worker::SlotTable::Create(8, slots))),
        optimizer_(config.optimizer),
        initial_(Must(store::EmbeddingStore::Create({.num_internal_shards = 1}))) {
    EXPECT_TRUE(initial_->Configure(config).ok());
  }

  std::vector<double> Pool(const std::vector<SlotIds>& batch) {
    std::vector<double> out;
    for (size_t sample = 0; sample < batch[0].size(); ++sample) {
      for (size_t s = 0; s < slots_.size(); ++s) {
        std::vector<double> sum(slots_[s].dim, 0.0);
        const std::vector<uint64_t> signs = Signs(s, batch[s][sample]);
        for (const uint64_t sign : signs) {
          const Row& row = Find(sign, slots_[s].dim);
          for (size_t e = 0; e < sum.size(); ++e) sum[e] += row.w[e] * Factor(s, signs.size());
        }
        out.insert(out.end(), sum.begin(), sum.end());
      }
    }
    return out;
  }

  // Returns how many rows were updated.
  size_t Update(const std::vector<SlotIds>& batch, const std::vector<float>& gradient) {
    std::map<uint64_t, std::vector<double>> sums;
    const float* next = gradient.data();
    for (size_t sample = 0; sample < batch[0].size(); ++sample) {
      for (size_t s = 0; s < slots_.size(); next += slots_[s++].dim) {
        const std::vector<uint64_t> signs = Signs(s, batch[s][sample]);
        for (const uint64_t sign : signs) {
          auto& sum = sums.try_emplace(sign, slots_[s].dim, 0.0).first->second;
          for (size_t e = 0; e < sum.size(); ++e) sum[e] += next[e] * Factor(s, signs.size());
        }
      }
    }
    for (const auto& [sign, sum] : sums) Step(&rows_.at(sign), sum);
    return sums.size();
  }

  size_t num_rows() const { return rows_.size(); }

 private:
  struct Row {
    std::vector<double> w, accumulator;
  };

  std::vector<uint64_t> Signs(size_t slot, const std::vector<uint64_t>& ids) const {
    std::vector<uint64_t> signs(ids.size() * slots_[slot].num_buckets());
    table_.MakeSigns(*table_.Find(slots_[slot].name), ids, signs.data());
    return signs;
  }
  double Factor(size_t slot, size_t count) const {
    return slots_[slot].sqrt_scaling ? 1.0 / std::sqrt(static_cast<double>(count)) : 1.0;
  }
  Row& Find(uint64_t sign, uint32_t dim) {
    const auto [it, is_new] = rows_.try_emplace(sign);
    if (is_new) {
      std::vector<float> values(dim);
      const store::RowBlock block = {dim, {&sign, 1}};
      EXPECT_TRUE(initial_->Lookup({&block, 1}, LookupMode::kTrain, values.data()).ok());
      it->second.w.assign(values.begin(), values.end());
      it->second.accumulator.assign(dim, optimizer_.initial_accumulator_value);
    }
    return it->second;
  }
  void Step(Row* row, const std::vector<double>& gradient) const {
    for (size_t e = 0; e < gradient.size(); ++e) {
      double step = gradient[e];
      if (optimizer_.kind == OptimizerKind::kAdagrad) {
        row->accumulator[e] += step * step;
        step /= std::sqrt(row->accumulator[e]) + optimizer_.eps;
      }
      row->w[e] -= optimizer_.lr * step;
    }
  }

  const std::vector<SlotConfig> slots_;
  const worker::SlotTable table_;
  const OptimizerConfig optimizer_;
  const std::unique_ptr<store::EmbeddingStore> initial_;
  std::map<uint64_t, Row> rows_;
};

void ExpectNear(const std::vector<float>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(found[i], expected[i], 1e-4 * (1 + std::abs(expected[i]))) << "float " << i;
  }
}

void TrainBesideTheModel(const std::vector<SlotConfig>& slots, const TrainConfig& config,
                         uint32_t num_threads, uint32_t seed) {
  Model model(slots, config);
  const auto bags = Make(Options(slots, num_threads), config);
  std::mt19937 rng(seed);
  for (size_t step = 0; step < 30; ++step) {
    const auto batch = RandomBatch(rng, slots.size(), 1 + rng() % 40);
    const PooledBags pooled = Train(*bags, batch);
    ExpectNear(Values(pooled), model.Pool(batch));
    const auto gradient = RandomGradient(rng, pooled.rows.size() / sizeof(float));
    const UpdateReport report = Must(bags->Update(*pooled.batch, gradient));
    EXPECT_EQ(report.num_updated, model.Update(batch, gradient));
    EXPECT_EQ(report.num_missing + report.num_nonfinite, 0u);
    ASSERT_FALSE(::testing::Test::HasFatalFailure()) << "step " << step;
  }
  EXPECT_EQ(bags->stats().num_rows, model.num_rows());
  const auto last = RandomBatch(rng, slots.size(), 50);
  Train(*bags, last);  // so that both have all of its rows
  ExpectNear(Infer(*bags, last), model.Pool(last));
}

TEST(EmbeddingBagsTest, RandomBatchesAgreeWithAPlainModel) {
  TrainConfig adagrad = Sgd();
  adagrad.optimizer.kind = OptimizerKind::kAdagrad;
  adagrad.optimizer.initial_accumulator_value = 0.1f;
  for (uint32_t seed = 0; seed < 4; ++seed) {
    SCOPED_TRACE(seed);
    TrainBesideTheModel(MixedSlots(), Sgd(), 1, seed);
    TrainBesideTheModel(MixedSlots(), adagrad, 3, seed);
  }
}

// Side by side, so that dims meet in one run of columns.
TEST(EmbeddingBagsTest, SlotsOfEachDimAgreeWithAPlainModel) {
  for (const uint32_t dim : {1u, 3u, 8u, 16u, 31u, 32u, 33u, 64u, 128u, 200u}) {
    SCOPED_TRACE(dim);
    const std::vector<SlotConfig> slots = {
        {.name = "a", .dim = dim, .group = 0},
        {.name = "b", .dim = dim + 1, .group = 1},
        {.name = "c", .dim = dim, .sqrt_scaling = true, .group = 2},
    };
    TrainBesideTheModel(slots, Sgd(), 1, dim);
  }
}

// Training on a fixed sequence of batches; everything that can be seen of it. Gradients depend on
// the embeddings, so that a difference in a step grows in the next.
std::vector<std::vector<float>> History(EmbeddingBags& bags, size_t num_steps, size_t batch_size) {
  std::vector<std::vector<float>> history;
  std::mt19937 rng(11);
  for (size_t step = 0; step < num_steps; ++step) {
    const PooledBags pooled = Train(bags, RandomBatch(rng, bags.num_slots(), batch_size));
    std::vector<float> gradient = Values(pooled);
    history.push_back(gradient);
    for (size_t i = 0; i < gradient.size(); ++i) {
      gradient[i] = 0.7f * gradient[i] + 0.01f * static_cast<float>(i % 7);
    }
    const UpdateReport report = Must(bags.Update(*pooled.batch, gradient));
    history.push_back({static_cast<float>(report.num_updated)});
  }
  return history;
}

void ExpectSameHistory(const std::vector<std::vector<float>>& a,
                       const std::vector<std::vector<float>>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) ASSERT_TRUE(SameBits(a[i], b[i])) << "entry " << i;
}

TEST(EmbeddingBagsTest, BitsDoNotDependOnThreads) {
  const auto one = Make(Options(MixedSlots(), 1), testing::Adam());
  const auto expected = History(*one, 20, 24);
  for (const uint32_t num_threads : {2u, 5u}) {
    SCOPED_TRACE(num_threads);
    const auto bags = Make(Options(MixedSlots(), num_threads), testing::Adam());
    ExpectSameHistory(History(*bags, 20, 24), expected);
  }
}

// Batches with enough IDs for threads, most of them in other slots each time, and two in flight:
// the second divides the slots anew before the first is updated.
TEST(EmbeddingBagsTest, BitsDoNotDependOnHowThreadsShareTheSlots) {
  const auto history_of = [](uint32_t num_threads) {
    const auto bags = Make(Options(MixedSlots(), num_threads), testing::Adam());
    std::vector<std::vector<float>> history;
    std::mt19937 rng(5);
    for (int step = 0; step < 4; ++step) {
      const PooledBags first = Train(*bags, RandomBatch(rng, bags->num_slots(), 1500));
      const PooledBags second = Train(*bags, RandomBatch(rng, bags->num_slots(), 1500));
      for (const PooledBags* pooled : {&first, &second}) {
        history.push_back(Values(*pooled));
        const UpdateReport report = Must(bags->Update(*pooled->batch, history.back()));
        history.push_back({static_cast<float>(report.num_updated)});
      }
    }
    return history;
  };
  const auto expected = history_of(1);
  for (const uint32_t num_threads : {2u, 5u}) {
    SCOPED_TRACE(num_threads);
    ExpectSameHistory(history_of(num_threads), expected);
  }
}

TEST(EmbeddingBagsTest, EvictionDoesNotDependOnThreads) {
  // Room for little more than the largest batch, so that every batch evicts. An evicted row that
  // comes back begins anew, which the history shows.
  constexpr uint64_t kCapacity = 220;
  const auto one = Make(Options(MixedSlots(), 1, kCapacity, 2), testing::Adam());
  const auto expected = History(*one, 40, 6);
  EXPECT_GT(one->stats().lookups.num_evicted, 100u);
  EXPECT_LE(one->stats().num_rows, kCapacity);
  for (const uint32_t num_threads : {2u, 5u}) {
    SCOPED_TRACE(num_threads);
    const auto bags = Make(Options(MixedSlots(), num_threads, kCapacity, 2), testing::Adam());
    ExpectSameHistory(History(*bags, 40, 6), expected);
    EXPECT_EQ(bags->stats().lookups.num_evicted, one->stats().lookups.num_evicted);
  }
}

// A second slot in a group, which never has an ID, makes the group one that is handled by itself.
void TrainTogetherAndAlone(const std::vector<uint32_t>& dims) {
  std::vector<SlotConfig> single, padded;
  size_t num_columns = 0;
  for (const uint32_t dim : dims) {
    const auto group = static_cast<uint32_t>(single.size());
    single.push_back({.name = "s" + std::to_string(group), .dim = dim, .group = group});
    num_columns += dim;
  }
  padded = single;
  for (const SlotConfig& slot : single) {
    padded.push_back({.name = slot.name + "_pad", .dim = slot.dim, .group = slot.group});
  }
  const auto together = Make(Options(single), testing::Adam());
  const auto alone = Make(Options(padded), testing::Adam());
  std::mt19937 rng(3);
  for (size_t step = 0; step < 20; ++step) {
    std::vector<SlotIds> batch(single.size(), SlotIds(37));
    for (SlotIds& samples : batch) {
      for (auto& ids : samples) ids = {rng() % 20};
    }
    const PooledBags a = Train(*together, batch);
    batch.resize(padded.size(), SlotIds(37));
    const PooledBags b = Train(*alone, batch);
    ASSERT_TRUE(SameBits(Values(a), Columns(Values(b), 2 * num_columns, 0, num_columns)));
    const auto gradient = RandomGradient(rng, 37 * num_columns);
    std::vector<float> padded_gradient;
    for (size_t row = 0; row < gradient.size(); row += num_columns) {
      const auto begin = gradient.begin() + static_cast<ptrdiff_t>(row);
      padded_gradient.insert(padded_gradient.end(), begin,
                             begin + static_cast<ptrdiff_t>(num_columns));
      padded_gradient.resize(padded_gradient.size() + num_columns, 1.0f);  // of empty bags
    }
    EXPECT_EQ(Must(together->Update(*a.batch, gradient)).num_updated,
              Must(alone->Update(*b.batch, padded_gradient)).num_updated);
  }
}

TEST(EmbeddingBagsTest, SingleValuedSlotsGiveTheSameBitsTogetherAndAlone) {
  for (const std::vector<uint32_t>& dims : std::vector<std::vector<uint32_t>>{
           {1, 3, 8, 16, 32, 33, 200}, {16, 16, 16}, {64, 64}, {128, 128}, {130, 130}}) {
    SCOPED_TRACE(dims[0]);
    TrainTogetherAndAlone(dims);
  }
}

std::vector<std::byte> Encode(const std::vector<SlotConfig>& slots,
                              const std::vector<SlotIds>& batch) {
  std::vector<std::vector<uint32_t>> offsets(batch.size(), {0});
  std::vector<std::vector<uint64_t>> ids(batch.size());
  IdFeatures encoded{static_cast<uint32_t>(batch[0].size()), {}};
  for (size_t s = 0; s < batch.size(); ++s) {
    for (const auto& sample : batch[s]) {
      ids[s].insert(ids[s].end(), sample.begin(), sample.end());
      offsets[s].push_back(static_cast<uint32_t>(ids[s].size()));
    }
    encoded.features.push_back({slots[s].name, offsets[s], ids[s]});
  }
  return Must(EncodeIdFeatures(encoded));
}

// One engine: what a cluster trains, this trains too. (That a cluster trains like EmbeddedClient:
// client/cluster_test.cc.)
void TrainBesideTheEmbeddedClient(const TrainConfig& config, float scale,
                                  store::RowDtype dtype = store::RowDtype::kFloat32) {
  const std::vector<SlotConfig> slots = MixedSlots();
  worker::WorkerOptions options;
  options.slots = slots;
  store::EmbeddingStore::Options store_options = testing::StoreOptions();
  store_options.row_dtype = dtype;
  const auto client = Must(EmbeddedClient::Create(options, store_options));
  ASSERT_TRUE(client->Configure(config, false, testing::Soon()).ok());
  EmbeddingBagsOptions bag_options = Options(slots, 2);
  bag_options.store.row_dtype = dtype;
  const auto bags = Make(std::move(bag_options), config);
  std::mt19937 rng(17);
  for (size_t step = 0; step < 15; ++step) {
    const auto batch = RandomBatch(rng, slots.size(), 21);
    const PooledBags pooled = Train(*bags, batch);
    const auto result = Must(client->LookupDirect(0, Encode(slots, batch), true, testing::Soon()));
    const size_t stride = bags->num_columns();
    const auto gradient = RandomGradient(rng, 21 * stride);
    std::vector<std::vector<float>> parts;
    std::vector<SlotGradient> gradients;
    size_t column = 0;
    for (const SlotEmbedding& slot : result.slots) {
      ASSERT_TRUE(SameBits({slot.rows, slot.rows + 21 * slot.dim},
                           Columns(Values(pooled), stride, column, slot.dim)))
          << "step " << step << ", " << slot.name;
      parts.push_back(Columns(gradient, stride, column, slot.dim));
      for (float& g : parts.back()) g *= scale;
      gradients.push_back(
          {.slot = slot.name, .num_rows = 21, .dim = slot.dim, .rows = parts.back().data()});
      column += slot.dim;
    }
    const auto report =
        Must(client->ReturnGradients(result.reference, scale, gradients, testing::Soon()));
    EXPECT_EQ(Must(bags->Update(*pooled.batch, gradient)).num_updated, report.update.num_updated);
  }
  EXPECT_EQ(Must(client->Sizes(testing::Soon()))[0], bags->stats().num_rows);
}

TEST(EmbeddingBagsTest, TrainsBitForBitLikeTheEmbeddedClient) {
  TrainConfig rowwise = Sgd();
  rowwise.optimizer.kind = OptimizerKind::kRowwiseAdagrad;
  TrainBesideTheEmbeddedClient(testing::Adam(), 1.0f);
  TrainBesideTheEmbeddedClient(rowwise, 1.0f);
  TrainBesideTheEmbeddedClient(Sgd(), 8.0f);  // a power of two: scaling is exact
}

TEST(EmbeddingBagsTest, RowsOf16BitsTrainLikeTheEmbeddedClients) {
  for (const auto dtype : {store::RowDtype::kFloat16, store::RowDtype::kBfloat16}) {
    TrainBesideTheEmbeddedClient(testing::Adam(), 1.0f, dtype);
    TrainBesideTheEmbeddedClient(Sgd(), 1.0f, dtype);
  }
}

TEST(EmbeddingBagsTest, InferenceReadsZerosAndChangesNothing) {
  const auto bags = Make(Options(MixedSlots()), Sgd());
  std::mt19937 rng(2);
  const auto batch = RandomBatch(rng, MixedSlots().size(), 10);
  for (const float value : Infer(*bags, batch)) ASSERT_EQ(value, 0.0f);
  EXPECT_EQ(bags->stats().num_rows, 0u);
  const auto trained = Values(Train(*bags, batch));
  const auto before = bags->stats();
  EXPECT_TRUE(SameBits(Infer(*bags, batch), trained));
  EXPECT_EQ(bags->stats().num_rows, before.num_rows);
  EXPECT_EQ(bags->stats().lookups.num_inserted, before.lookups.num_inserted);
}

// A lookup for inference goes another way than one for training, in blocks of 8,192 rows: bags that
// are empty, end with a block, or are longer than one, with hash stacks, scaling and weights.
TEST(EmbeddingBagsTest, InferenceHasTheBitsOfTraining) {
  constexpr size_t kLengths[] = {0, 1, 8191, 1, 0, 0, 20000, 5, 8192, 3, 1, 2730, 2732};
  for (const store::RowDtype dtype :
       {store::RowDtype::kFloat32, store::RowDtype::kFloat16, store::RowDtype::kBfloat16}) {
    EmbeddingBagsOptions options = Options(MixedSlots(), 2);
    options.store.row_dtype = dtype;
    const auto bags = Make(std::move(options), Sgd());
    std::mt19937 rng(4);
    // The first batch has one ID a sample, the second has long bags; then both again, for the
    // batch's memory is used again.
    for (const bool is_long : {false, true, false, true}) {
      std::vector<SlotIds> slots(MixedSlots().size(), SlotIds(std::size(kLengths)));
      for (SlotIds& samples : slots) {
        for (size_t i = 0; i < samples.size(); ++i) {
          samples[i].resize(is_long ? kLengths[i] : 1);
          for (uint64_t& id : samples[i]) id = rng() % 20'000;
        }
      }
      const FlatBatch batch = Flatten(slots);
      std::vector<float> weights(batch.values.size());
      for (float& weight : weights) weight = static_cast<float>(rng() % 100) / 64.0f;
      for (const std::span<const float> used :
           {std::span<const float>(), std::span<const float>(weights)}) {
        const auto look_up = [&](LookupMode mode) {
          return Values(Must(bags->Lookup(batch.values, batch.lengths, mode, used)));
        };
        const std::vector<float> trained = look_up(LookupMode::kTrain);
        EXPECT_TRUE(SameBits(look_up(LookupMode::kInference), trained));
      }
    }
  }
}

// A lookup for inference keeps where it found frequent rows. Between lookups rows are inserted,
// updated, evicted, set and cleared; each lookup must read what the store's own call reads.
TEST(EmbeddingBagsTest, InferenceSeesWhatChangedSinceTheLookupBefore) {
  constexpr size_t kSamples = 40;
  const std::vector<SlotConfig> slots = {{.name = "one", .dim = 4, .group = 0},
                                         {.name = "many", .dim = 4, .group = 1}};
  const worker::SlotTable table = Must(worker::SlotTable::Create(8, slots));
  const auto bags = Make(Options(slots, 1, /*capacity=*/300, /*num_shards=*/2), Sgd());
  std::mt19937 rng(6);
  const auto draw = [&] {
    std::vector<SlotIds> ids(2, SlotIds(kSamples));
    for (size_t i = 0; i < kSamples; ++i) {
      ids[0][i] = {rng() % 200};
      for (size_t k = 0; k < 5; ++k) ids[1][i].push_back(rng() % 200);
    }
    return ids;
  };
  const auto read = [&](const SlotConfig& slot, const std::vector<uint64_t>& ids, float* sum) {
    std::vector<uint64_t> signs(ids.size());
    table.MakeSigns(*table.Find(slot.name), ids, signs.data());
    const store::RowBlock block = {slot.dim, signs};
    std::vector<float> rows(ids.size() * slot.dim);
    EXPECT_TRUE(
        bags->embedding_store().Lookup({&block, 1}, LookupMode::kInference, rows.data()).ok());
    std::copy_n(rows.begin(), slot.dim, sum);
    for (size_t i = slot.dim; i < rows.size(); ++i) sum[i % slot.dim] += rows[i];
  };
  for (int step = 0; step < 300; ++step) {
    const int change = static_cast<int>(rng() % 30);
    if (change < 8) {
      const PooledBags pooled = Train(*bags, draw());
      const std::vector<float> gradient(kSamples * 8, static_cast<float>(1 + step));
      ASSERT_TRUE(bags->Update(*pooled.batch, gradient).ok());
    } else if (change == 8) {
      bags->Clear();
    } else if (change == 9) {
      ASSERT_TRUE(bags->SetRows(1, std::vector<uint64_t>{5}, std::vector<float>(4, 9.0f)).ok());
    }
    const std::vector<SlotIds> ids = draw();
    std::vector<float> expected(kSamples * 8);
    for (size_t i = 0; i < kSamples; ++i) {
      for (size_t s = 0; s < 2; ++s) read(slots[s], ids[s][i], &expected[i * 8 + s * 4]);
    }
    ASSERT_TRUE(SameBits(Infer(*bags, ids), expected)) << "step " << step;
  }
  EXPECT_GT(bags->stats().lookups.num_evicted, 100u);
}

TEST(EmbeddingBagsTest, ABatchWithoutSamplesOrWithoutIdsIsABatch) {
  const auto bags = Make(Options(MixedSlots(), 2), Sgd());
  const PooledBags nothing = Must(bags->Lookup({}, {}, LookupMode::kTrain));
  EXPECT_EQ(nothing.batch_size, 0u);
  EXPECT_EQ(Must(bags->Update(*nothing.batch, {})).num_updated, 0u);
  const PooledBags empty = Train(*bags, std::vector<SlotIds>(MixedSlots().size(), SlotIds(3)));
  EXPECT_TRUE(SameBits(Values(empty), std::vector<float>(3 * bags->num_columns(), 0.0f)));
  const std::vector<float> gradient(3 * bags->num_columns(), 1.0f);
  EXPECT_EQ(Must(bags->Update(*empty.batch, gradient)).num_updated, 0u);
}

}  // namespace
}  // namespace persia::client
