#include "server/standby_link.h"

#include <algorithm>
#include <future>
#include <utility>

#include "base/row_protocol.h"
#include "net/rpc.h"

namespace persia::server {

Status StandbyLink::Attach(const std::string& address) {
  const std::lock_guard lock(order_);
  if (channel_ != nullptr) return FailedPrecondition("the server has a standby already");
  if (has_changed_) {
    return FailedPrecondition("the server has applied operations that its standby does not have");
  }
  channel_ = std::make_shared<net::Channel>(net::Channel::Options{.peer = "the standby"});
  channel_->SetAddress(address);
  state_ = State::kReplicating;
  return Status::Ok();
}

void StandbyLink::Release() {
  std::shared_ptr<net::Channel> channel;
  {
    const std::lock_guard lock(order_);
    channel = std::exchange(channel_, nullptr);
    has_changed_ = true;
    state_ = State::kAlone;
    mended_.notify_all();
  }
  // Outside the lock: it ends the calls that are under way.
  if (channel != nullptr) channel->Close();
}

bool StandbyLink::AwaitMended(std::unique_lock<std::mutex>& lock, net::Clock::time_point deadline) {
  return mended_.wait_until(lock, deadline, [this] { return state_ != State::kBroken; });
}

StatusOr<Segments> StandbyLink::Run(const MethodId& method, const Buffer& body,
                                    const net::CallContext& context,
                                    const std::function<StatusOr<Segments>()>& apply) {
  const Status lost = Unavailable("the standby does not answer, and may have taken over");
  std::unique_lock lock(order_);
  if (!AwaitMended(lock, context.deadline)) return lost;
  auto reply = apply();
  // What failed has changed nothing, so the standby does not need it.
  if (!reply.ok()) return reply;
  if (channel_ == nullptr) {
    has_changed_ = true;
    return reply;
  }
  const std::shared_ptr<net::Channel> channel = channel_;
  const auto answer = std::make_shared<std::promise<Status>>();
  // Called under the lock: the channel sends calls in the order in which it was given them. `body`
  // stays until the answer, which comes by the deadline.
  channel->CallAsync(kReplicate, ReplicateRequest{next_++, method.number, body.span()}.Encode(),
                     net::Clock::now() + patience_, [answer](const StatusOr<Buffer>& taken) {
                       answer->set_value(taken.status());
                     });
  lock.unlock();
  if (answer->get_future().get().ok()) return reply;
  lock.lock();
  if (channel_ == channel) state_ = State::kBroken;
  if (!AwaitMended(lock, context.deadline)) return lost;
  return reply;
}

OperationLog::OperationLog(uint64_t max_bytes, Apply apply)
    : max_bytes_(max_bytes), apply_(std::move(apply)), thread_([this] { ApplyAll(); }) {}

OperationLog::~OperationLog() { Finish(); }

Status OperationLog::Add(uint64_t number, uint8_t method, Buffer body,
                         net::Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const bool is_in_turn = changed_.wait_until(lock, deadline, [&] {
    return is_finished_ || number < num_received_ ||
           (number == num_received_ && (operations_.empty() || bytes_ < max_bytes_));
  });
  if (number < num_received_) return Status::Ok();
  if (is_finished_) return FailedPrecondition("this standby has taken over");
  if (!is_in_turn) {
    return DeadlineExceeded("operation " + std::to_string(number) + " waits for room, or for " +
                            std::to_string(num_received_));
  }
  bytes_ += body.size();
  operations_.push_back({method, std::move(body)});
  ++num_received_;
  changed_.notify_all();
  return Status::Ok();
}

void OperationLog::Finish() {
  const std::lock_guard only_one(finish_mutex_);
  {
    const std::lock_guard lock(mutex_);
    is_finished_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void OperationLog::ApplyAll() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return is_finished_ || !operations_.empty(); });
    if (operations_.empty()) return;
    const Operation& operation = operations_.front();  // Add() moves no element of a deque
    lock.unlock();
    apply_(operation.method, operation.body);
    lock.lock();
    bytes_ -= operation.body.size();
    operations_.pop_front();
    changed_.notify_all();
  }
}

uint64_t OperationLog::num_received() const {
  const std::lock_guard lock(mutex_);
  return num_received_;
}

uint64_t OperationLog::num_waiting() const {
  const std::lock_guard lock(mutex_);
  return operations_.size();
}

}  // namespace persia::server
