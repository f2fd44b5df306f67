// The embedding worker over parameter servers that are maps in this process: every path of a
// batch's life, and what becomes of it when servers fail.
#include "worker/embedding_worker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "worker/fake_rows_test_util.h"
#include "worker/worker_test_util.h"

namespace persia::worker {
namespace {

class EmbeddingWorkerTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kNumServers = 3;

  void SetUp() override {
    Start({});
    Configure();
  }
  // A worker of its own, with limits of its own.
  void Start(WorkerOptions options) {
    if (options.slots.empty()) options.slots = MixedSlots();
    auto worker = EmbeddingWorker::Create(options, rows_);
    ASSERT_TRUE(worker.ok()) << worker.status().ToString();
    worker_ = std::move(worker).value();
  }
  void StartWithModes() {
    WorkerOptions options = {.slots = MixedSlots()};
    for (SlotConfig& slot : options.slots) slot.mode = slot.group;
    Start(options);
    Configure();
  }
  void Configure() { ASSERT_TRUE(worker_->Configure(TrainConfig(), false, InAMinute()).ok()); }

  BatchKey Register(const TestBatch& batch, uint32_t loader_index = 0) {
    const auto reference = worker_->Register(loader_index, EncodeBatch(batch));
    EXPECT_TRUE(reference.ok()) << reference.status().ToString();
    return reference.value();
  }
  TestEmbeddings Lookup(BatchKey reference, bool requires_grad = true) {
    const auto message = worker_->Lookup(reference, requires_grad, InAMinute());
    EXPECT_TRUE(message.ok()) << message.status().ToString();
    return ReadEmbeddings(message.value());
  }
  BatchKey RegisterAndLookUp(const TestBatch& batch) {
    const BatchKey reference = Register(batch);
    Lookup(reference);
    return reference;
  }
  // A gradient of `value` everywhere, for one pooled slot of `num_rows` samples.
  StatusOr<ReturnReport> Return(BatchKey reference, uint32_t num_rows, float value,
                                const char* slot = "plain") {
    const std::vector<float> rows(size_t{num_rows} * 16, value);
    const SlotGradient gradient = {
        .slot = slot, .num_rows = num_rows, .dim = 16, .rows = rows.data()};
    return worker_->ReturnGradients(reference, 1.0f, {&gradient, 1}, InAMinute());
  }
  StatusCode LookupCode(BatchKey reference) {
    return worker_->Lookup(reference, true, InAMinute()).status().code();
  }
  void ExpectNoneLost() {
    const Metrics stats = worker_->metrics();
    EXPECT_EQ(stats["num_registered"], stats["num_returned"] + stats["num_released"] +
                                           stats["num_expired"] + stats["num_buffered"] +
                                           stats["num_in_flight"]);
  }

  static uint64_t Sign(uint64_t id) { return (uint64_t{1} << 56) + id; }  // of slot "plain"

