// A change of the number of servers: equal bits, and each update applied once.
#include "server/row_transfer.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/hash.h"
#include "base/row_protocol.h"
#include "net/rpc.h"
#include "net/test_support.h"
#include "server/parameter_server.h"

namespace persia::server {
namespace {

using net::testing::Loopback;
using net::testing::Soon;

constexpr uint32_t kRowDim = 4;
constexpr uint64_t kNumSigns = 400;

// What an update asks of one server.
struct Part {
  std::vector<SignBlock> blocks;
  std::vector<uint64_t> signs;
  std::vector<float> gradients;

  SignBlocks view() const { return {blocks, signs}; }
};

// One third of the virtual shards on other servers than by default.
Placement Moved(uint32_t num_servers, uint32_t by) {
  std::vector<MovedShard> moved;
  for (uint32_t shard = 0; shard < kNumVirtualShards; shard += 3) {
    moved.push_back(
        {static_cast<uint16_t>(shard), static_cast<uint16_t>((shard + by) % num_servers)});
  }
  return Placement::Create(num_servers, 0, moved).value();
}

// The signs of a step, by server.
std::vector<Part> PartsOf(uint64_t step, const Placement& placement) {
  std::vector<Part> parts(placement.num_servers());
  for (uint64_t i = 0; i < 24; ++i) {
    const uint64_t sign = (step * 37 + i * 13) % kNumSigns;
    Part& part = parts[placement.ServerOf(SignHash(sign))];
    part.signs.push_back(sign);
    for (uint32_t k = 0; k < kRowDim; ++k) {
      part.gradients.push_back(0.01f * static_cast<float>((sign + step + k) % 7) - 0.02f);
    }
  }
  for (Part& part : parts) part.blocks = {{kRowDim, static_cast<uint32_t>(part.signs.size())}};
  return parts;
}

TrainConfig Adam(uint32_t admit_after = 1) {
  TrainConfig config;
  config.optimizer.kind = OptimizerKind::kAdam;
  config.optimizer.lr = 0.05f;
  config.admit_after = admit_after;
  return config;
}

// Servers of one generation, and connections to them.
class Fleet {
 public:
  explicit Fleet(const Placement& of_servers, uint32_t num_sources = 0) : placement(of_servers) {
    for (uint32_t i = 0; i < placement.num_servers(); ++i) {
      ParameterServer::Options options;
      options.replica_index = i;
      options.replica_size = placement.num_servers();
      options.store = {.capacity = 10'000, .num_internal_shards = 2};
      options.rpc.num_handler_threads = 4;
      options.num_sources = num_sources;
      servers.push_back(ParameterServer::Create(options).value());
      addresses.push_back(Loopback(servers[i]->Start().value()));
      channels.push_back(std::make_unique<net::Channel>(net::Channel::Options{.peer = "server"}));
      channels[i]->SetAddress(addresses[i]);
    }
  }
  uint32_t size() const { return static_cast<uint32_t>(servers.size()); }
  void Configure(uint32_t admit_after = 1) {
    for (const auto& channel : channels) {
      ASSERT_TRUE(net::Call(*channel, kConfigureServer, {Adam(admit_after), false}, Soon()).ok());
    }
  }
  Status Update(uint32_t server, const Part& part, uint64_t step) {
    return net::Call(*channels[server], kUpdateRows, {{1, step}, {}, part.view(), part.gradients},
                     Soon())
        .status();
  }
  // False: a server did not answer, because the channels were closed.
  bool Train(uint64_t step) {
    const std::vector<Part> parts = PartsOf(step, placement);
    for (uint32_t i = 0; i < size(); ++i) {
      if (!net::Call(*channels[i], kLookupRows, {true, parts[i].view()}, Soon()).ok()) return false;
    }
    for (uint32_t i = 0; i < size(); ++i) {
      if (!Update(i, parts[i], step).ok()) return false;
    }
    return true;
  }
  Status BeginTransfer(const Fleet& next) {
    // Far above that of a test: none may wait for it.
    RowTransfer::Options options{.placement = next.placement, .deadline = std::chrono::hours(1)};
    for (uint32_t i = 0; i < next.size(); ++i) {
      options.targets.push_back({next.addresses[i], next.servers[i]->incarnation()});
    }
    for (const auto& server : servers) PERSIA_RETURN_IF_ERROR(server->BeginTransfer(options));
    return Status::Ok();
  }
  void AwaitFollowing() const {
    for (const auto& server : servers) {
      while (server->transfer_progress()->state == RowTransfer::State::kCopying) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
      const RowTransfer::Progress progress = *server->transfer_progress();
      ASSERT_EQ(progress.state, RowTransfer::State::kFollowing) << progress.failure.ToString();
    }
  }
  void HandOver() const {
    for (const auto& server : servers) {
      const Status status = server->HandOver();
      ASSERT_TRUE(status.ok()) << status.ToString();
    }
  }
  void Serve() const {
    for (const auto& server : servers) {
      const Status status = server->Serve();
      ASSERT_TRUE(status.ok()) << status.ToString();
      EXPECT_EQ(server->placement(), placement);
    }
  }
  void CloseChannels() const {
    for (const auto& channel : channels) channel->Close();
  }
  // Of all signs; each must be on the server that it belongs to, and on no other.
  std::vector<float> Rows() const {
    std::vector<float> rows;
    uint64_t num_rows = 0;
    for (const auto& server : servers) num_rows += server->embedding_store().size();
    EXPECT_LE(num_rows, kNumSigns);
    for (uint64_t sign = 0; sign < kNumSigns; ++sign) {
      const std::vector<uint64_t> signs = {sign};
      const std::vector<SignBlock> blocks = {{kRowDim, 1}};
      auto found =
          servers[placement.ServerOf(SignHash(sign))]->Lookup({false, {blocks, signs}}).value();
      rows.insert(rows.end(), found.rows.begin(), found.rows.end());
    }
    return rows;
  }

  const Placement placement;
  std::vector<std::unique_ptr<ParameterServer>> servers;
  std::vector<std::string> addresses;
  std::vector<std::unique_ptr<net::Channel>> channels;
};

std::vector<float> Expected(uint64_t num_steps) {
  Fleet one(1);
  one.Configure();
  for (uint64_t step = 1; step <= num_steps; ++step) EXPECT_TRUE(one.Train(step));
  return one.Rows();
}

// From some servers to others, with an interrupted update wherever it happens to be.
void ResizeUnderLoad(const std::vector<Placement>& placements) {
  auto fleet = std::make_shared<Fleet>(placements[0]);
  fleet->Configure();
  std::mutex mutex;  // of `fleet`
  std::atomic<bool> is_over = false;
  uint64_t num_steps = 0;
  std::thread trainer([&] {
    while (!is_over) {
      ++num_steps;
      for (bool is_trained = false; !is_trained;) {
        std::unique_lock lock(mutex);
        const std::shared_ptr<Fleet> present = fleet;
        lock.unlock();
        is_trained = present->Train(num_steps);
      }
      // The steps are repeated below, so there should not be too many of them.
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (size_t i = 1; i < placements.size(); ++i) {
    const auto before = fleet;
    const auto next = std::make_shared<Fleet>(placements[i], before->size());
    ASSERT_TRUE(before->BeginTransfer(*next).ok());
    before->AwaitFollowing();
    before->HandOver();
    next->Serve();
    {
      const std::lock_guard lock(mutex);
      fleet = next;
    }
    before->CloseChannels();
  }
  is_over = true;
  trainer.join();
  EXPECT_EQ(fleet->Rows(), Expected(num_steps));
}

TEST(RowTransferTest, GivesTheBitsOfOneServerOutwards) { ResizeUnderLoad({2, 3, 5}); }
TEST(RowTransferTest, GivesTheBitsOfOneServerInwards) { ResizeUnderLoad({3, 2, 1, 2}); }

TEST(RowTransferTest, GivesTheBitsOfOneServerWhereShardsAreMoved) {
  ResizeUnderLoad({2, Moved(2, 1), Moved(2, 2), Moved(3, 0), 3});
}

// From servers of one placement to those of another, and to a third one.
void CompleteAnUpdate(const Placement& first, const Placement& second, const Placement& third) {
  Fleet before(first);
  before.Configure();
  for (uint64_t step = 1; step <= 20; ++step) ASSERT_TRUE(before.Train(step));
  // Of step 21, server 1 applies its part, and server 0 never hears.
  const std::vector<Part> parts = PartsOf(21, first);
  for (uint32_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(net::Call(*before.channels[i], kLookupRows, {true, parts[i].view()}, Soon()).ok());
  }
  ASSERT_FALSE(parts[0].signs.empty() || parts[1].signs.empty());
  ASSERT_TRUE(before.Update(1, parts[1], 21).ok());
  Fleet middle(second, 2);
  ASSERT_TRUE(before.BeginTransfer(middle).ok());
  before.AwaitFollowing();
  before.HandOver();
  middle.Serve();
  // Repeated only two generations later, and then twice.
  Fleet last(third, middle.size());
  ASSERT_TRUE(middle.BeginTransfer(last).ok());
  middle.AwaitFollowing();
  middle.HandOver();
  last.Serve();
  ASSERT_TRUE(last.Train(21));
  ASSERT_TRUE(last.Train(21));
  EXPECT_EQ(last.Rows(), Expected(21));
}

TEST(RowTransferTest, AnUpdateThatOneServerHadAppliedIsCompletedAndNotRepeated) {
  CompleteAnUpdate(2, 3, 5);
}
TEST(RowTransferTest, AnUpdateIsCompletedAndNotRepeatedWhereShardsAreMoved) {
  CompleteAnUpdate(2, Moved(2, 1), Moved(2, 2));
  CompleteAnUpdate(Moved(2, 0), 2, Moved(3, 1));
}

TEST(RowTransferTest, FailsWhereANewServerEnds) {
  Fleet before(2);
  before.Configure();
  for (uint64_t step = 1; step <= 20; ++step) ASSERT_TRUE(before.Train(step));
  Fleet next(3, 2);
  EXPECT_EQ(next.servers[0]->Serve().code(), StatusCode::kFailedPrecondition);
  RowTransfer::Options options{.placement = 3, .deadline = std::chrono::milliseconds(200)};
  for (uint32_t i = 0; i < 3; ++i) options.targets.push_back({next.addresses[i], 7});
  // Pieces for others than these servers: as if they had been started again.
  ASSERT_TRUE(before.servers[0]->BeginTransfer(options).ok());
  EXPECT_EQ(before.servers[0]->BeginTransfer(options).code(), StatusCode::kFailedPrecondition);
  while (before.servers[0]->transfer_progress()->state != RowTransfer::State::kFailed) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_FALSE(before.servers[0]->HandOver().ok());
  EXPECT_FALSE(before.servers[0]->has_handed_over());
  before.servers[0]->Resume();
  EXPECT_FALSE(before.servers[0]->transfer_progress().has_value());
  EXPECT_TRUE(before.Train(21));
}

TEST(RowTransferTest, PiecesAreTakenOnceAndInTurn) {
  Fleet next(1, 2);
  const uint64_t target = next.servers[0]->incarnation();
  const auto send = [&](uint32_t piece, uint32_t source, uint64_t sender, ReplicateKind kind,
                        std::span<const std::byte> body = {}) {
    return net::Call(*next.channels[0], kReplicate,
                     {sender, target, kind, 0, PieceNumber(piece, source), body}, Soon())
        .code();
  };
  EXPECT_EQ(send(1, 0, 7, ReplicateKind::kCopyEnd), StatusCode::kFailedPrecondition);
  EXPECT_EQ(send(0, 0, 7, ReplicateKind::kCopyUpdates), StatusCode::kOk);
  EXPECT_EQ(send(0, 0, 7, ReplicateKind::kCopyRows), StatusCode::kOk);  // late: it is not looked at
  EXPECT_EQ(send(1, 0, 8, ReplicateKind::kCopyEnd), StatusCode::kFailedPrecondition);
  EXPECT_EQ(send(0, 2, 7, ReplicateKind::kCopyEnd), StatusCode::kInvalidArgument);
  const std::array<std::byte, 3> cut_off = {};
  EXPECT_EQ(send(1, 0, 7, ReplicateKind::kCopyEnd, cut_off), StatusCode::kInvalidArgument);
  EXPECT_EQ(send(1, 0, 7, ReplicateKind::kCopyEnd), StatusCode::kOk);
  EXPECT_EQ(next.servers[0]->Serve().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(send(0, 1, 9, ReplicateKind::kCopyEnd), StatusCode::kOk);
  EXPECT_TRUE(next.servers[0]->Serve().ok());
}

TEST(RowTransferTest, SourcesThatDoNotAgreeOnThePlacementFail) {
  Fleet before(2), next(2, 2);
  before.Configure();
  // Of other servers than the targets.
  RowTransfer::Options options{.placement = 3, .deadline = std::chrono::hours(1)};
  for (uint32_t i = 0; i < 2; ++i) {
    options.targets.push_back({next.addresses[i], next.servers[i]->incarnation()});
  }
  EXPECT_EQ(before.servers[0]->BeginTransfer(options).code(), StatusCode::kInvalidArgument);
  options.placement = Moved(2, 1);
  ASSERT_TRUE(before.servers[0]->BeginTransfer(options).ok());
  options.placement = Moved(2, 2);
  ASSERT_TRUE(before.servers[1]->BeginTransfer(options).ok());
  before.AwaitFollowing();
  ASSERT_TRUE(before.servers[0]->HandOver().ok());
  const Status refused = before.servers[1]->HandOver();
  EXPECT_NE(refused.message().find("placed its rows otherwise"), std::string::npos)
      << refused.ToString();
  EXPECT_FALSE(next.servers[0]->Serve().ok());
}

TEST(RowTransferTest, AServerCountsTheRowsThatItLooksUpByVirtualShard) {
  Fleet fleet(1);
  fleet.Configure();
  const std::vector<uint64_t> signs = {5, 6, 7};
  const std::vector<SignBlock> blocks = {{kRowDim, 3}};
  for (int i = 0; i < 170; ++i) {
    ASSERT_TRUE(fleet.servers[0]->Lookup({true, {blocks, signs}}).ok());
  }
  std::vector<uint64_t> expected(kNumVirtualShards);
  for (const uint64_t sign : signs) expected[VirtualShard(SignHash(sign))] += 10;  // of 17 one
  EXPECT_EQ(fleet.servers[0]->shard_loads(), expected);
}

TEST(RowTransferTest, TheOldServersAnswerAgainWhereTheNewOnesAreGivenUp) {
  Fleet before(2);
  before.Configure();
  for (uint64_t step = 1; step <= 20; ++step) ASSERT_TRUE(before.Train(step));
  Fleet next(3, 2);
  ASSERT_TRUE(before.BeginTransfer(next).ok());
  before.AwaitFollowing();
  before.HandOver();
  EXPECT_EQ(before.servers[0]->HandOver().code(),
            StatusCode::kFailedPrecondition);  // once is enough
  for (const auto& server : before.servers) server->Resume();
  for (uint64_t step = 21; step <= 40; ++step) ASSERT_TRUE(before.Train(step));
  EXPECT_EQ(before.Rows(), Expected(40));
}

TEST(RowTransferTest, GivingUpWaitsForNoServerThatHasEnded) {
  Fleet before(1), next(1, 1);
  before.Configure();
  ASSERT_TRUE(before.BeginTransfer(next).ok());
  before.AwaitFollowing();
  next.servers.clear();
  ASSERT_TRUE(before.Train(1));
  while (before.servers[0]->transfer_progress()->num_rows == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  before.servers[0]->Resume();
  EXPECT_TRUE(before.Train(2));
}

TEST(RowTransferTest, RefusesWhatCountsOrClocksDecideAndClearedRows) {
  Fleet counting(1), next(2, 1);
  counting.Configure(/*admit_after=*/2);
  const Status refused = counting.BeginTransfer(next);
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.message().find("admit_after"), std::string::npos) << refused.ToString();

  Fleet before(1);
  before.Configure();
  ASSERT_TRUE(before.Train(1));
  ASSERT_TRUE(before.BeginTransfer(next).ok());
  before.AwaitFollowing();
  ASSERT_TRUE(net::Call(*before.channels[0], kClearRows, {}, Soon()).ok());
  EXPECT_FALSE(before.servers[0]->HandOver().ok());
  before.servers[0]->Resume();
  EXPECT_TRUE(before.Train(2));
}

}  // namespace
}  // namespace persia::server
