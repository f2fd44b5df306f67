// Slots as distinct rows: the same bits as pooled ones on both ways, and no message that harms.
#include "worker/distinct_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "worker/embeddings_message.h"
#include "worker/reduction.h"
#include "worker/worker_test_util.h"

namespace persia::worker {
namespace {

// Slots alone in their groups, and two that share one.
std::vector<SlotConfig> JobSlots() {
  return {
      {.name = "plain", .dim = 16, .group = 0},
      {.name = "sqrt", .dim = 5, .sqrt_scaling = true, .group = 1},
      {.name = "mean", .dim = 8, .mean_scaling = true, .group = 2},
      {.name = "stacked",
       .dim = 3,
       .mean_scaling = true,
       .hash_stack_rounds = 2,
       .hash_stack_size = 10,
       .group = 3},
      {.name = "raw", .dim = 4, .embedding_summation = false, .sample_fixed_size = 3, .group = 4},
      {.name = "left", .dim = 16, .group = 5},
      {.name = "right", .dim = 16, .group = 5},
  };
}

// How one feature's random samples look.
struct Shape {
  uint32_t most_ids;
  bool exactly_one;
  bool has_weights;
  uint64_t vocabulary;
};

TestFeature RandomFeature(std::mt19937& rng, const SlotConfig& slot, const Shape& shape,
                          size_t batch_size) {
  TestFeature feature{slot.name, std::vector<std::vector<uint64_t>>(batch_size), {}};
  std::uniform_real_distribution<float> weight(-2.0f, 2.0f);
  for (auto& sample : feature.samples) {
    sample.resize(shape.exactly_one ? 1 : rng() % (shape.most_ids + 1));
    for (uint64_t& id : sample) id = rng() % shape.vocabulary;
    if (!shape.has_weights || !slot.embedding_summation) continue;
    for (size_t i = 0; i < sample.size(); ++i) feature.weights.push_back(weight(rng));
  }
  return feature;
}

// Few and many IDs and distinct ones, so that some slots are sent as rows and others pooled.
TestBatch RandomJob(std::mt19937& rng, size_t batch_size) {
  TestBatch batch;
  for (const SlotConfig& slot : JobSlots()) {
    const Shape shape{.most_ids = static_cast<uint32_t>(rng() % 4),
                      .exactly_one = rng() % 2 == 0,
                      .has_weights = rng() % 3 == 0,
                      .vocabulary = rng() % 3 == 0 ? 1000u : 1 + rng() % 40};
    batch.push_back(RandomFeature(rng, slot, shape, batch_size));
  }
  std::shuffle(batch.begin(), batch.end(), rng);
  return batch;
}

// Rows whose sums depend on their order.
class Job {
 public:
  Job(uint32_t seed, size_t batch_size) : rng_(seed), slots_(MakeSlots(JobSlots())) {
    const FeatureBatch batch = MakeBatch(RandomJob(rng_, batch_size), slots_);
    LookupPlanner planner;
    plan_ = planner.Make(batch, slots_, 1 + seed % 3);
    std::normal_distribution<float> normal;
    for (const ServerBlocks& request : plan_.requests) {
      auto& answer = answers_.emplace_back(request.num_floats());
      for (float& x : answer) x = normal(rng_);
    }
  }

  Buffer Message(EmbeddingsForm form, bool requires_grad = true) {
    auto layout = LayOutEmbeddings(plan_, 11, requires_grad ? 22 : 0, kAllSlots, form);
    EXPECT_TRUE(layout.ok());
    std::vector<const float*> begins;
    for (const auto& answer : answers_) begins.push_back(answer.data());
    std::vector<const float*> rows;
    LocateRows(plan_, begins, &rows);
    for (size_t i = 0; i < plan_.features.size(); ++i) {
      PoolFeature(plan_.features[i], plan_.batch_size, rows, layout->slots[i]);
    }
    return std::move(layout->message);
  }
  LookupResult Lookup(EmbeddingsForm form, bool requires_grad = true) {
    auto result = DecodeEmbeddings(0, Message(form, requires_grad));
    EXPECT_TRUE(result.ok()) << result.status().ToString();
    return std::move(result).value();
  }

