// The state of a tier's checkpoints and failures, which its threads and callers share.
#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "store/shard_set.h"
#include "store/store_tier.h"
#include "store/tier_rules.h"

namespace persia::store {
namespace {

// Between two attempts to write what there is no room for, or to give memory back.
constexpr std::chrono::milliseconds kRetry{50};

}  // namespace

// A restart must find the shape and the optimizer of each row that it recovers; a learning rate
// comes with the script.
Status StoreTier::SaveConfigIfNew(const TrainConfig& config) {
  const bool is_saved =
      saved_config_.has_value() &&
      saved_config_->feature_index_prefix_bit == config.feature_index_prefix_bit &&
      saved_config_->groups.size() == config.groups.size() &&
      CheckChange(*saved_config_, config, /*replace=*/true).ok();
  if (is_saved) return Status::Ok();
  PERSIA_RETURN_IF_ERROR(SaveRules(directory_, {pool_->id(), config}));
  saved_config_ = config;
  return Status::Ok();
}

// The store is locked exclusively, so the batch has ended in all shards: what changes from now on
// is of the next one, and no update is in the checkpoint in some shards and in others not.
StatusOr<uint64_t> StoreTier::RequestCheckpoint(bool held) {
  PERSIA_RETURN_IF_ERROR(CheckOpen());
  if (!shards_.IsConfigured()) {
    return FailedPrecondition(
        "no optimizer yet, and so no rows: a TrainCtx that is entered configures it; dump after "
        "that");
  }
  const std::unique_lock store_lock(shards_.mutex());
  PERSIA_RETURN_IF_ERROR(status());
  std::unique_lock lock(mutex_);
  if (held && held_) {
    return FailedPrecondition("checkpoint ", *held_, " is held; commit or drop it first");
  }
  const uint64_t batch = batch_.load();
  PERSIA_RETURN_IF_ERROR(pool_->BeginCheckpoint(batch));
  if (held) {
    held_ = batch;
    checkpoint_error_ = Status::Ok();  // what came before need not concern it
  }
  CountBatch();
  lock.unlock();
  Wake();
  return batch;
}

// Writes to the device without the mutex: that may take long, and calls report through it.
Status StoreTier::EndCheckpoint(uint64_t batch) {
  PERSIA_RETURN_IF_ERROR(this->status());
  std::unique_lock lock(mutex_);
  const bool is_held = held_ == batch;
  lock.unlock();
  if (!is_held) {
    const Status status = pool_->Commit(batch);
    lock.lock();
    progress_.notify_all();
    // Where it is pending no more, Clear() or the one who held it came in between.
    return pool_->oldest_pending() == batch ? status : Status::Ok();
  }
  auto prepared = pool_->Prepare(batch);
  lock.lock();
  // Dropped, or cleared with all others, meanwhile.
  if (held_ != batch || pool_->oldest_pending() != batch) return Status::Ok();
  if (prepared.ok()) prepared_ = *prepared;
  return prepared.status();
}

bool StoreTier::IsPrepared(uint64_t batch) const {
  const std::lock_guard lock(mutex_);
  return prepared_ && prepared_->batch == batch;
}

Status StoreTier::CheckHeld(uint64_t batch) const {
  if (held_ == batch) return Status::Ok();
  return FailedPrecondition("checkpoint ", batch,
                            " is not held: it has ended, or the rows were cleared or loaded since");
}

StatusOr<std::optional<pool::PreparedCheckpoint>> StoreTier::PreparedCheckpoint(
    uint64_t batch) const {
  PERSIA_RETURN_IF_ERROR(CheckOpen());
  PERSIA_RETURN_IF_ERROR(status());
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckHeld(batch));
  if (!prepared_) PERSIA_RETURN_IF_ERROR(checkpoint_error_);
  return prepared_;
}

// Without the store's lock: the device may take its time, and training must not wait for it.
Status StoreTier::CommitCheckpoint(uint64_t batch) {
  PERSIA_RETURN_IF_ERROR(CheckOpen());
  PERSIA_RETURN_IF_ERROR(status());
  std::unique_lock lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckHeld(batch));
  if (!prepared_) {
    return FailedPrecondition("checkpoint ", batch, " is not written yet");
  }
  lock.unlock();  // the device may take its time, and Wake() needs the mutex
  const Status status = pool_->Commit(batch);
  // It may have been dropped or cleared meanwhile, which is no failure of the device.
  if (status.code() != StatusCode::kInvalidArgument) Fail(status);
  PERSIA_RETURN_IF_ERROR(status);
  lock.lock();
  LetGo(batch);
  progress_.notify_all();
  lock.unlock();
  Wake();  // for checkpoints behind it
  return Status::Ok();
}