  // IDs for all servers, so that each takes part.
  const TestBatch batch_ = {{"plain", {{1, 2, 3, 4, 5}, {}, {6, 7, 8, 1}}}};
  static constexpr SlotMask kFirst = 1;  // the first mode: "plain" and "sqrt"
  const TestBatch two_modes_ = {
      {"plain", {{1, 2}, {3}}}, {"sqrt", {{4}, {5}}}, {"stacked", {{6}, {7}}}};
  const std::shared_ptr<FakeRows> rows_ = std::make_shared<FakeRows>(kNumServers);
  std::unique_ptr<EmbeddingWorker> worker_;
};

TEST_F(EmbeddingWorkerTest, LifeOfABatch) {
  const BatchKey reference = Register(batch_);
  EXPECT_EQ(reference.worker_incarnation, worker_->incarnation());
  EXPECT_EQ(worker_->metrics()["num_buffered"], 1u);
  EXPECT_EQ(rows_->num_rows(), 0u);

  const TestEmbeddings embeddings = Lookup(reference);
  EXPECT_EQ(embeddings.worker_incarnation, reference.worker_incarnation);
  EXPECT_EQ(embeddings.reference, reference.reference);
  const TestSlot& plain = embeddings.slots.at("plain");
  EXPECT_EQ(plain.num_rows, 3u);
  EXPECT_EQ(plain.rows[16], 0.0f);  // the sample without IDs
  float sum = 0;
  for (uint64_t id = 1; id <= 5; ++id) sum += RowElement(Sign(id), 2);
  EXPECT_EQ(plain.rows[2], sum);
  EXPECT_EQ(worker_->metrics()["num_in_flight"], 1u);

  const auto report = Return(reference, 3, 0.5f);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report.value().update.num_updated, 8u);
  EXPECT_EQ(report.value().update.num_missing, 0u);
  EXPECT_EQ(rows_->Row(Sign(2))[2], RowElement(Sign(2), 2) - 0.5f);
  EXPECT_EQ(rows_->Row(Sign(1))[2], RowElement(Sign(1), 2) - 1.0f);  // of both samples
  const Metrics stats = worker_->metrics();
  EXPECT_EQ(stats["num_returned"], 1u);
  EXPECT_EQ(stats["num_in_flight"], 0u);
  EXPECT_EQ(stats["num_looked_up"], 1u);
  EXPECT_EQ(stats["num_ids"], 9u);
  EXPECT_EQ(stats["num_signs"], 8u);
  EXPECT_EQ(LookupCode(reference), StatusCode::kNotFound);
  ExpectNoneLost();
}

TEST_F(EmbeddingWorkerTest, RepeatedLookupIsAnsweredAgain) {
  const BatchKey reference = Register(batch_);
  const TestEmbeddings first = Lookup(reference), second = Lookup(reference);
  EXPECT_EQ(first.slots.at("plain").rows, second.slots.at("plain").rows);
  EXPECT_EQ(worker_->metrics()["num_in_flight"], 1u);
  EXPECT_TRUE(Return(reference, 3, 1.0f).ok());
}

TEST_F(EmbeddingWorkerTest, ConcurrentLookupsOfOneBatchComeOneAfterTheOther) {
  std::atomic<int> num_inside{0};
  std::promise<void> entered, go_on;
  rows_->before_lookup = [&, first = true]() mutable {
    EXPECT_EQ(num_inside.fetch_add(1), 0);
    if (first) {
      first = false;
      entered.set_value();
      go_on.get_future().wait();
    }
    num_inside.fetch_sub(1);
  };
  const BatchKey reference = Register(batch_);
  auto first = std::async(std::launch::async, [&] { return LookupCode(reference); });
  entered.get_future().wait();
  const auto now = std::chrono::steady_clock::now();
  EXPECT_EQ(worker_->Lookup(reference, true, now).status().code(), StatusCode::kDeadlineExceeded);
  auto second = std::async(std::launch::async, [&] { return LookupCode(reference); });
  go_on.set_value();
  EXPECT_EQ(first.get(), StatusCode::kOk);
  EXPECT_EQ(second.get(), StatusCode::kOk);
}

TEST_F(EmbeddingWorkerTest, RepeatedReturnIsAppliedOnceAndReportsTheSame) {
  const BatchKey reference = RegisterAndLookUp(batch_);
  const auto first = Return(reference, 3, 1.0f), second = Return(reference, 3, 1.0f);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(second.value().update.num_updated, first.value().update.num_updated);
  EXPECT_EQ(rows_->Row(Sign(2))[0], RowElement(Sign(2), 0) - 1.0f);
  EXPECT_EQ(worker_->metrics()["num_returned"], 1u);
}