  const LookupPlan& plan() const { return plan_; }
  std::mt19937& rng() { return rng_; }

 private:
  std::mt19937 rng_;
  SlotTable slots_;
  LookupPlan plan_;
  std::vector<std::vector<float>> answers_;
};

bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}

std::span<const float> RowsOf(const SlotEmbedding& slot) {
  return {slot.rows, size_t{slot.num_rows} * slot.dim};
}

TEST(DistinctRowsTest, EmbeddingsHaveTheBitsOfPooledOnes) {
  size_t num_as_rows = 0, num_pooled = 0;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    Job job(seed, 1 + seed % 70);
    const LookupResult pooled = job.Lookup(EmbeddingsForm::kPooled);
    const LookupResult fewest = job.Lookup(EmbeddingsForm::kFewestBytes);
    EXPECT_TRUE(pooled.distinct.empty());
    EXPECT_LE(job.Message(EmbeddingsForm::kFewestBytes, false).size(),
              job.Message(EmbeddingsForm::kPooled, false).size());
    ASSERT_EQ(fewest.slots.size(), pooled.slots.size());
    for (size_t i = 0; i < pooled.slots.size(); ++i) {
      EXPECT_EQ(fewest.slots[i].name, pooled.slots[i].name);
      EXPECT_EQ(fewest.slots[i].raw, pooled.slots[i].raw);
      EXPECT_TRUE(SameBits(RowsOf(fewest.slots[i]), RowsOf(pooled.slots[i])))
          << "seed " << seed << ", slot " << pooled.slots[i].name;
    }
    num_as_rows += fewest.distinct.size();
    num_pooled += fewest.slots.size() - fewest.distinct.size();
  }
  EXPECT_GT(num_as_rows, 200u);
  EXPECT_GT(num_pooled, 200u);
}

// What a slot may be spoilt with.
enum class Spoil : uint8_t { kNothing, kNan, kInfinity, kLarge, kSkip };

struct JobGradients {
  std::vector<std::vector<float>> rows;
  std::vector<SlotGradient> slots;
};

JobGradients RandomGradients(std::mt19937& rng, const LookupResult& result, bool spoils) {
  std::normal_distribution<float> normal;
  JobGradients gradients;
  for (const SlotEmbedding& slot : result.slots) {
    auto& rows = gradients.rows.emplace_back(size_t{slot.num_rows} * slot.dim);
    for (float& x : rows) x = normal(rng);
    const auto spoil = spoils ? static_cast<Spoil>(rng() % 8) : Spoil::kNothing;
    if (spoil == Spoil::kNan) rows.back() = std::numeric_limits<float>::quiet_NaN();
    if (spoil == Spoil::kInfinity) rows.back() = -std::numeric_limits<float>::infinity();
    // Sums of a few overflow, or may.
    if (spoil == Spoil::kLarge) std::fill(rows.begin(), rows.end(), rng() % 2 ? 3e38f : 1e37f);
    gradients.slots.push_back({.slot = slot.name,
                               .skipped = spoil == Spoil::kSkip,
                               .num_rows = spoil == Spoil::kSkip ? 0 : slot.num_rows,
                               .dim = spoil == Spoil::kSkip ? 0 : slot.dim,
                               .rows = spoil == Spoil::kSkip ? nullptr : rows.data()});
  }
  return gradients;
}

// As a rank does it. Returns how many slots it summed.
size_t SumAsRank(const LookupResult& result, float scale, JobGradients* gradients) {
  size_t num_summed = 0;
  for (const DistinctSlot& distinct : result.distinct) {
    for (SlotGradient& gradient : gradients->slots) {
      if (gradient.slot != distinct.name || gradient.skipped) continue;
      std::vector<float> sums(size_t{distinct.num_rows} * distinct.dim);
      float max_magnitude = 0.0f;
      if (!SumByRow(distinct, gradient.rows, 1.0f / scale, sums.data(), &max_magnitude)) continue;
      gradient.num_rows = distinct.num_rows;
      gradient.summed = true;
      gradient.max_magnitude = max_magnitude;
      gradient.rows = gradients->rows.emplace_back(std::move(sums)).data();
      ++num_summed;
    }
  }
  return num_summed;
}

