#include "server/standby_link.h"

#include <algorithm>
#include <exception>
#include <future>
#include <utility>

#include "net/rpc.h"

namespace persia::server {

std::chrono::milliseconds LeaseOf(std::chrono::milliseconds deadline) {
  return std::min(std::chrono::milliseconds(750), deadline / 4);
}

StandbyLink::StandbyLink(const Options& options, BeginCopy begin_copy)
    : options_(options), lease_(LeaseOf(options.deadline)), begin_copy_(std::move(begin_copy)) {}

StandbyLink::~StandbyLink() { Detach(State::kFenced, "this parameter server has ended"); }

Status StandbyLink::Attach(const std::string& address, uint64_t standby) {
  const std::lock_guard lifecycle(lifecycle_);
  const std::lock_guard lock(order_);
  if (state_ == State::kFenced) return FailedPrecondition(reason());
  if (channel_ != nullptr) return FailedPrecondition("the server has a standby already");
  // No operation is under way: the copy has all that came before, and the log all that follows.
  PERSIA_ASSIGN_OR_RETURN(auto copy, begin_copy_());
  const std::lock_guard link_lock(link_);
  channel_ = std::make_shared<net::Channel>(net::Channel::Options{.peer = "the standby"});
  channel_->SetAddress(address);
  standby_ = standby;
  next_ = 0;
  reason_.clear();
  is_copying_ = true;
  lease_until_ = (Clock::now() + lease_).time_since_epoch().count();
  state_ = State::kReplicating;
  threads_.emplace_back([this, channel = channel_, standby, copy = std::move(copy)]() mutable {
    SendCopy(channel, standby, std::move(copy));
  });
  threads_.emplace_back([this, channel = channel_, standby] { SendHeartbeats(channel, standby); });
  return Status::Ok();
}

void StandbyLink::Release() { Detach(State::kAlone, ""); }

void StandbyLink::Fence(const std::string& reason) { Detach(State::kFenced, reason); }

void StandbyLink::Detach(State state, const std::string& reason) {
  const std::lock_guard lifecycle(lifecycle_);
  ChannelPtr channel;
  {
    // An operation is applied and sent, or neither: one that is under way is waited for.
    const std::lock_guard lock(order_);
    const std::lock_guard link_lock(link_);
    if (state_ == State::kFenced) return;  // for good
    channel = std::exchange(channel_, nullptr);
    reason_ = reason;
    is_copying_ = false;
    state_ = state;
    link_changed_.notify_all();
  }
  // Outside the locks: it ends the calls that are under way.
  if (channel != nullptr) channel->Close();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void StandbyLink::Break(const ChannelPtr& channel, const Status& reason) {
  {
    const std::lock_guard lock(link_);
    if (channel_ != channel || state_ != State::kReplicating) return;
    reason_ = reason.message();
    is_copying_ = false;
    state_ = State::kBroken;
    link_changed_.notify_all();
  }
  // Nothing of this link may reach the standby from now on.
  channel->Close();
}

ReplicateRequest StandbyLink::Message(uint64_t standby, ReplicateKind kind,
                                      std::span<const std::byte> body) const {
  return {options_.incarnation, standby, kind, 0, 0, body};
}

// A standby that was released has a closed channel, which ends the copy.
void StandbyLink::SendCopy(const ChannelPtr& channel, uint64_t standby,
                           std::unique_ptr<RowCopy> copy) {
  const Status status = copy->SendTo([&](ReplicateKind kind, std::span<const std::byte> body) {
    return net::Call(*channel, kReplicate, Message(standby, kind, body),
                     Clock::now() + options_.deadline);
  });
  copy.reset();
  if (!status.ok()) return Break(channel, status);
  const std::lock_guard lock(link_);
  if (channel_ == channel) is_copying_ = false;
}

// Also where operations extend the lease: a standby that has taken over, or ended, is noticed.
void StandbyLink::SendHeartbeats(const ChannelPtr& channel, uint64_t standby) {
  const ReplicateRequest message = Message(standby, ReplicateKind::kHeartbeat, {});
  const auto has_ended = [&] { return channel_ != channel || state_ != State::kReplicating; };
  std::unique_lock lock(link_);
  while (!has_ended()) {
    lock.unlock();
    const auto sent_at = Clock::now();
    const Status status = net::Call(*channel, kReplicate, message, sent_at + options_.deadline);
    if (!status.ok()) return Break(channel, status);
    ExtendLease(sent_at);
    lock.lock();
    link_changed_.wait_for(lock, lease_ / 5, has_ended);
  }
}

// From the time of sending: the standby counts from when it received the message.
void StandbyLink::ExtendLease(Clock::time_point sent_at) {
  const Clock::rep until = (sent_at + lease_).time_since_epoch().count();
  Clock::rep known = lease_until_.load();
  while (known < until && !lease_until_.compare_exchange_weak(known, until)) {
  }
}

Status StandbyLink::CheckServes() const {
  const State state = state_.load();
  if (state == State::kAlone) return Status::Ok();
  if (state != State::kFenced && Clock::now().time_since_epoch().count() < lease_until_.load()) {
    return Status::Ok();
  }
  if (state == State::kFenced) return Unavailable(reason());
  return Unavailable(
      "the lease of this parameter server has expired: its standby does not answer, "
      "and may have taken over");
}

StatusOr<Segments> StandbyLink::Run(const MethodId& method, const Buffer& body,
                                    const std::function<StatusOr<Segments>()>& apply) {
  std::unique_lock lock(order_);
  has_place_.wait_for(lock, lease_, [this] { return num_waiting_ < options_.max_waiting; });
  if (num_waiting_ >= options_.max_waiting) {
    return Unavailable("the standby is slow: too many operations wait for it");
  }
  // Again, under the lock: what is applied below is sent, or was never to be.
  if (state_ == State::kBroken) return Unavailable("the link to the standby broke: ", reason());
  PERSIA_RETURN_IF_ERROR(state_ == State::kFenced ? Unavailable(reason()) : Status::Ok());
  auto reply = ApplyHere(apply);
  // What was refused has changed nothing, so the standby does not need it.
  if (!reply.ok() || channel_ == nullptr) return reply;
  const ChannelPtr channel = channel_;
  const auto answer = std::make_shared<std::promise<Status>>();
  ReplicateRequest message = Message(standby_, ReplicateKind::kOperation, body.span());
  message.method = method.number;
  message.number = next_++;
  const auto sent_at = Clock::now();
  // Called under the lock: the channel sends calls in the order in which it was given them. `body`
  // stays until the answer, which comes by the deadline.
  channel->CallAsync(
      kReplicate, std::move(message).Encode(), sent_at + options_.deadline,
      [answer](const StatusOr<Buffer>& taken) { answer->set_value(taken.status()); });
  ++num_waiting_;
  lock.unlock();
  const Status taken = answer->get_future().get();
  if (taken.ok()) {
    ExtendLease(sent_at);
  } else {
    Break(channel, taken);
  }
  lock.lock();
  --num_waiting_;
  has_place_.notify_all();
  if (!taken.ok()) return Unavailable("the standby has not taken the operation: ", reason());
  return reply;
}

// What fails within, rather than being refused, may have changed some rows: the standby's differ.
StatusOr<Segments> StandbyLink::ApplyHere(const std::function<StatusOr<Segments>()>& apply) {
  const auto may_be_applied_in_part = [this, channel = channel_](const std::string& failure) {
    if (channel != nullptr) Break(channel, Internal("an operation failed here: ", failure));
  };
  try {
    auto reply = apply();
    if (reply.code() == StatusCode::kInternal) may_be_applied_in_part(reply.status().message());
    return reply;
  } catch (const std::exception& error) {
    may_be_applied_in_part(error.what());
    throw;
  }
}

std::string StandbyLink::reason() const {
  const std::lock_guard lock(link_);
  return reason_;
}

}  // namespace persia::server
