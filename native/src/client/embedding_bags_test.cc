// EmbeddingBags: against a plain model in double precision, against EmbeddedClient bit for bit, and
// against itself with other numbers of threads and other ways through the engine.
#include "client/embedding_bags.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <tuple>

#include "client/test_support.h"
#include "worker/slot_table.h"

namespace persia::client {
namespace {

using worker::SlotEmbedding;

using store::LookupMode;
using store::UpdateReport;
using testing::Must;
using worker::SlotConfig;

// A batch as a person writes it: by slot, by sample, the IDs.
using SlotIds = std::vector<std::vector<uint64_t>>;

struct FlatBatch {
  std::vector<uint64_t> values;
  std::vector<int64_t> lengths;
};

FlatBatch Flatten(const std::vector<SlotIds>& slots) {
  FlatBatch batch;
  for (const SlotIds& samples : slots) {
    for (const auto& ids : samples) {
      batch.values.insert(batch.values.end(), ids.begin(), ids.end());
      batch.lengths.push_back(static_cast<int64_t>(ids.size()));
    }
  }
  return batch;
}

TrainConfig Sgd(float lr = 0.1f) {
  TrainConfig config;
  config.initializer = {.lower = -1.0f, .upper = 1.0f, .seed = 5};
  config.optimizer.lr = lr;
  config.weight_bound = 0.0f;
  return config;
}

// Rows begin with zeros, so that what gradients did to them is exact and easy to tell.
TrainConfig SgdFromZero() {
  TrainConfig config = Sgd(1.0f);
  config.initializer = {.lower = 0.0f, .upper = 0.0f, .seed = 0};
  return config;
}

EmbeddingBagsOptions Options(std::vector<SlotConfig> slots, uint32_t num_threads = 1,
                             uint64_t capacity = 1'000'000, uint32_t num_shards = 4) {
  return {.slots = std::move(slots),
          .store = {.capacity = capacity, .num_internal_shards = num_shards},
          .num_threads = num_threads};
}

std::unique_ptr<EmbeddingBags> Make(EmbeddingBagsOptions options, const TrainConfig& config) {
  auto bags = Must(EmbeddingBags::Create(std::move(options)));
  EXPECT_TRUE(bags->Configure(config, false).ok());
  return bags;
}

// One slot of dim 1 without a hash stack: the row of an ID is one number.
std::vector<SlotConfig> OneSlot() { return {{.name = "id", .dim = 1, .group = 0}}; }

PooledBags Train(EmbeddingBags& bags, const std::vector<SlotIds>& slots) {
  const FlatBatch batch = Flatten(slots);
  return Must(bags.Lookup(batch.values, batch.lengths, LookupMode::kTrain));
}

std::vector<float> Values(const PooledBags& pooled) {
  std::vector<float> values(pooled.rows.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), pooled.rows.data(), pooled.rows.size());
  return values;
}

std::vector<float> Infer(EmbeddingBags& bags, const std::vector<SlotIds>& slots) {
  const FlatBatch batch = Flatten(slots);
  PooledBags pooled = Must(bags.Lookup(batch.values, batch.lengths, LookupMode::kInference));
  EXPECT_EQ(pooled.batch, nullptr);
  return Values(pooled);
}

// Equal as bits: what == of floats would not tell apart is a difference too.
::testing::AssertionResult SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " and " << b.size() << " floats";
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) {
      return ::testing::AssertionFailure() << "float " << i << ": " << a[i] << " and " << b[i];
    }
  }
  return ::testing::AssertionSuccess();
}

// Every dim that takes a way of its own through the kernels, alone and in shared groups, with and
// without scaling and hash stacks, groups not in the order of slots.
std::vector<SlotConfig> MixedSlots() {
  return {
      {.name = "d8", .dim = 8, .group = 3},
      {.name = "d1", .dim = 1, .group = 0},
      {.name = "d3", .dim = 3, .group = 7},
      {.name = "shared_a", .dim = 16, .group = 1},
      {.name = "d16", .dim = 16, .group = 2},
      {.name = "shared_b", .dim = 16, .sqrt_scaling = true, .group = 1},
      {.name = "d33", .dim = 33, .sqrt_scaling = true, .group = 4},
      {.name = "stack", .dim = 8, .hash_stack_rounds = 3, .hash_stack_size = 9, .group = 5},
      {.name = "d64", .dim = 64, .group = 6},
      {.name = "d128", .dim = 128, .group = 8},
      {.name = "stack_sqrt",
       .dim = 8,
       .sqrt_scaling = true,
       .hash_stack_rounds = 2,
       .hash_stack_size = 9,
       .group = 5},
      {.name = "d200", .dim = 200, .sqrt_scaling = true, .group = 9},
  };
}