void ExpectSameUpdates(const ReducedGradients& a, const ReducedGradients& b, uint32_t seed) {
  EXPECT_EQ(a.nonfinite_features, b.nonfinite_features) << "seed " << seed;
  EXPECT_EQ(a.skipped_features, b.skipped_features) << "seed " << seed;
  ASSERT_EQ(a.requests.size(), b.requests.size());
  for (size_t server = 0; server < a.requests.size(); ++server) {
    EXPECT_EQ(a.requests[server].signs, b.requests[server].signs) << "seed " << seed;
    EXPECT_TRUE(SameBits(a.gradients[server], b.gradients[server])) << "seed " << seed;
  }
}

// With scales that are applied, NaN, infinities and sums that overflow; at 128 the inverse rounds
// nothing, at 3 it does.
TEST(DistinctRowsTest, UpdatesHaveTheBitsOfThoseThatTheWorkerSums) {
  size_t num_summed = 0, num_nonfinite = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    Job job(seed, 1 + seed % 70);
    const LookupResult result = job.Lookup(EmbeddingsForm::kFewestBytes);
    const float scale = std::array{1.0f, 128.0f, 3.0f}[seed % 3];
    JobGradients gradients = RandomGradients(job.rng(), result, seed % 2 == 0);
    auto by_worker = ReduceGradients(job.plan(), scale, gradients.slots);
    ASSERT_TRUE(by_worker.ok()) << by_worker.status().ToString();
    num_summed += SumAsRank(result, scale, &gradients);
    auto by_rank = ReduceGradients(job.plan(), scale, gradients.slots);
    ASSERT_TRUE(by_rank.ok()) << by_rank.status().ToString();
    ExpectSameUpdates(*by_rank, *by_worker, seed);
    num_nonfinite += by_worker->nonfinite_features.size();
  }
  EXPECT_GT(num_summed, 300u);
  EXPECT_GT(num_nonfinite, 100u);
}

// A gradient of large finite numbers is left out only where some sum is not finite, and a rank that
// sums it must not change that.
TEST(DistinctRowsTest, ALargeSummedSlotIsLeftOutBesideANonfiniteOne) {
  uint32_t seed = 0;
  for (; seed < 100; ++seed) {
    if (Job(seed, 64).Lookup(EmbeddingsForm::kFewestBytes).distinct.size() >= 2) break;
  }
  Job job(seed, 64);
  const LookupResult result = job.Lookup(EmbeddingsForm::kFewestBytes);
  JobGradients gradients = RandomGradients(job.rng(), result, false);
  for (size_t i = 0; i < result.slots.size(); ++i) {
    if (result.slots[i].name == result.distinct[0].name) gradients.rows[i][0] = 1e38f;
    if (result.slots[i].name == result.distinct[1].name) gradients.rows[i][0] = NAN;
  }
  auto by_worker = ReduceGradients(job.plan(), 1.0f, gradients.slots);
  EXPECT_GE(SumAsRank(result, 1.0f, &gradients), 1u);
  auto by_rank = ReduceGradients(job.plan(), 1.0f, gradients.slots);
  ASSERT_TRUE(by_worker.ok() && by_rank.ok());
  EXPECT_EQ(by_worker->nonfinite_features.size(), 2u);
  ExpectSameUpdates(*by_rank, *by_worker, seed);
}

TEST(DistinctRowsTest, SumsOfAWrongShapeOrSlotAreRefused) {
  Job job(1, 16);
  const std::vector<float> sums(4096, 1.0f);
  for (const PlannedFeature& feature : job.plan().features) {
    const PlannedGroup& group = job.plan().groups[feature.group];
    SlotGradient gradient{.slot = feature.slot->name,
                          .num_rows = group.num_signs,
                          .dim = group.dim,
                          .rows = sums.data(),
                          .summed = true,
                          .max_magnitude = 1.0f};
    const bool alone = feature.slot->embedding_summation && group.num_features == 1;
    EXPECT_EQ(ReduceGradients(job.plan(), 1.0f, {&gradient, 1}).ok(), alone) << gradient.slot;
    ++gradient.num_rows;
    const Status status = ReduceGradients(job.plan(), 1.0f, {&gradient, 1}).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(std::string(gradient.slot)), std::string::npos);
  }
}