// With others in the store: last_checkpoint() falls to what is still wanted. The store's lock keeps
// RequestCheckpoint() away.
Status StoreTier::DropCheckpoint(uint64_t batch) {
  PERSIA_RETURN_IF_ERROR(CheckOpen());
  const std::shared_lock store_lock(shards_.mutex());
  std::unique_lock lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckHeld(batch));
  lock.unlock();  // a commit may be at the device
  PERSIA_RETURN_IF_ERROR(pool_->DropCheckpoint(batch));
  lock.lock();
  LetGo(batch);
  checkpoint_error_ = Status::Ok();
  progress_.notify_all();
  lock.unlock();
  Wake();
  return Status::Ok();
}

// Of a checkpoint that is not the held one, as after Clear(), nothing is to be done.
void StoreTier::LetGo(uint64_t batch) {
  if (held_ != batch) return;
  held_.reset();
  prepared_.reset();
}

// The version goes on rising: a number is never used for two batches.
Status StoreTier::Clear() {
  PERSIA_RETURN_IF_ERROR(status());
  PERSIA_RETURN_IF_ERROR(pool_->Clear());
  const std::lock_guard lock(mutex_);
  held_.reset();
  prepared_.reset();
  checkpoint_error_ = Status::Ok();
  progress_.notify_all();
  return Status::Ok();
}

// Order matters: a committed checkpoint stays committed although the tier failed later.
Status StoreTier::WaitCheckpoint(uint64_t batch, std::chrono::milliseconds timeout) const {
  PERSIA_RETURN_IF_ERROR(CheckOpen());
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
  const auto deadline = std::chrono::steady_clock::now() + std::min(timeout, kLongest);
  std::unique_lock lock(mutex_);
  while (true) {
    // A held one is committed once it is let go: then the next can be held.
    if (batch != 0 && held_ != batch && pool_->committed() >= batch) return Status::Ok();
    if (has_failed_) return failure_;
    if (batch == 0 || pool_->last_checkpoint() < batch) {
      return FailedPrecondition("no checkpoint of number ", batch,
                                " is pending: it was not asked for, or the rows were cleared "
                                "since; ask for another");
    }
    if (!checkpoint_error_.ok()) return checkpoint_error_;
    if (std::chrono::steady_clock::now() >= deadline) {
      return DeadlineExceeded("checkpoint ", batch, " was not committed within ", timeout.count(),
                              " ms; it is still pending: wait longer");
    }
    progress_.wait_until(lock, deadline);
  }
}

// The first failure stays: later ones follow from it. A lack of room is none, as it may end.
void StoreTier::Fail(const Status& status) {
  if (status.ok() || status.code() == StatusCode::kResourceExhausted || has_failed_.load()) return;
  const std::lock_guard lock(mutex_);
  failure_ = status;
  has_failed_ = true;
  progress_.notify_all();
}

void StoreTier::NoteRound(const Status& cache, const Status& checkpoints, uint64_t batch,
                          bool has_more) {
  const std::lock_guard lock(mutex_);
  cache_error_ = cache;
  has_more_ = has_more;
  // Of one that was dropped meanwhile it concerns nobody.
  checkpoint_error_ = pool_->oldest_pending() == batch ? checkpoints : Status::Ok();
  progress_.notify_all();
}

// Read by every call: the mutex only where there is a failure to be told.
Status StoreTier::status() const {
  if (!has_failed_.load(std::memory_order_acquire)) return Status::Ok();
  const std::lock_guard lock(mutex_);
  return failure_;
}

// The mutex is taken between the flag and the signal: a thread that has read the flag as unset, and
// does not wait yet, would miss it.
void StoreTier::Wake() {
  if (has_work_.exchange(true)) return;
  {
    const std::lock_guard lock(mutex_);
  }
  wake_.notify_one();
}

// Polls while something is in the way: the reason, such as a full disk, may end without a call.
bool StoreTier::WaitForWork() {
  std::unique_lock lock(mutex_);
  const auto has_work = [this] { return is_stopping_.load() || has_work_.load(); };
  if (cache_error_.ok() && checkpoint_error_.ok() && !has_more_) {
    wake_.wait(lock, has_work);
  } else {
    wake_.wait_for(lock, kRetry, has_work);
  }
  has_work_ = false;
  return !is_stopping_;
}

}  // namespace persia::store
