#include "server/operation_log.h"

#include <cstring>
#include <utility>

namespace persia::server {
namespace {

// Beyond the lease, for clocks that do not run equally fast.
constexpr double kLeaseMargin = 1.25;

const char* NameOf(OperationLog::State state) {
  switch (state) {
    case OperationLog::State::kTakenOver: return "this standby has taken over";
    case OperationLog::State::kRenounced: return "this standby was released, and ends";
    case OperationLog::State::kUnfit: return "this standby is unfit";
    case OperationLog::State::kFollowing: break;
  }
  return "this standby follows its primary";
}

}  // namespace

OperationLog::OperationLog(const Options& options, Apply apply, TakeCopy take_copy)
    : options_(options),
      apply_(std::move(apply)),
      take_copy_(std::move(take_copy)),
      thread_([this] { ApplyAll(); }) {}

OperationLog::~OperationLog() {
  Renounce();
  Join();
}

// The numbers and the copy belong to one primary: operations of another would count as repeated.
void OperationLog::Follow(uint64_t primary) {
  const std::lock_guard lock(mutex_);
  if (primary != primary_ && heard_at_.has_value()) {
    BecomeUnfit(FailedPrecondition("it has rows or operations of another primary"));
  }
  primary_ = primary;
}

Status OperationLog::CheckMessage(const ReplicateRequest& message) const {
  if (message.standby != options_.standby || message.primary != primary_ || primary_ == 0) {
    return FailedPrecondition(
        "the message is of other servers than this standby and its primary: "
        "one of them was replaced");
  }
  if (state_ == State::kFollowing) return Status::Ok();
  return FailedPrecondition(NameOf(state_),
                            failure_.ok() ? std::string() : ": " + failure_.message());
}

Status OperationLog::Take(const ReplicateRequest& message, net::Clock::time_point deadline) {
  {
    std::unique_lock lock(mutex_);
    PERSIA_RETURN_IF_ERROR(CheckMessage(message));
    heard_at_ = net::Clock::now();
    if (message.kind == ReplicateKind::kHeartbeat) return Status::Ok();
    if (message.kind == ReplicateKind::kOperation) return Add(&lock, message, deadline);
  }
  // Lock order: copy_mutex_ before mutex_, which is free while a piece is loaded: heartbeats must
  // be answered meanwhile.
  const std::lock_guard one_piece(copy_mutex_);
  if (has_copy()) return Status::Ok();  // repeated
  const Status status = take_copy_(message.kind, message.body);
  const std::lock_guard lock(mutex_);
  if (!status.ok()) BecomeUnfit(status);
  has_copy_ = status.ok() && message.kind == ReplicateKind::kCopyEnd;
  changed_.notify_all();
  return CheckMessage(message);
}

// A predecessor was sent earlier on the same connection, so that it is here or about to come.
Status OperationLog::Add(std::unique_lock<std::mutex>* lock, const ReplicateRequest& message,
                         net::Clock::time_point deadline) {
  const uint64_t number = message.number;
  const bool is_in_turn = changed_.wait_until(
      *lock, deadline, [&] { return state_ != State::kFollowing || number <= num_received_; });
  if (number < num_received_) return Status::Ok();
  PERSIA_RETURN_IF_ERROR(CheckMessage(message));
  if (!is_in_turn) {
    return DeadlineExceeded("operation ", number, " waits for ", num_received_);
  }
  if (!operations_.empty() && bytes_ >= options_.max_bytes) {
    const std::string full = "operations of " + std::to_string(bytes_) + " bytes wait already";
    if (has_copy_) return Unavailable(full);
    BecomeUnfit(ResourceExhausted(full, ", and the copy of the rows is not complete"));
    return CheckMessage(message);
  }
  Buffer body(message.body.size());
  if (!message.body.empty()) std::memcpy(body.data(), message.body.data(), body.size());
  bytes_ += body.size();
  operations_.push_back({static_cast<uint8_t>(message.method), std::move(body)});
  ++num_received_;
  changed_.notify_all();
  return Status::Ok();
}

// Only from kFollowing: a server that has taken over has the only rows there are, and stays.
void OperationLog::BecomeUnfit(const Status& failure) {
  if (state_ != State::kFollowing) return;
  failure_ = failure;
  state_ = State::kUnfit;
  has_ended_ = true;
  operations_.clear();
  bytes_ = 0;
  changed_.notify_all();
}

Status OperationLog::TakeOver(bool has_ended) {
  PERSIA_RETURN_IF_ERROR(BeginTakeOver(has_ended));
  Join();
  // An operation of the log may have failed just now.
  return failure();
}

Status OperationLog::BeginTakeOver(bool has_ended) {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kTakenOver) return Status::Ok();
  if (state_ != State::kFollowing) {
    return FailedPrecondition(NameOf(state_),
                              failure_.ok() ? std::string() : ": " + failure_.message());
  }
  if (!has_copy_ || !heard_at_.has_value()) {
    return FailedPrecondition("this standby does not have all rows of its primary yet");
  }
  const auto silent_for = net::Clock::now() - *heard_at_;
  if (!has_ended && silent_for < options_.lease * kLeaseMargin) {
    return Unavailable("the lease of the primary may still be valid");
  }
  // Under the lock: no message extends the lease from here on.
  state_ = State::kTakenOver;
  has_ended_ = true;
  changed_.notify_all();
  return Status::Ok();
}

// Called before the primary continues without this standby: updates that it acknowledges from then
// on are missing here, and must never be replaced by these rows.
bool OperationLog::Renounce() {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kFollowing) state_ = State::kRenounced;
  if (state_ == State::kRenounced) {
    has_ended_ = true;
    operations_.clear();
    bytes_ = 0;
    changed_.notify_all();
  }
  return state_ != State::kTakenOver;
}

// TakeOver() of several callers, and the destructor, may want the end of the thread at once: join()
// by two threads is undefined.
void OperationLog::Join() {
  const std::lock_guard only_one(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

// Without the lock while an operation runs: messages of the primary are taken meanwhile, and
// heartbeats keep its lease. The thread ends with an empty log, so a take-over loses no operation
// that was acknowledged.
void OperationLog::ApplyAll() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return has_ended_ || (has_copy_ && !operations_.empty()); });
    if (operations_.empty()) return;
    const Operation operation = std::move(operations_.front());
    operations_.pop_front();
    bytes_ -= operation.body.size();
    lock.unlock();
    const Status status = apply_(operation.method, operation.body);
    lock.lock();
    if (!status.ok()) {
      failure_ = status;
      if (state_ == State::kFollowing) state_ = State::kUnfit;
      return;
    }
    changed_.notify_all();
  }
}

OperationLog::State OperationLog::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

Status OperationLog::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool OperationLog::has_copy() const {
  const std::lock_guard lock(mutex_);
  return has_copy_;
}

std::chrono::duration<double> OperationLog::silent_for() const {
  const std::lock_guard lock(mutex_);
  if (!heard_at_.has_value()) return std::chrono::duration<double>::max();
  return net::Clock::now() - *heard_at_;
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
