#include <gtest/gtest.h>

#include <vector>

#include "client/remote_client.h"

namespace persia::client {
namespace {

std::vector<uint32_t> ActiveIndices(const WorkerChannels& channels) {
  std::vector<uint32_t> indices;
  for (const auto& [index, channel] : channels.Active()) indices.push_back(index);
  return indices;
}

TEST(WorkerChannelsTest, ExpectedWorkersTakeWorkBeforeTheirAddressIsKnown) {
  const WorkerChannels channels(2);
  EXPECT_EQ(ActiveIndices(channels), (std::vector<uint32_t>{0, 1}));
}

TEST(WorkerChannelsTest, ANewWorkerIsAddedAndThoseBetweenAreNotAsked) {
  WorkerChannels channels(1);
  ASSERT_TRUE(channels.Set(3, "127.0.0.1:1").ok());
  EXPECT_EQ(ActiveIndices(channels), (std::vector<uint32_t>{0, 3}));
  EXPECT_TRUE(channels.At(2).ok());
  EXPECT_EQ(channels.At(4).status().code(), StatusCode::kInvalidArgument);
}

TEST(WorkerChannelsTest, ARetiredWorkerKeepsItsChannelAndMayReturn) {
  WorkerChannels channels(2);
  const auto channel = channels.At(1).value();
  channels.Retire(1);
  channels.Retire(9);
  EXPECT_EQ(ActiveIndices(channels), (std::vector<uint32_t>{0}));
  EXPECT_EQ(channels.At(1).value(), channel);
  ASSERT_TRUE(channels.Set(1, "127.0.0.1:2").ok());
  EXPECT_EQ(ActiveIndices(channels), (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(channels.At(1).value(), channel);
}

TEST(WorkerChannelsTest, WithoutAnyAllAreAskedSoThatCallsWaitForOne) {
  WorkerChannels channels(2);
  channels.Retire(0);
  channels.Retire(1);
  EXPECT_EQ(ActiveIndices(channels), (std::vector<uint32_t>{0, 1}));
}

TEST(WorkerChannelsTest, AnIndexThatNoJobReachesIsRefused) {
  WorkerChannels channels(1);
  EXPECT_EQ(channels.Set(65536, "127.0.0.1:1").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ActiveIndices(channels), (std::vector<uint32_t>{0}));
}

}  // namespace
}  // namespace persia::client