TEST_F(EmbeddingWorkerTest, FailedUpdateKeepsTheBatchAndARepetitionCompletesIt) {
  const BatchKey reference = RegisterAndLookUp(batch_);
  rows_->failing_server = kNumServers - 1;  // the others apply theirs
  EXPECT_EQ(Return(reference, 3, 1.0f).status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(worker_->metrics()["num_in_flight"], 1u);
  rows_->failing_server = -1;
  ASSERT_TRUE(Return(reference, 3, 1.0f).ok());
  for (uint64_t id = 2; id <= 8; ++id) {
    EXPECT_EQ(rows_->Row(Sign(id))[0], RowElement(Sign(id), 0) - 1.0f) << id;  // each once
  }
  EXPECT_EQ(worker_->metrics()["num_returned"], 1u);
  ExpectNoneLost();
}

TEST_F(EmbeddingWorkerTest, ReturnReportsStalenessAndSlots) {
  const BatchKey slow = RegisterAndLookUp(batch_), fast = RegisterAndLookUp(batch_);
  EXPECT_EQ(Return(fast, 3, 1.0f).value().update.staleness, 0u);
  const std::vector<float> nan(3 * 16, std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(Return(slow, 3, 1.0f).value().update.staleness, 1u);

  const BatchKey bad = RegisterAndLookUp({{"plain", {{1}, {2}, {3}}}, {"sqrt", {{4}, {5}, {6}}}});
  const SlotGradient gradient = {.slot = "plain", .num_rows = 3, .dim = 16, .rows = nan.data()};
  const auto report = worker_->ReturnGradients(bad, 1.0f, {&gradient, 1}, InAMinute());
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report.value().num_nonfinite_slots, 1u);
  EXPECT_EQ(report.value().num_skipped_slots, 1u);
  EXPECT_EQ(report.value().update.num_updated, 0u);
  EXPECT_EQ(worker_->metrics()["num_nonfinite_slots"], 1u);
  EXPECT_EQ(worker_->metrics()["num_returned"], 3u);
}

TEST_F(EmbeddingWorkerTest, RefusedGradientsLeaveTheBatchInFlight) {
  const BatchKey reference = RegisterAndLookUp(batch_);
  EXPECT_EQ(Return(reference, 2, 1.0f).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Return(reference, 3, 1.0f, "nonsense").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(worker_->metrics()["num_in_flight"], 1u);
  EXPECT_TRUE(Return(reference, 3, 1.0f).ok());
}

TEST_F(EmbeddingWorkerTest, GradientsWithoutALookupAreRefused) {
  const BatchKey reference = Register(batch_);
  EXPECT_EQ(Return(reference, 3, 1.0f).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(worker_->metrics()["num_buffered"], 1u);
}

TEST_F(EmbeddingWorkerTest, UnconfiguredWorkerSaysWhatToDo) {
  Start({});
  rows_->Restart(0);
  rows_->Restart(1);
  rows_->Restart(2);
  const BatchKey reference = Register(batch_);
  const Status status = worker_->Lookup(reference, true, InAMinute()).status();
  EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("the embedding optimizer is not configured: enter a TrainCtx"),
            std::string::npos)
      << status.message();
  Configure();
  EXPECT_EQ(LookupCode(reference), StatusCode::kOk);  // the batch was kept
}

TEST_F(EmbeddingWorkerTest, RestartedServerIsConfiguredAgain) {
  const BatchKey reference = Register(batch_);
  rows_->Restart(1);
  Lookup(reference);
  EXPECT_EQ(rows_->num_configures, 2);
  rows_->Restart(1);
  const auto report = Return(reference, 3, 1.0f);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(rows_->num_configures, 3);
  EXPECT_GT(report.value().update.num_missing, 0u);  // its rows are gone
  EXPECT_EQ(report.value().update.num_missing + report.value().update.num_updated, 8u);
}

TEST_F(EmbeddingWorkerTest, ConfigureIsIdempotentAndRefusesAnother) {
  Configure();
  TrainConfig other;
  other.weight_bound = 3;
  EXPECT_EQ(worker_->Configure(other, false, InAMinute()).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(worker_->Configure(other, true, InAMinute()).ok());
  other.admit_probability = 7;
  EXPECT_EQ(worker_->Configure(other, true, InAMinute()).code(), StatusCode::kInvalidArgument);
}

// An update of a rank that has died would change the rows that its successor loads.
TEST_F(EmbeddingWorkerTest, ConfigureAwaitsRequestsInProgress) {
  std::promise<void> entered, may_end;
  rows_->before_lookup = [&] {
    entered.set_value();
    may_end.get_future().wait();
  };
  auto request = std::async(std::launch::async, [&] { return LookupCode(Register(batch_)); });
  entered.get_future().wait();
  const auto now = std::chrono::steady_clock::now();
  EXPECT_EQ(worker_->Configure(TrainConfig(), false, now).code(), StatusCode::kDeadlineExceeded);
  may_end.set_value();
  EXPECT_EQ(request.get(), StatusCode::kOk);
  Configure();
}

TEST_F(EmbeddingWorkerTest, ReleaseIsIdempotent) {
  const BatchKey waiting = Register(batch_), flying = RegisterAndLookUp(batch_);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(worker_->Release(waiting).ok());
    EXPECT_TRUE(worker_->Release(flying).ok());
  }
  EXPECT_EQ(worker_->metrics()["num_released"], 2u);
  EXPECT_EQ(Return(flying, 3, 1.0f).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(worker_->Release({flying.worker_incarnation, 999}).code(), StatusCode::kNotFound);
  ExpectNoneLost();
}

TEST_F(EmbeddingWorkerTest, ReferenceOfAFormerIncarnationIsRefused) {
  const BatchKey old = Register(batch_);
  Start({});
  ASSERT_NE(worker_->incarnation(), old.worker_incarnation);
  Register(batch_);  // has the same counter
  EXPECT_EQ(LookupCode(old), StatusCode::kNotFound);
  EXPECT_EQ(Return(old, 3, 1.0f).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(worker_->Release(old).code(), StatusCode::kNotFound);
  EXPECT_EQ(worker_->metrics()["num_buffered"], 1u);
}

TEST_F(EmbeddingWorkerTest, LookupWithoutGradientsChangesNothingAndEndsTheBatch) {
  const BatchKey reference = Register(batch_);
  const TestEmbeddings embeddings = Lookup(reference, false);
  EXPECT_EQ(embeddings.reference, 0u);
  EXPECT_EQ(embeddings.slots.at("plain").rows, std::vector<float>(3 * 16, 0.0f));
  EXPECT_EQ(rows_->num_rows(), 0u);
  EXPECT_EQ(worker_->metrics()["num_released"], 1u);
  EXPECT_EQ(LookupCode(reference), StatusCode::kNotFound);
}

TEST_F(EmbeddingWorkerTest, DirectLookup) {
  const auto message = EncodeBatch(batch_);
  const auto training = worker_->LookupDirect(message, true, InAMinute());
  ASSERT_TRUE(training.ok());
  const TestEmbeddings embeddings = ReadEmbeddings(training.value());
  EXPECT_EQ(worker_->metrics()["num_in_flight"], 1u);
  EXPECT_TRUE(Return({embeddings.worker_incarnation, embeddings.reference}, 3, 1.0f).ok());
  ASSERT_TRUE(worker_->LookupDirect(message, false, InAMinute()).ok());
  const Metrics stats = worker_->metrics();
  EXPECT_EQ(stats["num_returned"], 1u);
  EXPECT_EQ(stats["num_released"], 1u);
  ExpectNoneLost();
}

// The rank has the rows of slots that it did not look up, and updates them.
TEST_F(EmbeddingWorkerTest, SlotsThatWereNotLookedUpAreNotSkipped) {
  StartWithModes();
  const auto message = worker_->LookupDirect(EncodeBatch(two_modes_), true, InAMinute(), kFirst);
  ASSERT_TRUE(message.ok()) << message.status().ToString();
  const TestEmbeddings embeddings = ReadEmbeddings(message.value());
  EXPECT_EQ(embeddings.slots.at("plain").num_rows, 2u);
  EXPECT_EQ(embeddings.slots.at("stacked").num_rows, 0u);
  EXPECT_EQ(rows_->num_rows(), 5u);  // of "plain" and "sqrt"
  const BatchKey key = {embeddings.worker_incarnation, embeddings.reference};
  const auto report = Return(key, 2, 0.5f);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report.value().update.num_updated, 3u);
  EXPECT_EQ(report.value().num_skipped_slots, 1u);  // "sqrt" has no gradient
  const Metrics stats = worker_->metrics();
  EXPECT_EQ(stats["num_skipped_slots"], 1u);
  EXPECT_EQ(stats["num_gradients"], 5u);
  EXPECT_EQ(stats["num_gradients_left_out"], 2u);
}

TEST_F(EmbeddingWorkerTest, SomeSlotsWithoutGradientsEndTheBatch) {
  StartWithModes();
  const BatchKey reference = Register(two_modes_);
  const auto message = worker_->Lookup(reference, false, InAMinute(), kFirst);
  ASSERT_TRUE(message.ok()) << message.status().ToString();
  const TestEmbeddings embeddings = ReadEmbeddings(message.value());
  EXPECT_EQ(embeddings.reference, 0u);
  EXPECT_EQ(embeddings.slots.at("plain").rows, std::vector<float>(2 * 16, 0.0f));
  EXPECT_EQ(embeddings.slots.at("stacked").num_rows, 0u);
  EXPECT_EQ(rows_->num_rows(), 0u);
  EXPECT_EQ(LookupCode(reference), StatusCode::kNotFound);
  EXPECT_EQ(worker_->metrics()["num_released"], 1u);
  ExpectNoneLost();
}

TEST_F(EmbeddingWorkerTest, FailedDirectLookupLeavesNothingBehind) {
  Start({});
  for (size_t server = 0; server < kNumServers; ++server) rows_->Restart(server);
  EXPECT_FALSE(worker_->LookupDirect(EncodeBatch(batch_), true, InAMinute()).ok());
  EXPECT_EQ(worker_->metrics()["num_in_flight"], 0u);
  ExpectNoneLost();
}

TEST_F(EmbeddingWorkerTest, BatchWithoutAnyIdAsksNoServer) {
  const TestBatch empty = {{"plain", {{}, {}}}, {"raw", {{}, {}}}};
  const BatchKey reference = Register(empty);
  const TestEmbeddings embeddings = Lookup(reference);
  EXPECT_EQ(embeddings.slots.at("plain").rows, std::vector<float>(2 * 16, 0.0f));
  EXPECT_EQ(embeddings.slots.at("raw").num_rows, 1u);
  const auto report = Return(reference, 2, 1.0f);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report.value().update.num_updated, 0u);
  ExpectNoneLost();
}

TEST_F(EmbeddingWorkerTest, FullWorkerRefusesUntilABatchMovesOn) {
  Start({.slots = {}, .forward_buffer_size = 1, .max_in_flight = 1});
  const BatchKey first = Register(batch_);
  EXPECT_EQ(worker_->Register(0, EncodeBatch(batch_)).status().code(),
            StatusCode::kResourceExhausted);
  Lookup(first);
  const BatchKey second = Register(batch_);
  EXPECT_EQ(LookupCode(second), StatusCode::kResourceExhausted);
  ASSERT_TRUE(worker_->Release(first).ok());
  EXPECT_EQ(LookupCode(second), StatusCode::kOk);
}

TEST_F(EmbeddingWorkerTest, BadFeaturesAreRefusedAtRegistration) {
  const auto unknown = worker_->Register(0, EncodeBatch({{"nonsense", {{1}}}}));
  EXPECT_EQ(unknown.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(unknown.status().message().find("'nonsense'"), std::string::npos);
  EXPECT_EQ(worker_->Register(0, {}).status().code(), StatusCode::kCorruption);
  EXPECT_EQ(worker_->metrics()["num_registered"], 0u);
}

TEST_F(EmbeddingWorkerTest, SetEmbeddingsRoutesEachRow) {
  std::vector<uint64_t> signs;
  std::vector<float> values;
  for (uint64_t id = 0; id < 40; ++id) {
    signs.push_back(Sign(id));
    const uint32_t dim = id < 25 ? 2 : 3;
    for (uint32_t e = 0; e < dim; ++e) values.push_back(static_cast<float>(id * 10 + e));
  }
  const std::vector<SignBlock> blocks = {{.dim = 2, .num_signs = 25}, {.dim = 3, .num_signs = 15}};
  rows_->Restart(2);  // is configured first
  ASSERT_TRUE(worker_->SetEmbeddings({blocks, signs}, values, InAMinute()).ok());
  EXPECT_EQ(rows_->Row(Sign(7)), (std::vector<float>{70, 71}));
  EXPECT_EQ(rows_->Row(Sign(39)), (std::vector<float>{390, 391, 392}));
  const auto sizes = worker_->Sizes(InAMinute());
  ASSERT_TRUE(sizes.ok());
  ASSERT_EQ(sizes.value().size(), kNumServers);
  for (const uint64_t size : sizes.value()) EXPECT_GT(size, 0u);
  EXPECT_EQ(rows_->num_rows(), 40u);
  values.pop_back();
  EXPECT_EQ(worker_->SetEmbeddings({blocks, signs}, values, InAMinute()).code(),
            StatusCode::kInvalidArgument);
  ASSERT_TRUE(worker_->Clear(InAMinute()).ok());
  EXPECT_EQ(rows_->num_rows(), 0u);
}

TEST_F(EmbeddingWorkerTest, CreateRefusesImpossibleOptions) {
  const auto code = [&](WorkerOptions options, uint32_t num_servers) {
    auto rows = std::make_shared<FakeRows>(num_servers);
    return EmbeddingWorker::Create(std::move(options), rows).status().code();
  };
  EXPECT_EQ(code({.slots = MixedSlots()}, 1), StatusCode::kOk);
  EXPECT_EQ(code({.slots = {}}, 1), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.slots = MixedSlots()}, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.slots = MixedSlots(), .forward_buffer_size = 0}, 1),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(code({.slots = MixedSlots(), .max_in_flight = 0}, 1), StatusCode::kInvalidArgument);
}

// Every thread trains a row of its own and one that all share; each gradient must count once.
TEST_F(EmbeddingWorkerTest, ConcurrentTrainingLosesNoGradientAndNoBatch) {
  constexpr int kNumThreads = 4, kNumSteps = 150;
  std::atomic<int> num_returned{0};
  const auto train = [&](uint64_t own_id) {
    std::mt19937 rng(static_cast<uint32_t>(own_id));
    for (int step = 0; step < kNumSteps; ++step) {
      const BatchKey reference = Register({{"plain", {{own_id, 999}}}}, rng() % 3);
      Lookup(reference, rng() % 8 != 0);  // one in eight has ended then
      if (rng() % 8 == 0) {
        EXPECT_TRUE(worker_->Release(reference).ok());
        continue;
      }
      const auto report = Return(reference, 1, 0.125f);
      if (!report.ok()) {
        EXPECT_EQ(report.status().code(), StatusCode::kNotFound);
        continue;
      }
      ++num_returned;
      EXPECT_TRUE(Return(reference, 1, 0.125f).ok());  // a repetition
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t id = 1; id <= kNumThreads; ++id) threads.emplace_back(train, id);
  for (std::thread& thread : threads) thread.join();
  const Metrics stats = worker_->metrics();
  EXPECT_EQ(stats["num_returned"], static_cast<uint64_t>(num_returned));
  EXPECT_EQ(stats["num_buffered"] + stats["num_in_flight"], 0u);
  EXPECT_EQ(rows_->Row(Sign(999))[3],
            RowElement(Sign(999), 3) - 0.125f * static_cast<float>(num_returned));
  ExpectNoneLost();
}

}  // namespace
}  // namespace persia::worker