// Each slot is single-ID, multi-hot with empty bags and duplicates, or has no ID at all.
std::vector<SlotIds> RandomBatch(std::mt19937& rng, size_t num_slots, size_t batch_size) {
  std::vector<SlotIds> slots(num_slots, SlotIds(batch_size));
  for (SlotIds& samples : slots) {
    const uint32_t kind = rng() % 8;
    for (auto& ids : samples) {
      ids.resize(kind == 0 ? 0 : kind < 4 ? 1 : rng() % 7);
      for (uint64_t& id : ids) id = rng() % 8 == 0 ? ~uint64_t{rng() % 5} : rng() % 30;
    }
  }
  return slots;
}

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

std::vector<float> Columns(const std::vector<float>& rows, size_t stride, size_t begin,
                           size_t count) {
  std::vector<float> columns;
  for (size_t row = 0; row < rows.size(); row += stride) {
    columns.insert(columns.end(), rows.begin() + static_cast<ptrdiff_t>(row + begin),
                   rows.begin() + static_cast<ptrdiff_t>(row + begin + count));
  }
  return columns;
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

// A lookup for inference goes another way than one for training, in blocks of 1,024 rows: bags that
// are empty, end with a block, or are longer than one, with hash stacks, scaling and weights.
TEST(EmbeddingBagsTest, InferenceHasTheBitsOfTraining) {
  constexpr size_t kLengths[] = {0, 1, 1023, 1, 0, 0, 2500, 5, 1024, 3, 1, 340, 342};
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
          for (uint64_t& id : samples[i]) id = rng() % 2000;
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

// --- eviction ---

// Random traffic on one shard: those that went are never newer than those that stayed.
TEST(EmbeddingBagsTest, EvictsWhatWasUsedTheLongestAgo) {
  constexpr uint64_t kCapacity = 40, kNumIds = 100;
  TrainConfig config = Sgd();
  config.initializer = {.lower = 1.0f, .upper = 2.0f, .seed = 1};  // a row is never zero
  const auto bags = Make(Options(OneSlot(), 2, kCapacity, 1), config);
  std::mt19937 rng(23);
  std::vector<size_t> last_use(kNumIds, 0);
  SlotIds all;
  for (uint64_t id = 0; id < kNumIds; ++id) all.push_back({id});
  for (size_t step = 1; step <= 200; ++step) {
    SlotIds batch(1 + rng() % kCapacity);
    for (auto& ids : batch) {
      ids = {rng() % kNumIds};
      last_use[ids[0]] = step;
    }
    for (const float value : Values(Train(*bags, {batch}))) ASSERT_NE(value, 0.0f);
    const auto rows = Infer(*bags, {all});
    size_t newest_gone = 0, oldest_left = step;
    for (size_t id = 0; id < kNumIds; ++id) {
      if (last_use[id] == 0) continue;
      if (rows[id] == 0.0f) {
        newest_gone = std::max(newest_gone, last_use[id]);
      } else {
        oldest_left = std::min(oldest_left, last_use[id]);
      }
    }
    ASSERT_LE(newest_gone, oldest_left) << "step " << step;
    ASSERT_LE(bags->stats().num_rows, kCapacity);
  }
  EXPECT_GT(bags->stats().lookups.num_evicted, kCapacity);
}

TEST(EmbeddingBagsTest, GradientsOfEvictedRowsAreDroppedAndCounted) {
  const auto bags = Make(Options(OneSlot(), 1, 4, 1), SgdFromZero());
  const PooledBags old = Train(*bags, {{{1}, {2}, {3}}});
  Train(*bags, {{{10}, {11}, {12}}});  // evicts two of the three
  const UpdateReport report = Must(bags->Update(*old.batch, std::vector<float>{1, 1, 1}));
  EXPECT_EQ(report.num_updated, 1u);
  EXPECT_EQ(report.num_missing, 2u);
  const auto rows = Infer(*bags, {{{1}, {2}, {3}, {10}, {11}, {12}}});
  EXPECT_EQ(std::count(rows.begin(), rows.begin() + 3, -1.0f), 1);
  EXPECT_EQ(std::count(rows.begin(), rows.end(), 0.0f), 5);  // the memory's new rows: untouched
}

// An evicted row that came back is another one at another place; the gradient finds it.
TEST(EmbeddingBagsTest, GradientsFindRowsThatCameBack) {
  const auto bags = Make(Options(OneSlot(), 1, 2, 1), SgdFromZero());
  const PooledBags first = Train(*bags, {{{1}, {2}}});
  Train(*bags, {{{3}, {4}}});
  Train(*bags, {{{2}, {1}}});
  const UpdateReport report = Must(bags->Update(*first.batch, std::vector<float>{1, 2}));
  EXPECT_EQ(report.num_updated, 2u);
  EXPECT_EQ(Infer(*bags, {{{1}, {2}}}), (std::vector<float>{-1, -2}));
}

TEST(EmbeddingBagsTest, ABatchAboveTheCapacityIsRefusedAndTheNextOneWorks) {
  const auto bags = Make(Options(OneSlot(), 1, 4, 1), SgdFromZero());
  const PooledBags before = Train(*bags, {{{1}, {2}}});
  const FlatBatch large = Flatten({{{1}, {2}, {3}, {4}, {5}}});
  const auto refused = bags->Lookup(large.values, large.lengths, LookupMode::kTrain);
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.status().message().find("capacity"), std::string::npos);
  EXPECT_LE(bags->stats().num_rows, 4u);
  for (uint64_t step = 0; step < 10; ++step) {  // all of the capacity can be used, again and again
    const uint64_t id = 100 + 4 * step;
    const PooledBags next = Train(*bags, {{{id}, {id + 1}, {id + 2}, {id + 3}}});
    EXPECT_EQ(Must(bags->Update(*next.batch, std::vector<float>{1, 1, 1, 1})).num_updated, 4u);
  }
  EXPECT_EQ(bags->stats().num_rows, 4u);
  EXPECT_EQ(Must(bags->Update(*before.batch, std::vector<float>{1, 1})).num_missing, 2u);
}

// --- batches in flight ---

TEST(EmbeddingBagsTest, BatchesInFlightAreUpdatedInAnyOrderOrNotAtAll) {
  constexpr size_t kNumBatches = 12;  // more than are kept for reuse
  const auto bags = Make(Options(OneSlot()), SgdFromZero());
  std::mt19937 rng(29);
  std::vector<float> expected(20, 0.0f);
  for (size_t round = 0; round < 20; ++round) {
    std::vector<std::tuple<SlotIds, PooledBags>> in_flight;
    for (size_t b = 0; b < kNumBatches; ++b) {
      SlotIds samples(1 + rng() % 50);
      for (auto& ids : samples) {
        ids.resize(rng() % 4);
        for (uint64_t& id : ids) id = rng() % expected.size();
      }
      PooledBags pooled = Train(*bags, {samples});
      in_flight.emplace_back(std::move(samples), std::move(pooled));
    }
    std::shuffle(in_flight.begin(), in_flight.end(), rng);
    in_flight.resize(kNumBatches - 3);  // three are dropped without a gradient
    for (auto& [samples, pooled] : in_flight) {
      Must(bags->Update(*pooled.batch, std::vector<float>(samples.size(), 0.25f)));
      for (const auto& ids : samples) {
        for (const uint64_t id : ids) expected[id] -= 0.25f;
      }
    }
  }
  SlotIds all;
  for (uint64_t id = 0; id < expected.size(); ++id) all.push_back({id});
  EXPECT_EQ(Infer(*bags, {all}), expected);
}

TEST(EmbeddingBagsTest, ABatchIsUpdatedOnce) {
  const auto bags = Make(Options(OneSlot()), SgdFromZero());
  const PooledBags pooled = Train(*bags, {{{1}, {1}}});
  const std::vector<float> gradient = {1, 2};
  ASSERT_TRUE(bags->Update(*pooled.batch, gradient).ok());
  EXPECT_EQ(bags->Update(*pooled.batch, gradient).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Infer(*bags, {{{1}}}), std::vector<float>{-3});
}

TEST(EmbeddingBagsTest, AGradientOfTheWrongSizeLeavesTheBatchAsItWas) {
  const auto bags = Make(Options(OneSlot()), SgdFromZero());
  const PooledBags pooled = Train(*bags, {{{1}, {1}}});
  for (const size_t size : {0u, 1u, 3u}) {
    const auto refused = bags->Update(*pooled.batch, std::vector<float>(size, 1.0f));
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(refused.status().message().find("2 x 1"), std::string::npos);
  }
  EXPECT_EQ(Must(bags->Update(*pooled.batch, std::vector<float>{1, 1})).num_updated, 1u);
}

TEST(EmbeddingBagsTest, RowsThatWereClearedMeanwhileAreMissing) {
  const auto bags = Make(Options(MixedSlots(), 2), Sgd());
  std::mt19937 rng(31);
  const auto batch = RandomBatch(rng, MixedSlots().size(), 20);
  const PooledBags pooled = Train(*bags, batch);
  const uint64_t num_rows = bags->stats().num_rows;
  bags->Clear();
  EXPECT_EQ(bags->stats().num_rows, 0u);
  const std::vector<float> gradient(20 * bags->num_columns(), 1.0f);
  const UpdateReport report = Must(bags->Update(*pooled.batch, gradient));
  EXPECT_EQ(report.num_missing, num_rows);
  EXPECT_EQ(report.num_updated, 0u);
  EXPECT_TRUE(SameBits(Values(Train(*bags, batch)), Values(pooled)));  // rows begin as they did
}

// --- what cannot be used ---

TEST(EmbeddingBagsTest, RowsWithNonfiniteGradientsAreLeftAloneAndCounted) {
  // The second slot has a bag of two, so that both ways of summing are taken.
  const std::vector<SlotConfig> slots = {{.name = "narrow", .dim = 2, .group = 0},
                                         {.name = "multi", .dim = 2, .group = 1}};
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kMax = std::numeric_limits<float>::max();
  const auto bags = Make(Options(slots), SgdFromZero());
  const std::vector<SlotIds> batch = {{{1}, {2}, {3}, {3}, {4}}, {{1}, {2, 3}, {4}, {5}, {5}}};
  const PooledBags pooled = Train(*bags, batch);
  const std::vector<float> gradient = {
      1,    2, 1,    2,     // ID 1; ID 1
      kNan, 0, kInf, 0,     // ID 2; IDs 2 and 3
      kMax, 0, 1,    1,     // ID 3, twice: the sum overflows; ID 4
      kMax, 0, 0,    kInf,  // ID 5, twice: infinity and its opposite
      1,    2, 0,    -kInf,
  };
  const UpdateReport report = Must(bags->Update(*pooled.batch, gradient));
  EXPECT_EQ(report.num_nonfinite, 5u);  // IDs 2, 3; IDs 2, 3, 5
  EXPECT_EQ(report.num_updated, 4u);    // IDs 1, 4; IDs 1, 4
  EXPECT_EQ(report.num_missing, 0u);
  EXPECT_EQ(Infer(*bags, batch), (std::vector<float>{-1, -2, -1, -2, 0, 0, 0,  0,  0, 0,
                                                     -1, -1, 0,  0,  0, 0, -1, -2, 0, 0}));
  EXPECT_EQ(bags->stats().updates.num_nonfinite, 5u);
}

void ExpectRefused(EmbeddingBags& bags, const std::vector<uint64_t>& values,
                   const std::vector<int64_t>& lengths, const std::string& named) {
  SCOPED_TRACE(named);
  for (const LookupMode mode : {LookupMode::kTrain, LookupMode::kInference}) {
    const auto refused = bags.Lookup(values, lengths, mode);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(refused.status().message().find(named), std::string::npos)
        << refused.status().message();
  }
  EXPECT_EQ(bags.stats().num_rows, 0u);
}

TEST(EmbeddingBagsTest, LengthsThatDoNotFitAreRefusedByName) {
  const auto bags = Make(
      Options({{.name = "user", .dim = 4, .group = 0}, {.name = "item", .dim = 4, .group = 1}}),
      Sgd());
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  ExpectRefused(*bags, {1, 2}, {1, 1, 0}, "2 slots");
  ExpectRefused(*bags, {1, 2}, {1, 0, 0, -1}, "slot 'item': the length of sample 1 is -1");
  ExpectRefused(*bags, {1, 2}, {-1, 3, 0, 0}, "slot 'user': the length of sample 0 is -1");
  ExpectRefused(*bags, {1, 2}, {1, 1, kMin, 0}, "slot 'item': the length of sample 0");
  ExpectRefused(*bags, {1, 2}, {1, 0, 0, 0}, "lengths add up to 1");
  ExpectRefused(*bags, {}, {0, 0, 0, 1}, "slot 'item': lengths add up to more");
  ExpectRefused(*bags, {1, 2}, {2, 1, 0, 0}, "slot 'user': lengths add up to more");
  // Sums that wrap around to the number of values, or below it.
  ExpectRefused(*bags, {1, 2}, {kMax, kMax, 0, 0}, "slot 'user'");
  ExpectRefused(*bags, {1, 2}, {kMax, kMin, 1, 2}, "slot 'user'");
  ExpectRefused(*bags, {1, 2}, {1, 0, kMax, kMax}, "slot 'item'");
  ExpectRefused(*bags, {1, 2}, {int64_t{1} << 32, 0, 1, 1}, "slot 'user'");
  EXPECT_TRUE(bags->Lookup(std::vector<uint64_t>{1, 2}, std::vector<int64_t>{1, 0, 0, 1},
                           LookupMode::kTrain)
                  .ok());
}

TEST(EmbeddingBagsTest, RefusesWhatSlotsAndStoreRefuse) {
  const auto code = [](EmbeddingBagsOptions options) {
    return EmbeddingBags::Create(std::move(options)).status().code();
  };
  EXPECT_EQ(code(Options({})), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Options(OneSlot(), 0)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Options(OneSlot(), 1, 0)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Options(OneSlot(), 1, 10, 0)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Options({{.name = "wide", .dim = 65537}})), StatusCode::kInvalidArgument);
  const auto raw =
      EmbeddingBags::Create(Options({{.name = "seq", .dim = 4, .embedding_summation = false}}));
  EXPECT_EQ(raw.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(raw.status().message().find("'seq'"), std::string::npos);
}

TEST(EmbeddingBagsTest, TrainingNeedsAConfiguration) {
  const auto bags = Must(EmbeddingBags::Create(Options(OneSlot())));
  const FlatBatch batch = Flatten({{{1}}});
  EXPECT_EQ(bags->Lookup(batch.values, batch.lengths, LookupMode::kTrain).status().code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(Infer(*bags, {{{1}}}), std::vector<float>{0});
}

TEST(EmbeddingBagsTest, RowsAreSetByIdOfTheirSlot) {
  const auto bags = Make(Options(MixedSlots()), Sgd());
  constexpr uint32_t kShared = 3, kStack = 7;  // positions of "shared_a" and "stack"
  const std::vector<uint64_t> ids = {5, 6};
  std::vector<float> rows(2 * 16);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  ASSERT_TRUE(bags->SetRows(kShared, ids, rows).ok());
  std::vector<SlotIds> batch(MixedSlots().size(), SlotIds(2));
  batch[kShared] = {{5}, {6}};
  batch[5] = {{6}, {}};  // "shared_b" has the same rows
  const auto found = Infer(*bags, batch);
  EXPECT_EQ(Columns(found, bags->num_columns(), 8 + 1 + 3, 16), rows);
  EXPECT_EQ(found[8 + 1 + 3 + 16 + 16 + 2], 18.0f);
  for (const Status& refused :
       {bags->SetRows(kShared, ids, std::vector<float>(31)), bags->SetRows(kStack, ids, rows)}) {
    EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  }
}

// --- threads of the caller ---

// Gradients of 1/8 from a row of zeros: their sum is exact in any order.
TEST(EmbeddingBagsTest, ConcurrentCallsLoseNothing) {
  constexpr uint64_t kNumIds = 50;
  constexpr size_t kNumCallers = 4, kNumSteps = 60;
  const std::vector<SlotConfig> slots = {{.name = "a", .dim = 1, .group = 0},
                                         {.name = "b", .dim = 1, .group = 1}};
  const auto bags = Make(Options(slots, 3), SgdFromZero());
  std::vector<std::vector<float>> sums(kNumCallers, std::vector<float>(2 * kNumIds, 0.0f));
  std::vector<uint64_t> num_updated(kNumCallers, 0);
  const auto call = [&](size_t caller) {
    std::mt19937 rng(static_cast<uint32_t>(caller));
    for (size_t step = 0; step < kNumSteps; ++step) {
      std::vector<SlotIds> batch(2, SlotIds(1 + rng() % 30));
      for (size_t s = 0; s < 2; ++s) {
        for (auto& ids : batch[s]) {
          ids.resize(step % 2 == 0 ? 1 : rng() % 4);
          for (uint64_t& id : ids) {
            id = rng() % kNumIds;
            sums[caller][s * kNumIds + id] -= 0.125f;
          }
        }
      }
      const PooledBags pooled = Train(*bags, batch);
      const std::vector<float> gradient(2 * batch[0].size(), 0.125f);
      num_updated[caller] += Must(bags->Update(*pooled.batch, gradient)).num_updated;
      Infer(*bags, batch);
      EXPECT_LE(bags->stats().num_rows, 2 * kNumIds);
    }
  };
  std::vector<std::thread> callers;
  for (size_t c = 0; c < kNumCallers; ++c) callers.emplace_back(call, c);
  for (std::thread& caller : callers) caller.join();
  uint64_t total_updated = 0;
  std::vector<SlotIds> all(2);
  std::vector<float> expected(2 * kNumIds, 0.0f);  // by sample, then slot
  for (size_t c = 0; c < kNumCallers; ++c) {
    total_updated += num_updated[c];
    for (size_t i = 0; i < 2 * kNumIds; ++i) {
      expected[i % kNumIds * 2 + i / kNumIds] += sums[c][i];
    }
  }
  for (uint64_t id = 0; id < kNumIds; ++id) {
    all[0].push_back({id});
    all[1].push_back({id});
  }
  EXPECT_EQ(Infer(*bags, all), expected);
  EXPECT_EQ(bags->stats().updates.num_updated, total_updated);
}

// Everything that removes, moves or replaces rows, beside training. What is left is not
// foreseeable; that nothing breaks, hangs or races is what the sanitizers see.
TEST(EmbeddingBagsTest, TrainingEvictingClearingAndSettingAtOnce) {
  const std::vector<SlotConfig> slots = {{.name = "a", .dim = 4, .group = 0},
                                         {.name = "b", .dim = 40, .group = 1}};
  const auto bags = Make(Options(slots, 2, 300, 4), Sgd());
  const auto train = [&](uint32_t seed) {
    std::mt19937 rng(seed);
    for (size_t step = 0; step < 60; ++step) {
      std::vector<SlotIds> batch(2, SlotIds(20));
      for (SlotIds& samples : batch) {
        for (auto& ids : samples) ids = {rng() % 400};
      }
      const PooledBags pooled = Train(*bags, batch);
      const std::vector<float> gradient(20 * bags->num_columns(), 0.1f);
      const UpdateReport report = Must(bags->Update(*pooled.batch, gradient));
      EXPECT_LE(report.num_updated + report.num_missing, 40u);
      EXPECT_EQ(report.num_nonfinite, 0u);
    }
  };
  const auto disturb = [&] {
    const std::vector<uint64_t> ids = {1, 2, 3};
    const std::vector<float> rows(3 * 4, 0.5f);
    for (size_t step = 0; step < 60; ++step) {
      EXPECT_TRUE(bags->SetRows(0, ids, rows).ok());
      EXPECT_TRUE(bags->Configure(Sgd(step % 2 == 0 ? 0.1f : 0.2f), true).ok());
      EXPECT_LE(bags->stats().num_rows, 300u);
      if (step % 20 == 0) bags->Clear();
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 3; ++seed) threads.emplace_back(train, seed);
  threads.emplace_back(disturb);
  for (std::thread& thread : threads) thread.join();
}

// No ID of the batch has a row: all older rows go, and that is still not enough.
TEST(EmbeddingBagsTest, ABatchOfNewIdsAboveTheCapacityIsRefused) {
  for (const SlotIds& seen : {SlotIds{}, SlotIds{{1}, {2}}}) {
    const auto bags = Make(Options(OneSlot(), 1, 4, 1), SgdFromZero());
    Train(*bags, {seen});
    const FlatBatch large = Flatten({{{10}, {11}, {12}, {13}, {14}}});
    const auto refused = bags->Lookup(large.values, large.lengths, LookupMode::kTrain);
    EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
    EXPECT_EQ(bags->stats().num_rows,
              seen.size());  // "nothing is inserted"; better: nothing evicted
  }
}

TEST(EmbeddingBagsTest, RowsThatAreNotFiniteCannotBeSet) {  // EmbeddedClient refuses them
  const auto bags = Make(Options(OneSlot()), Sgd());
  const std::vector<uint64_t> ids = {1};
  const std::vector<float> bad = {std::numeric_limits<float>::quiet_NaN()};
  EXPECT_EQ(bags->SetRows(0, ids, bad).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace persia::client