// ---- the choice

Buffer OneSlotMessage(const TestFeature& feature, SlotConfig config, bool requires_grad,
                      bool* as_rows) {
  const SlotTable slots = MakeSlots({std::move(config)});
  const FeatureBatch batch = MakeBatch({feature}, slots);
  const LookupPlan plan = LookupPlanner().Make(batch, slots, 1);
  auto layout =
      LayOutEmbeddings(plan, 1, requires_grad ? 1 : 0, kAllSlots, EmbeddingsForm::kFewestBytes);
  EXPECT_TRUE(layout.ok());
  *as_rows = layout->slots[0].as_rows;
  std::fill_n(layout->slots[0].rows, plan.num_signs() * config.dim, 0.5f);
  return std::move(layout->message);
}

// Sample i has ID i mod `num_distinct`.
TestFeature Cycle(size_t batch_size, uint64_t num_distinct) {
  TestFeature feature{"a", std::vector<std::vector<uint64_t>>(batch_size), {}};
  for (size_t i = 0; i < batch_size; ++i) feature.samples[i] = {i % num_distinct};
  return feature;
}

bool IsSentAsRows(size_t batch_size, uint64_t num_distinct, bool requires_grad) {
  bool as_rows = false;
  SlotConfig slot{.name = "a", .dim = 4};
  OneSlotMessage(Cycle(batch_size, num_distinct), slot, requires_grad, &as_rows);
  return as_rows;
}

// 256 samples of 16 bytes: 4,096 bytes pooled. Rows: 16 each, and 16 + 256 bytes of index. The way
// back doubles all but the index.
TEST(DistinctRowsTest, TheFewerBytesAreChosen) {
  EXPECT_TRUE(IsSentAsRows(256, 238, false));   // 3,808 + 272 = 4,080
  EXPECT_FALSE(IsSentAsRows(256, 239, false));  // 3,824 + 272 = 4,096
  EXPECT_TRUE(IsSentAsRows(256, 247, true));    // 7,904 + 272 = 8,176
  EXPECT_FALSE(IsSentAsRows(256, 248, true));   // 7,936 + 272 = 8,208
}

