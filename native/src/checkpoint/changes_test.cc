// Packets of changes: what is in them, and a store that follows another one by them.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "checkpoint/checkpoint_test_util.h"
#include "checkpoint/loader.h"
#include "checkpoint/trainers_test_util.h"

namespace persia::checkpoint {
namespace {

using store::EmbeddingStore;
using store::Range;

struct Packet {
  FileKind kind = FileKind::kChanges;
  Rows rows;
  std::set<uint64_t> removed;
};

std::unique_ptr<Snapshot> TakeChanges(EmbeddingStore& store, Snapshot::Options options = {}) {
  auto changes = Snapshot::TakeChanges(store, options);
  EXPECT_TRUE(changes.ok()) << changes.status().ToString();
  return std::move(changes).value();
}

// Ages are of the store that they come from.
Rows WithoutAges(Rows rows) {
  for (auto& [sign, row] : rows) row.age = 0;
  return rows;
}

Packet PacketOf(const std::vector<Bytes>& files) {
  Packet packet;
  packet.kind = DecodeHeader(files[0]).value().kind;
  BlockRows block;
  for (const Bytes& file : files) {
    for (BlockDecoder blocks(BlocksOf(file)); !blocks.AtEnd();) {
      const Status status = blocks.Next(&block);
      EXPECT_TRUE(status.ok()) << status.ToString();
      for (size_t i = 0; i < block.signs.size(); ++i) {
        const uint64_t sign = block.signs[i];
        EXPECT_FALSE(packet.rows.contains(sign) || packet.removed.contains(sign)) << sign;
        if (block.shape.kind == BlockKind::kRemovals) {
          packet.removed.insert(sign);
          continue;
        }
        Row& row = packet.rows[sign];
        row.dim = block.shape.dim;
        row.scalar = block.shape.has_scalar ? block.scalars[i] : 0;
        const float* embedding = block.embeddings() + i * block.shape.dim;
        const float* state = block.state() + i * block.shape.state_floats;
        row.values.assign(embedding, embedding + block.shape.dim);
        row.values.insert(row.values.end(), state, state + block.shape.state_floats);
      }
    }
  }
  return packet;
}

std::vector<Bytes> FilesOfChanges(EmbeddingStore& store, uint32_t num_parts = 1) {
  const auto changes = TakeChanges(store, {.num_parts = num_parts});
  auto files = Files(*changes);
  const Status status = changes->Commit();
  EXPECT_TRUE(status.ok()) << status.ToString();
  return files;
}

std::unique_ptr<Loader> BeginApply(EmbeddingStore& store, const FileHeader& header,
                                   Replica replica = {}) {
  auto loader = Loader::Begin(
      store, {.config = header.config.value(), .kind = header.kind, .replica = replica});
  EXPECT_TRUE(loader.ok()) << loader.status().ToString();
  return std::move(loader).value();
}

void Apply(EmbeddingStore& store, const std::vector<Bytes>& files, Replica replica = {}) {
  const auto loader = BeginApply(store, DecodeHeader(files[0]).value(), replica);
  for (const Bytes& file : files) {
    const Status status = loader->Prepare(BlocksOf(file)).status();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  const Status status = loader->Apply().status();
  ASSERT_TRUE(status.ok()) << status.ToString();
  loader->Commit();
  EXPECT_EQ(loader->num_evicted(), 0u);
}

std::unique_ptr<EmbeddingStore> Tracking(EmbeddingStore::Options options, OptimizerKind kind) {
  auto store = store::MakeStore(options, ConfigOf(kind));
  EXPECT_TRUE(store->TrackChanges(100'000).ok());
  return store;
}

TEST(Changes, AreRowsAndRemovals) {
  const auto store = Tracking({.capacity = 100, .num_internal_shards = 1}, OptimizerKind::kAdagrad);
  store::Lookup(*store, Range(0, 50), 4);
  EXPECT_EQ(PacketOf(FilesOfChanges(*store)).rows.size(), 50u);

  store::Update(*store, {3}, 4, Gradients(4, 0.5f));
  ASSERT_TRUE(store::SetRows(*store, {4}, 8, Gradients(8, 2.0f)).ok());  // of another dim
  store::Lookup(*store, Range(200, 290), 4);  // evicts the oldest of 0 to 49, all but 4
  const auto files = FilesOfChanges(*store);
  const Packet packet = PacketOf(files);
  EXPECT_EQ(packet.kind, FileKind::kChanges);
  EXPECT_EQ(packet.removed.size(), 40u);
  EXPECT_EQ(packet.rows.at(4).dim, 8u);
  EXPECT_EQ(packet.rows.at(4).values[0], 2.0f);
  EXPECT_TRUE(packet.removed.contains(3) || packet.rows.contains(3));
  const FileHeader header = DecodeHeader(files[0]).value();
  EXPECT_EQ(header.step, 1u);
  EXPECT_EQ(header.num_rows, packet.rows.size() + packet.removed.size());

  EXPECT_TRUE(PacketOf(FilesOfChanges(*store)).rows.empty());
}

TEST(Changes, OfARowThatCameAndWent) {
  const auto store = Tracking({.capacity = 10, .num_internal_shards = 1}, OptimizerKind::kSgd);
  store::Lookup(*store, {1}, 4);
  store::Lookup(*store, Range(100, 110), 4);
  const Packet packet = PacketOf(FilesOfChanges(*store));
  EXPECT_EQ(packet.removed, std::set<uint64_t>{1});
  EXPECT_EQ(packet.rows.size(), 10u);
}

TEST(Changes, AfterClearStartFromNothing) {
  const auto store = Tracking({.capacity = 100, .num_internal_shards = 2}, OptimizerKind::kAdam);
  const auto follower =
      store::MakeStore({.capacity = 100, .num_internal_shards = 3}, ConfigOf(OptimizerKind::kAdam));
  store::Lookup(*store, Range(0, 50), 4);
  Apply(*follower, FilesOfChanges(*store));
  store->Clear();
  store::Lookup(*store, Range(45, 55), 4);
  store::Update(*store, Range(45, 55), 4, Gradients(40, 0.5f));
  const auto files = FilesOfChanges(*store, 2);
  EXPECT_EQ(PacketOf(files).kind, FileKind::kChangesFromNothing);
  EXPECT_EQ(PacketOf(files).rows.size(), 10u);
  Apply(*follower, files);
  EXPECT_EQ(WithoutAges(RowsOf(*follower)), WithoutAges(RowsOf(*store)));
  EXPECT_EQ(PacketOf(FilesOfChanges(*store)).kind, FileKind::kChanges);
}

TEST(Changes, NeedTracking) {
  const auto store = store::MakeStore({.capacity = 100, .num_internal_shards = 2});
  EXPECT_EQ(Snapshot::TakeChanges(*store, {}).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(Snapshot::TakeChanges(*store, {.num_parts = 0}).status().code(),
            StatusCode::kInvalidArgument);
  ASSERT_TRUE(store->TrackChanges(100).ok());
  const auto changes = TakeChanges(*store);
  EXPECT_EQ(Snapshot::TakeChanges(*store, {}).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(store->TrackChanges(0).code(), StatusCode::kFailedPrecondition);
}

TEST(Changes, ThatWereTooManyAreSaidOnce) {
  const auto store = store::MakeStore({.capacity = 1000, .num_internal_shards = 2});
  ASSERT_TRUE(store->TrackChanges(100).ok());
  store::Lookup(*store, Range(0, 101), 4);
  const Status status = Snapshot::TakeChanges(*store, {}).status();
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("full snapshot"), std::string::npos) << status.message();
  store::Lookup(*store, Range(500, 510), 4);
  EXPECT_EQ(PacketOf(FilesOfChanges(*store)).rows.size(), 10u);
}

TEST(Changes, ComeBackUnlessTheyAreCommitted) {
  const auto store = Tracking({.capacity = 1000, .num_internal_shards = 2}, OptimizerKind::kSgd);
  store::Lookup(*store, Range(0, 10), 4);
  {
    const auto changes = TakeChanges(*store);
    EXPECT_EQ(changes->Commit().code(), StatusCode::kFailedPrecondition);
    Files(*changes);
    store->Clear();
    store::Lookup(*store, Range(5, 20), 4);
  }
  const auto retried = TakeChanges(*store);
  store::Lookup(*store, Range(100, 101), 4);
  const Packet packet = PacketOf(Files(*retried));
  EXPECT_EQ(packet.kind, FileKind::kChangesFromNothing);
  EXPECT_EQ(packet.rows.size(), 15u);
  EXPECT_EQ(packet.removed.size(), 5u);
  ASSERT_TRUE(retried->Commit().ok());
  retried->Close();
  EXPECT_EQ(PacketOf(FilesOfChanges(*store)).rows.size(), 1u);
}

TEST(Changes, OfASnapshotThatFailedComeBack) {
  const auto store = Tracking({.capacity = 50'000, .num_internal_shards = 2}, OptimizerKind::kSgd);
  store::Lookup(*store, Range(0, 20'000), 16);
  Snapshot::Options options;
  options.rows = {.max_waiting_bytes = 100'000, .patience = std::chrono::milliseconds(20)};
  {
    const auto changes = TakeChanges(*store, options);
    for (uint64_t i = 0; i < 20'000; i += 500) store::Lookup(*store, Range(i, i + 500), 16);
    Bytes file;
    EXPECT_EQ(ReadAll(*changes->part(0).value(), &file).code(), StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(PacketOf(FilesOfChanges(*store)).rows.size(), 20'000u);
}

// A packet against a map of what each call did.
TEST(Changes, AreWhatAModelSays) {
  const auto store = Tracking({.capacity = 600, .num_internal_shards = 3}, OptimizerKind::kAdagrad);
  std::mt19937_64 random(5);
  Rows before;
  for (uint64_t round = 0; round < 60 / kFewer; ++round) {
    std::set<uint64_t> updated;
    for (int call = 0; call < 5; ++call) {
      const auto signs = RandomSigns(random, 1000);
      switch (random() % 3) {
        case 0: store::Lookup(*store, signs, 4); break;
        case 1:
          for (const uint64_t sign : signs) {
            if (store::Has(*store, sign)) updated.insert(sign);
          }
          store::Update(*store, signs, 4, Gradients(signs.size() * 4, 0.25f));
          break;
        default:
          updated.insert(signs.begin(), signs.end());
          ASSERT_TRUE(store::SetRows(*store, signs, 4, Gradients(signs.size() * 4, 2.0f)).ok());
      }
    }
    const Rows after = WithoutAges(RowsOf(*store));
    const Packet packet = PacketOf(FilesOfChanges(*store, 1 + round % 3));
    for (const auto& [sign, row] : packet.rows) EXPECT_EQ(row, after.at(sign)) << sign;
    for (const uint64_t sign : packet.removed) EXPECT_FALSE(after.contains(sign)) << sign;
    for (const auto& [sign, row] : after) {
      const auto old = before.find(sign);
      const bool has_changed = old == before.end() || old->second != row || updated.contains(sign);
      EXPECT_TRUE(packet.rows.contains(sign) || !has_changed) << sign;
    }
    for (const auto& [sign, row] : before) {
      EXPECT_TRUE(after.contains(sign) || packet.removed.contains(sign)) << sign;
    }
    before = after;
  }
}

// During training: a packet brings the follower exactly to its snapshot point.
void ExpectToFollow(Trainers::Train train, OptimizerKind kind) {
  const auto store = Tracking(kSmallStore, kind);
  const auto follower = store::MakeStore(kSmallStore, ConfigOf(kind));
  Trainers trainers(*store, train, 2);
  for (int round = 0; round < 6; ++round) {
    trainers.WaitForSteps(40);
    Rows expected;
    const auto changes = trainers.WhileTheyWait([&] {
      expected = RowsOf(*store);
      return TakeChanges(
          *store, {.num_parts = static_cast<uint32_t>(1 + round % 3), .max_gathered_bytes = 1});
    });
    trainers.WaitForSteps(round % 2 == 0 ? 0 : 100);
    const auto files = ReadAtOnce(*changes);
    if (round % 4 == 3) continue;  // was lost on its way: the next one makes up for it
    ASSERT_TRUE(changes->Commit().ok());
    Apply(*follower, files);
    ASSERT_EQ(WithoutAges(RowsOf(*follower)), WithoutAges(expected)) << "round " << round;
  }
}

TEST(ChangesOfATrainingStore, BringAFollowerToTheCut) {
  ExpectToFollow(&TrainByCalls, OptimizerKind::kAdagrad);
}
TEST(ChangesOfATrainingStore, BringAFollowerToTheCutInPlace) {
  ExpectToFollow(&TrainInPlace, OptimizerKind::kAdam);
}

// From a checkpoint whose cut lies between two packets.
TEST(ChangesOfATrainingStore, FollowACheckpointOfAnyMoment) {
  const auto store = Tracking(kSmallStore, OptimizerKind::kAdagrad);
  std::mt19937_64 random(3);
  const auto train = [&] {
    for (int i = 0; i < 50; ++i) TrainByCalls(*store, random);
  };
  train();
  FilesOfChanges(*store);
  train();
  const auto checkpoint = Files(*BeginSnapshot(*store));
  train();
  const auto packet = FilesOfChanges(*store);
  const auto follower = store::MakeStore(kSmallStore, ConfigOf(OptimizerKind::kAdagrad));
  {
    const auto loader = Loader::Begin(*follower, {.config = ConfigOf(OptimizerKind::kAdagrad)});
    ASSERT_TRUE(loader.value()->Replace().ok());
    ASSERT_TRUE(loader.value()->Add(BlocksOf(checkpoint[0])).ok());
    loader.value()->Commit();
  }
  Apply(*follower, packet);
  EXPECT_EQ(WithoutAges(RowsOf(*follower)), WithoutAges(RowsOf(*store)));
}

TEST(Changes, OfOtherServersAreSkipped) {
  const auto store = Tracking({.capacity = 1000, .num_internal_shards = 2}, OptimizerKind::kSgd);
  const auto a = store::MakeStore({.capacity = 1000, .num_internal_shards = 2});
  const auto b = store::MakeStore({.capacity = 1000, .num_internal_shards = 2});
  const auto follow = [&] {
    const auto files = FilesOfChanges(*store);
    Apply(*a, files, {.index = 0, .placement = 2});
    Apply(*b, files, {.index = 1, .placement = 2});
  };
  store::Lookup(*store, Range(0, 400), 4);
  follow();
  store->Clear();
  store::Lookup(*store, Range(300, 600), 4);
  follow();
  Rows rows = RowsOf(*a);
  EXPECT_GT(rows.size(), 100u);
  EXPECT_GT(b->size(), 100u);
  rows.merge(RowsOf(*b));
  EXPECT_EQ(WithoutAges(rows), WithoutAges(RowsOf(*store)));
}

TEST(Changes, ThatAreDamagedChangeNothing) {
  const auto store = Tracking({.capacity = 1000, .num_internal_shards = 2}, OptimizerKind::kSgd);
  const auto follower = store::MakeStore({.capacity = 1000, .num_internal_shards = 2});
  store::Lookup(*store, Range(0, 200), 4);
  const Bytes file = FilesOfChanges(*store)[0];
  const auto blocks = BlocksOf(file);
  const auto loader = BeginApply(*follower, DecodeHeader(file).value());
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    Bytes damaged(blocks.begin(), blocks.end());
    if (round % 2 == 0) {
      damaged[random() % damaged.size()] ^= std::byte{1};
    } else {
      damaged.resize(random() % damaged.size() / 8 * 8 + 4);
    }
    EXPECT_EQ(loader->Prepare(damaged).status().code(), StatusCode::kCorruption);
  }
  EXPECT_EQ(loader->Prepare(blocks).value(), 200u);
  EXPECT_EQ(follower->size(), 0u);
  EXPECT_EQ(loader->Apply().value(), 200u);
  EXPECT_EQ(loader->Apply().value(), 0u);
  EXPECT_EQ(loader->Add(blocks).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(follower->size(), 200u);
}

TEST(Changes, OfAnotherOptimizerAreRefused) {
  const auto store = Tracking({.capacity = 1000, .num_internal_shards = 2}, OptimizerKind::kAdam);
  const auto follower = store::MakeStore({.capacity = 1000, .num_internal_shards = 2});
  store::Lookup(*store, Range(0, 20), 4);
  const Bytes file = FilesOfChanges(*store)[0];
  const auto loader = BeginApply(*follower, DecodeHeader(file).value());
  EXPECT_EQ(loader->Prepare(BlocksOf(file)).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(follower->size(), 0u);
}

// A lookup of a batch sees all rows of a packet or none, however many shards they are in.
TEST(Changes, AreSeenAllAtOnce) {
  const auto follower = store::MakeStore({.capacity = 10'000, .num_internal_shards = 8});
  const auto signs = Range(0, 500);
  std::vector<Bytes> packets;
  {
    const auto store =
        Tracking({.capacity = 10'000, .num_internal_shards = 3}, OptimizerKind::kSgd);
    for (float value = 1; value <= 40 / kFewer; ++value) {
      ASSERT_TRUE(store::SetRows(*store, signs, 4, Gradients(2000, value)).ok());
      packets.push_back(FilesOfChanges(*store)[0]);
    }
  }
  Apply(*follower, {packets[0]});
  std::atomic<bool> stops = false;
  std::thread reader([&] {
    while (!stops) {
      const auto rows = store::Peek(*follower, signs, 4);
      EXPECT_EQ(rows, Gradients(2000, rows[0]));
    }
  });
  for (const Bytes& packet : packets) Apply(*follower, {packet});
  stops = true;
  reader.join();
}

}  // namespace
}  // namespace persia::checkpoint
