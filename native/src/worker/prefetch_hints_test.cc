// What PrefetchHints makes of servers that answer late, not at all, or do not know the method.
#include "worker/prefetch_hints.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "base/row_protocol.h"
#include "net/test_support.h"

namespace persia::worker {
namespace {

using net::testing::Soon;

constexpr std::chrono::milliseconds kPatience{50};

class PrefetchHintsTest : public ::testing::Test {
 protected:
  void Start(bool knows_method = true) {
    if (knows_method) {
      server_.Handle(kPrefetchRows, [this](const Buffer&, const net::CallContext&) {
        ++num_calls_;
        if (is_silent_) gate_.wait();
        return StatusOr<Segments>(EncodeMessage(PrefetchRowsReply{1}));
      });
    }
    auto port = server_.Start();
    ASSERT_TRUE(port.ok()) << port.status().ToString();
    channel_.SetAddress(net::testing::Loopback(*port));
  }
  void TearDown() override { may_answer_.set_value(); }

  bool IsWanted() { return PrefetchHints::IsWanted(hints_, &channel_); }
  HintReport Send() { return PrefetchHints::Send(hints_, signs_, &channel_); }
  template <typename Condition>
  static bool InTime(Condition condition) {
    const auto deadline = Soon();
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

  const std::vector<uint64_t> signs_ = {1, 2, 3};
  std::promise<void> may_answer_;
  const std::shared_future<void> gate_ = may_answer_.get_future().share();
  std::atomic<bool> is_silent_ = false;
  std::atomic<int> num_calls_ = 0;
  net::Server server_{net::Server::Options{.num_handler_threads = 16}};
  net::Channel channel_{net::Channel::Options{.peer = "the server"}};
  std::shared_ptr<PrefetchHints> hints_ = std::make_shared<PrefetchHints>(kPatience);
};

TEST_F(PrefetchHintsTest, AServerThatDoesNotAnswerIsAskedAnew) {
  is_silent_ = true;
  Start();
  EXPECT_FALSE(IsWanted());
  ASSERT_TRUE(InTime([&] { return !IsWanted() && num_calls_ >= 2; }));
  EXPECT_EQ(Send().num_signs, 0u);  // nothing before it has said so
  is_silent_ = false;
  EXPECT_TRUE(InTime([&] { return IsWanted(); }));
}

TEST_F(PrefetchHintsTest, AfterHintsWithoutAnswerThereIsRoomForOthers) {
  Start();
  ASSERT_TRUE(InTime([&] { return IsWanted(); }));
  is_silent_ = true;
  while (Send().num_dropped == 0 && IsWanted()) continue;
  // Not known any more, once a hint has had no answer.
  ASSERT_TRUE(InTime([&] { return Send().num_signs == 0; }));
  is_silent_ = false;
  ASSERT_TRUE(InTime([&] { return IsWanted(); }));
  EXPECT_TRUE(InTime([&] {
    const HintReport sent = Send();
    return sent.num_signs == signs_.size() && sent.num_dropped == 0;
  }));
}

TEST_F(PrefetchHintsTest, AnOlderServerIsAskedOnce) {
  hints_ = std::make_shared<PrefetchHints>();  // it does answer, when it comes to it
  Start(/*knows_method=*/false);
  const auto num_asked = [&] { return channel_.stats().metrics["num_calls"]; };
  EXPECT_FALSE(IsWanted());
  ASSERT_TRUE(InTime([&] { return num_asked() == 1; }));
  for (int i = 0; i < 20; ++i) {
    EXPECT_FALSE(IsWanted());
    EXPECT_EQ(Send().num_signs, 0u);
    std::this_thread::sleep_for(kPatience / 20);
  }
  EXPECT_EQ(num_asked(), 1u);
  // Another one in its place is asked.
  hints_->Forget();
  EXPECT_FALSE(IsWanted());
  EXPECT_TRUE(InTime([&] { return num_asked() == 2; }));
}

}  // namespace
}  // namespace persia::worker