TEST(DistinctRowsTest, RowNumbersOfEachWidthArrive) {
  for (const uint64_t num_distinct : {1u, 256u, 257u, 65'000u}) {
    bool as_rows = false;
    const SlotConfig slot{.name = "a", .dim = 16};
    auto result =
        DecodeEmbeddings(0, OneSlotMessage(Cycle(65'535, num_distinct), slot, true, &as_rows));
    ASSERT_TRUE(result.ok()) << result.status().ToString();
    ASSERT_EQ(as_rows, num_distinct != 65'000u);
    if (!as_rows) continue;
    const DistinctSlot& distinct = result->distinct[0];
    ASSERT_EQ(distinct.numbers.size(), 65'535u);
    for (size_t i = 0; i < distinct.numbers.size(); ++i) {
      ASSERT_EQ(distinct.numbers[i], i % num_distinct);
    }
  }
}

// ---- messages that are wrong

// One slot as rows: three samples of 2, 0 and 1 weighted IDs, two distinct rows of one element.
struct WireRows {
  uint8_t dtype = 0;
  uint32_t dim = 1;
  uint32_t num_rows = 2;
  uint32_t sample_fixed_size = 0;
  uint32_t num_ids = 3;
  uint8_t scaling = 0;
  uint8_t count_bytes = 1;
  uint8_t has_weights = 1;
  uint32_t rows_per_id = 1;
  std::vector<uint8_t> counts = {2, 0, 1};
  std::vector<uint8_t> numbers = {1, 0, 1};
  std::vector<float> weights = {1.0f, 0.5f, 2.0f};
  std::vector<float> rows = {3.0f, 4.0f};
};

Buffer ToMessage(const WireRows& slot, uint32_t batch_size = 3) {
  ByteWriter writer;
  writer.Put(uint64_t{11});
  writer.Put(uint64_t{22});
  writer.Put(uint32_t{1});
  writer.Put(batch_size);
  writer.Put(uint32_t{3});  // bytes of the name
  writer.Put(uint8_t{3});   // as rows
  writer.Put(slot.dtype);
  writer.Put(uint16_t{0});
  writer.Put(slot.dim);
  writer.Put(slot.num_rows);
  writer.Put(slot.sample_fixed_size);
  writer.Put(uint32_t{0});
  writer.PutString("age");
  writer.Put(slot.num_ids);
  writer.Put(slot.scaling);
  writer.Put(slot.count_bytes);
  writer.Put(slot.has_weights);
  writer.Put(uint8_t{0});
  writer.Put(slot.rows_per_id);
  writer.Put(uint32_t{0});
  writer.PutArray(std::span<const uint8_t>(slot.counts));
  writer.PutArray(std::span<const uint8_t>(slot.numbers));
  writer.PutArray(std::span<const float>(slot.weights));
  writer.PutArray(std::span<const float>(slot.rows));
  return ToBuffer(writer.Release());
}

TEST(DistinctRowsMessageTest, IsPooledWhereItArrives) {
  auto result = DecodeEmbeddings(0, ToMessage({}));
  ASSERT_TRUE(result.ok()) << result.status().ToString();
  const SlotEmbedding& slot = result->slots[0];
  EXPECT_FALSE(slot.raw);
  EXPECT_EQ(slot.num_rows, 3u);
  EXPECT_EQ(std::vector<float>(slot.rows, slot.rows + 3),
            (std::vector<float>{1.0f * 4.0f + 0.5f * 3.0f, 0.0f, 2.0f * 4.0f}));
}

TEST(DistinctRowsMessageTest, ABatchWithoutSamplesHasNoEmbeddings) {
  WireRows slot;
  slot.num_ids = 0;
  slot.has_weights = 0;
  slot.counts.clear();
  slot.numbers.clear();
  slot.weights.clear();
  auto result = DecodeEmbeddings(0, ToMessage(slot, 0));
  ASSERT_TRUE(result.ok()) << result.status().ToString();
  EXPECT_EQ(result->slots[0].num_rows, 0u);
}

struct BadRows {
  const char* message;
  std::function<void(WireRows*)> spoil;
};

TEST(DistinctRowsMessageTest, WrongFieldsAreNamed) {
  const std::vector<BadRows> cases = {
      {"scaling is 3", [](WireRows* s) { s->scaling = 3; }},
      {"count_bytes is 5", [](WireRows* s) { s->count_bytes = 5; }},
      {"has_weights is 2", [](WireRows* s) { s->has_weights = 2; }},
      {"an ID has no rows", [](WireRows* s) { s->rows_per_id = 0; }},
      {"samples have 3 IDs, not 2", [](WireRows* s) { s->num_ids = 2; }},
      {"samples have 4 IDs, not 3", [](WireRows* s) { s->counts[1] = 1; }},
      {"2 IDs for 3 samples", [](WireRows* s) { s->count_bytes = 0, s->num_ids = 2; }},
      {"a row number is 2 of 2", [](WireRows* s) { s->numbers[2] = 2; }},
      {"a row number is 1 of 0", [](WireRows* s) { s->num_rows = 0; }},
      {"a weight is NaN", [](WireRows* s) { s->weights[1] = NAN; }},
      {"must be float32", [](WireRows* s) { s->dtype = 1; }},
      {"sample_fixed_size", [](WireRows* s) { s->sample_fixed_size = 1; }},
      {"dim is 0", [](WireRows* s) { s->dim = 0; }},
      {"dim is 65537", [](WireRows* s) { s->dim = 65537; }},
  };
  for (const BadRows& bad : cases) {
    WireRows slot;
    bad.spoil(&slot);
    const Status status = DecodeEmbeddings(0, ToMessage(slot)).status();
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << bad.message;
    EXPECT_NE(status.message().find("'age'"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(bad.message), std::string::npos)
        << bad.message << ": " << status.message();
  }
}

// Counts whose products with their sizes overflow 64 bits, and more than the message has.
TEST(DistinctRowsMessageTest, CountsAreCheckedBeforeTheyAreFollowed) {
  for (const uint32_t huge : {0x40000000u, 0x80000000u, 0xffffffffu}) {
    for (const auto& spoil : std::vector<std::function<void(WireRows*)>>{
             [&](WireRows* s) { s->rows_per_id = huge; }, [&](WireRows* s) { s->num_rows = huge; },
             [&](WireRows* s) { s->num_ids = huge, s->rows_per_id = huge; },
             [&](WireRows* s) { s->num_ids = huge, s->rows_per_id = huge, s->count_bytes = 0; }}) {
      WireRows slot;
      spoil(&slot);
      EXPECT_EQ(DecodeEmbeddings(0, ToMessage(slot)).status().code(), StatusCode::kCorruption);
    }
  }
}

// 65,535 samples without IDs, of dim 65,536: 16 GiB, by a message of 64 KiB.
TEST(DistinctRowsMessageTest, ASmallMessageTakesNoUnboundedMemory) {
  WireRows slot;
  slot.dim = 65'536;
  slot.num_rows = slot.num_ids = 0;
  slot.has_weights = 0;
  slot.counts.assign(65'535, 0);
  slot.numbers.clear();
  slot.weights.clear();
  slot.rows.clear();
  const Status status = DecodeEmbeddings(0, ToMessage(slot, 65'535)).status();
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_NE(status.message().find("'age'"), std::string::npos) << status.message();
}

// Reads all that a rank uses, for the sanitizers.
void UseAll(LookupResult result) {
  volatile float sink = 0.0f;
  for (const SlotEmbedding& slot : result.slots) {
    for (const float x : RowsOf(slot)) sink = x;
  }
  for (const DistinctSlot& distinct : result.distinct) {
    const std::vector<float> gradients(size_t{distinct.batch_size} * distinct.dim, 1.0f);
    std::vector<float> sums(size_t{distinct.num_rows} * distinct.dim);
    float max_magnitude = 0.0f;
    SumByRow(distinct, gradients.data(), 1.0f, sums.data(), &max_magnitude);
    for (const float x : sums) sink = x;
  }
  static_cast<void>(sink);
}

TEST(DistinctRowsMessageTest, EveryTruncationIsRefused) {
  Job job(3, 20);
  const Buffer message = job.Message(EmbeddingsForm::kFewestBytes);
  for (size_t size = 0; size < message.size(); size += 4) {
    Buffer part(size);
    if (size != 0) std::memcpy(part.data(), message.data(), size);
    EXPECT_EQ(DecodeEmbeddings(0, std::move(part)).status().code(), StatusCode::kCorruption)
        << size << " bytes";
  }
}

// Bytes changed by chance, most of them in the heads and indices of small messages.
TEST(DistinctRowsMessageTest, ChangedBytesAreRefusedOrDoNoHarm) {
  std::mt19937 rng(5);
  size_t num_accepted = 0, num_refused = 0;
  for (uint32_t seed = 0; seed < 8'000; ++seed) {
    Buffer message;
    if (seed % 2 == 0) {
      message = ToMessage({});
    } else {
      message = Job(seed % 40, 1 + seed % 6).Message(EmbeddingsForm::kFewestBytes);
    }
    const size_t num_changes = 1 + rng() % 3;
    for (size_t i = 0; i < num_changes; ++i) {
      message.data()[rng() % message.size()] =
          static_cast<std::byte>(rng() % 4 ? rng() % 8 : rng());
    }
    auto result = DecodeEmbeddings(0, std::move(message));
    if (result.ok()) {
      ++num_accepted;
      UseAll(std::move(result).value());
    } else {
      ++num_refused;
      EXPECT_EQ(result.status().code(), StatusCode::kCorruption) << result.status().ToString();
    }
  }
  EXPECT_GT(num_accepted, 100u);
  EXPECT_GT(num_refused, 1000u);
}

}  // namespace
}  // namespace persia::worker
