#include "checkpoint/snapshot.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/checkpoint_test_util.h"
#include "checkpoint/trainers_test_util.h"
#include "store/sign_index.h"

namespace persia::checkpoint {
namespace {

using store::EmbeddingStore;
using store::Range;

TEST(Snapshot, HasTheRowsAndTheirState) {
  const auto store = store::MakeStore({.capacity = 1000, .num_internal_shards = 3},
                                      ConfigOf(OptimizerKind::kAdam));
  const auto signs = Range(0, 100);
  store::Lookup(*store, signs, 4);
  store::Update(*store, signs, 4, Gradients(400, 0.5f));
  store::Update(*store, {7}, 4, Gradients(4, 0.5f));
  const auto wide = store::Lookup(*store, {1000}, 33);

  const auto snapshot = BeginSnapshot(*store, {.num_parts = 2});
  EXPECT_EQ(snapshot->step(), 2u);
  EXPECT_EQ(snapshot->num_rows(), 101u);
  const auto files = Files(*snapshot);
  const Rows rows = RowsOf(files);
  ASSERT_EQ(rows.size(), 101u);
  EXPECT_EQ(snapshot->part(0).value()->num_rows() + snapshot->part(1).value()->num_rows(), 101u);
  for (uint64_t sign : signs) {
    const Row& row = rows.at(sign);
    EXPECT_EQ(row.dim, 4u);
    EXPECT_EQ(row.scalar, sign == 7 ? 2u : 1u);
    const std::vector<float> embedding(row.values.begin(), row.values.begin() + 4);
    EXPECT_EQ(embedding, store::Peek(*store, {sign}, 4));
    ASSERT_EQ(row.values.size(), 12u);
    if (sign == 7) continue;
    EXPECT_FLOAT_EQ(row.values[4], 0.05f);       // (1 - beta1) * g
    EXPECT_NEAR(row.values[8], 0.00025f, 1e-8);  // (1 - beta2) * g^2
  }
  EXPECT_EQ(std::vector<float>(rows.at(1000).values.begin(), rows.at(1000).values.begin() + 33),
            wide);
  const auto header = DecodeHeader(files[1]);
  ASSERT_TRUE(header.ok()) << header.status().ToString();
  EXPECT_EQ(header.value().step, 2u);
  EXPECT_EQ(header.value().part, 1u);
  EXPECT_EQ(header.value().num_parts, 2u);
  EXPECT_EQ(header.value().num_rows, 101u);
  EXPECT_EQ(header.value().config, store->config());
}

TEST(Snapshot, OfAnEmptyStore) {
  auto store = EmbeddingStore::Create({.capacity = 10, .num_internal_shards = 2});
  const auto snapshot = BeginSnapshot(*store.value(), {.num_parts = 3});
  EXPECT_FALSE(snapshot->config().has_value());
  const auto files = Files(*snapshot);
  EXPECT_TRUE(RowsOf(files).empty());
  EXPECT_FALSE(DecodeHeader(files[0]).value().config.has_value());
}

TEST(Snapshot, AgesAreBatchesSinceTheRowWasUsed) {
  const auto store = store::MakeStore({.capacity = 100, .num_internal_shards = 1});
  store::Lookup(*store, {1, 2}, 4);
  store::Lookup(*store, {2}, 4);
  store::Lookup(*store, {3}, 4);
  const Rows rows = RowsOf(*store);
  EXPECT_EQ(rows.at(1).age, 2u);
  EXPECT_EQ(rows.at(2).age, 1u);
  EXPECT_EQ(rows.at(3).age, 0u);
}

TEST(Snapshot, OneAtATime) {
  const auto store = store::MakeStore({.capacity = 100, .num_internal_shards = 2});
  {
    const auto first = BeginSnapshot(*store);
    EXPECT_EQ(Snapshot::Begin(*store, {}).status().code(), StatusCode::kFailedPrecondition);
    first->Close();
    const auto second = BeginSnapshot(*store);
    Bytes file;
    EXPECT_EQ(ReadAll(*first->part(0).value(), &file).code(), StatusCode::kFailedPrecondition);
  }
  const auto abandoned = BeginSnapshot(*store);
}

// Parts end at the same time, each with a thread of its own: the one that counts itself last may
// have added its rows earlier than another.
TEST(Snapshot, AddsUpWhateverPartEndsLast) {
  constexpr uint32_t kParts = 8;
  constexpr int kRounds = 300;
  const auto store = store::MakeStore({.capacity = 100, .num_internal_shards = kParts});
  store::Lookup(*store, Range(0, 40), 1);
  for (int round = 0; round < kRounds && !testing::Test::HasFailure(); ++round) {
    const auto snapshot = BeginSnapshot(*store, {.num_parts = kParts});
    std::atomic<uint32_t> num_ready{0};
    std::vector<std::thread> readers;
    for (uint32_t number = 0; number < kParts; ++number) {
      readers.emplace_back([&, number] {
        SnapshotPart& part = *snapshot->part(number).value();
        Bytes file;
        // All but the end, which has to be asked for.
        EXPECT_TRUE(part.Read(1, [&](size_t) { return &file.emplace_back(); }).ok());
        ++num_ready;
        while (num_ready < kParts) std::this_thread::yield();
        EXPECT_TRUE(ReadAll(part, &file).ok());
      });
    }
    for (std::thread& reader : readers) reader.join();
  }
}

TEST(Snapshot, RefusesNumbersOfParts) {
  const auto store = store::MakeStore({.capacity = 100, .num_internal_shards = 2});
  EXPECT_EQ(Snapshot::Begin(*store, {.num_parts = 0}).status().code(),
            StatusCode::kInvalidArgument);
  const auto snapshot = BeginSnapshot(*store);
  EXPECT_EQ(snapshot->part(1).status().code(), StatusCode::kInvalidArgument);
}

// Whatever happens to rows between cut and reading, the files have them as they were.
class SnapshotOfChangingRows : public testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override {
    store::Lookup(*store_, Range(0, 1500), 4);
    store::Update(*store_, Range(0, 1500), 4, Gradients(6000, 0.5f));
    store::Lookup(*store_, Range(2000, 2100), 8);
    before_ = RowsOf(*store_);
    // Little is gathered and copied ahead, so that some rows have not been read when the first
    // bytes are there.
    snapshot_ = BeginSnapshot(
        *store_, {.num_parts = GetParam(), .max_gathered_bytes = 1, .rows_at_a_time = 20});
    // Some rows have been read when the others change.
    const Status status = snapshot_->part(0).value()->Read(
        3000, [&](size_t count) { return (file_.resize(count), file_.data()); });
    EXPECT_TRUE(status.ok());
  }

  void ExpectAsBefore() {
    std::vector<Bytes> files(GetParam());
    files[0] = file_;
    for (uint32_t i = 0; i < GetParam(); ++i) {
      const Status status = ReadAll(*snapshot_->part(i).value(), &files[i]);
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
    EXPECT_EQ(RowsOf(files), before_);
  }

  std::unique_ptr<EmbeddingStore> store_ = store::MakeStore(
      {.capacity = 2000, .num_internal_shards = 3}, ConfigOf(OptimizerKind::kAdagrad));
  Rows before_;
  Bytes file_;
  std::unique_ptr<Snapshot> snapshot_;
};

TEST_P(SnapshotOfChangingRows, LookedUp) {
  store::Lookup(*store_, Range(0, 1500), 4);
  store::Update(*store_, Range(0, 1500), 4, Gradients(6000, 0.5f));
  ExpectAsBefore();
}

TEST_P(SnapshotOfChangingRows, UpdatedWithoutALookup) {
  for (int i = 0; i < 3; ++i) store::Update(*store_, Range(0, 1500), 4, Gradients(6000, 0.5f));
  store::Lookup(*store_, Range(500, 1500), 4);
  ExpectAsBefore();
}

TEST_P(SnapshotOfChangingRows, Set) {
  EXPECT_TRUE(store::SetRows(*store_, Range(0, 1700), 4, Gradients(6800, 3.0f)).ok());
  ExpectAsBefore();
}

TEST_P(SnapshotOfChangingRows, Evicted) {
  store::Update(*store_, Range(0, 10), 4, Gradients(40, 0.5f));
  for (uint64_t i = 0; i < 40; ++i)
    store::Lookup(*store_, Range(5000 + 100 * i, 5100 + 100 * i), 4);
  EXPECT_FALSE(store::Has(*store_, 5));
  ExpectAsBefore();
}

TEST_P(SnapshotOfChangingRows, MadeAnewWithAnotherDim) {
  store::Update(*store_, Range(0, 10), 4, Gradients(40, 0.5f));
  store::Lookup(*store_, Range(0, 1500), 8);
  ExpectAsBefore();
}

TEST_P(SnapshotOfChangingRows, Cleared) {
  store::Update(*store_, Range(0, 10), 4, Gradients(40, 0.5f));
  store::Lookup(*store_, Range(100, 300), 4);
  store_->Clear();
  store::Lookup(*store_, Range(0, 1500), 4);
  store_->Clear();
  store::Lookup(*store_, Range(0, 1500), 8);
  ExpectAsBefore();
}

TEST_P(SnapshotOfChangingRows, ClearedAndConfiguredAnew) {
  store_->Clear();
  ASSERT_TRUE(store_->Configure(ConfigOf(OptimizerKind::kAdam)).ok());
  store::Lookup(*store_, Range(0, 1500), 4);
  ExpectAsBefore();
}

TEST_P(SnapshotOfChangingRows, TheIndexGrows) {
  const auto store = store::MakeStore({.capacity = 1'000'000, .num_internal_shards = 2});
  store::Lookup(*store, Range(0, 5000), 4);
  const Rows before = RowsOf(*store);
  const auto snapshot = BeginSnapshot(*store, {.max_gathered_bytes = 1, .rows_at_a_time = 100});
  Bytes file;
  uint64_t next = 5000;
  while (true) {
    const size_t size = file.size();
    ASSERT_TRUE(snapshot->part(0)
                    .value()
                    ->Read(1000, [&](size_t n) { return (file.resize(size + n), &file[size]); })
                    .ok());
    if (file.size() == size) break;
    store::Lookup(*store, Range(next, next + 1000), 4);
    next += 1000;
  }
  EXPECT_GT(next, 50'000u) << "the index has not grown";
  Rows rows;
  AddRows(file, &rows);
  EXPECT_EQ(rows, before);
}

INSTANTIATE_TEST_SUITE_P(Parts, SnapshotOfChangingRows, testing::Values(1, 2, 5));

TEST(Snapshot, FailsAndLeavesTrainingAloneWhenNobodyReads) {
  const auto store = store::MakeStore({.capacity = 100'000, .num_internal_shards = 2});
  const auto signs = Range(0, 20'000);
  store::Lookup(*store, signs, 16);
  Snapshot::Options options;
  options.rows = {.max_waiting_bytes = 100'000, .patience = std::chrono::milliseconds(20)};
  auto snapshot = BeginSnapshot(*store, options);
  for (uint64_t i = 0; i < 20'000; i += 500) store::Lookup(*store, Range(i, i + 500), 16);
  Bytes file;
  const Status status = ReadAll(*snapshot->part(0).value(), &file);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("100000"), std::string::npos) << status.message();
  EXPECT_EQ(ReadAll(*snapshot->part(0).value(), &file).code(), StatusCode::kResourceExhausted);
  snapshot.reset();
  EXPECT_EQ(RowsOf(*store).size(), 20'000u);  // the next one works
}

TEST(Snapshot, TrainingWaitsForTheReader) {
  const auto store = store::MakeStore({.capacity = 100'000, .num_internal_shards = 2});
  store::Lookup(*store, Range(0, 20'000), 16);
  const Rows before = RowsOf(*store);
  Snapshot::Options options;
  options.rows = {.max_waiting_bytes = 200'000, .patience = std::chrono::milliseconds(300'000)};
  const auto snapshot = BeginSnapshot(*store, options);
  std::thread trainer([&] {
    for (uint64_t i = 0; i < 20'000; i += 200) store::Lookup(*store, Range(i, i + 200), 16);
  });
  Bytes file;
  const Status status = ReadAll(*snapshot->part(0).value(), &file, 500);
  trainer.join();
  ASSERT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(RowsOf({file}), before);
}

// Rows that wait for a writer are bounded, and so are those that are saved: with a writer that gets
// little time, training waits, and both end.
TEST(Snapshot, EndsWithAWriterThatGivesWayOnABusyMachine) {
  const auto store = store::MakeStore({.capacity = 100'000, .num_internal_shards = 4});
  store::Lookup(*store, Range(0, 8'000), 16);
  const Rows before = RowsOf(*store);
  std::atomic<bool> stops = false;
  std::vector<std::thread> hogs;
  for (uint32_t i = 0; i < std::thread::hardware_concurrency(); ++i) {
    hogs.emplace_back([&] {
      while (!stops) {
      }
    });
  }
  Snapshot::Options options{.num_parts = 2};
  options.rows = {.max_waiting_bytes = 160'000, .patience = std::chrono::milliseconds(300'000)};
  const auto snapshot = BeginSnapshot(*store, options);
  std::thread trainer([&] {
    for (uint64_t i = 0; i < 8'000; i += 200) store::Lookup(*store, Range(i, i + 200), 16);
  });
  std::vector<Bytes> files;
  std::thread writer([&] {
    setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 19);
    files = ReadAtOnce(*snapshot);  // by threads of that priority
  });
  trainer.join();
  writer.join();
  stops = true;
  for (auto& hog : hogs) hog.join();
  EXPECT_EQ(RowsOf(files), before);
}

std::atomic<bool> stands_still = false, may_continue = false;

extern "C" const char __executable_start, etext;  // by the linker: the text of this program

const char* InterruptedAt(const ucontext_t& context) {
#if defined(__x86_64__)
  return reinterpret_cast<const char*>(context.uc_mcontext.gregs[REG_RIP]);
#else
  return reinterpret_cast<const char*>(context.uc_mcontext.pc);
#endif
}

// Only in this program's own code: in a library the thread may hold a lock of the allocator, which
// every thread needs, the more so under AddressSanitizer.
void StandStill(int /*signal*/, siginfo_t* /*info*/, void* context) {
  const char* at = InterruptedAt(*static_cast<ucontext_t*>(context));
  if (at < &__executable_start || at >= &etext) return;
  stands_still = true;
  while (!may_continue) {
  }
}

// As one that a scheduler has interrupted: it holds no shard, whatever it was doing.
TEST(Snapshot, TrainingPassesAWriterThatStandsStill) {
  const auto store = store::MakeStore({.capacity = 100'000, .num_internal_shards = 2});
  store::Lookup(*store, Range(0, 20'000), 16);
  struct sigaction action{};
  action.sa_sigaction = StandStill;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  sigaction(SIGUSR1, &action, nullptr);
  for (int round = 0; round < 10; ++round) {
    stands_still = may_continue = false;
    const auto snapshot = BeginSnapshot(*store);
    std::atomic<bool> has_begun = false;
    std::thread writer([&] {
      Bytes file;
      has_begun = true;
      EXPECT_TRUE(ReadAll(*snapshot->part(0).value(), &file, 100'000).ok());
      while (!stands_still) std::this_thread::yield();
    });
    while (!has_begun) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
    while (!stands_still) {
      pthread_kill(writer.native_handle(), SIGUSR1);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    std::promise<void> has_trained;
    std::thread trainer([&] {
      store::Lookup(*store, Range(0, 20'000), 16);
      has_trained.set_value();
    });
    EXPECT_EQ(has_trained.get_future().wait_for(std::chrono::seconds(120)),
              std::future_status::ready);
    may_continue = true;
    trainer.join();
    writer.join();
  }
  std::signal(SIGUSR1, SIG_DFL);
}

TEST(Snapshot, ClosingEndsAWriterThatWaits) {
  const auto store = store::MakeStore({.capacity = 100'000, .num_internal_shards = 4});
  store::Lookup(*store, Range(0, 50'000), 4);
  for (int round = 0; round < 20; ++round) {
    const auto snapshot =
        BeginSnapshot(*store, {.num_parts = 2, .max_gathered_bytes = 1, .rows_at_a_time = 1});
    std::vector<std::thread> writers;
    for (uint32_t part = 0; part < 2; ++part) {
      writers.emplace_back([&, part] {
        Bytes file;
        EXPECT_EQ(ReadAll(*snapshot->part(part).value(), &file).code(),
                  StatusCode::kFailedPrecondition);
      });
    }
    snapshot->Close();
    for (auto& writer : writers) writer.join();
  }
}

void ExpectSnapshotsAsAtTheCut(Trainers::Train train) {
  for (const OptimizerKind kind : {OptimizerKind::kAdagrad, OptimizerKind::kAdam}) {
    const auto store = store::MakeStore(kSmallStore, ConfigOf(kind));
    Trainers trainers(*store, train, 2);
    for (int round = 0; round < 4; ++round) {
      trainers.WaitForSteps(50);
      Rows expected;
      const auto snapshot = trainers.WhileTheyWait([&] {
        expected = RowsOf(*store);
        return BeginSnapshot(
            *store, {.num_parts = static_cast<uint32_t>(1 + round % 3), .max_gathered_bytes = 1});
      });
      trainers.WaitForSteps(round % 2 == 0 ? 0 : 100);
      EXPECT_EQ(RowsOf(ReadAtOnce(*snapshot)), expected);
    }
  }
}

TEST(SnapshotOfATrainingStore, IsAsAtTheCut) { ExpectSnapshotsAsAtTheCut(&TrainByCalls); }
TEST(SnapshotOfATrainingStore, IsAsAtTheCutInPlace) { ExpectSnapshotsAsAtTheCut(&TrainInPlace); }

// What one call sets in all shards is wholly in a snapshot or not at all.
TEST(SnapshotOfATrainingStore, CutsBetweenCalls) {
  const auto store = store::MakeStore({.capacity = 10'000, .num_internal_shards = 8});
  constexpr uint64_t kRows = 300;
  for (uint64_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(
        store::SetRows(*store, Range(i * kRows, (i + 1) * kRows), 4, Gradients(4 * kRows, 0)).ok());
  }
  std::atomic<bool> stops = false;
  std::vector<std::thread> writers;
  for (uint64_t i = 0; i < 3; ++i) {
    writers.emplace_back([&, i] {
      const auto signs = Range(i * kRows, (i + 1) * kRows);
      for (float value = 1; !stops; ++value) {
        EXPECT_TRUE(store::SetRows(*store, signs, 4, Gradients(4 * kRows, value)).ok());
      }
    });
  }
  for (int round = 0; round < 30; ++round) {
    const Rows rows = RowsOf(*store);
    for (const auto& [sign, row] : rows) {
      EXPECT_EQ(row.values[0], rows.at(sign / kRows * kRows).values[0]) << sign;
    }
  }
  stops = true;
  for (auto& writer : writers) writer.join();
}

}  // namespace
}  // namespace persia::checkpoint
