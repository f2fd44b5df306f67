#include "store/tier.h"

#include <algorithm>
#include <string>
#include <utility>

#include "store/config_change.h"
#include "store/tier_rules.h"

namespace persia::store {
namespace {

// Between two attempts to write what there is no room for, or to give memory back.
constexpr std::chrono::milliseconds kRetry{50};

}  // namespace

void ReadAhead::Add(std::span<const uint64_t> signs) {
  {
    const std::lock_guard lock(mutex_);
    const size_t count = std::min(signs.size(), max_signs_ - num_waiting_);
    num_dropped_ += signs.size() - count;
    if (count == 0) return;
    waiting_.emplace_back(signs.begin(), signs.begin() + static_cast<std::ptrdiff_t>(count));
    num_waiting_ += count;
  }
  wake_.notify_one();
}

bool ReadAhead::Take(std::vector<uint64_t>* signs) {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return is_stopping_ || !waiting_.empty(); });
  if (is_stopping_) return false;
  *signs = std::move(waiting_.front());
  waiting_.pop_front();
  num_waiting_ -= signs->size();
  return true;
}

void ReadAhead::Stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
}

uint64_t ReadAhead::num_dropped() const {
  const std::lock_guard lock(mutex_);
  return num_dropped_;
}

uint64_t ReadAhead::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return num_waiting_ * sizeof(uint64_t);
}

Status Tier::SaveConfigIfNew(const TrainConfig& config) {
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

// The caller is alone in the store, so the batch has ended in all shards: what changes from now on
// is of the next one.
StatusOr<uint64_t> Tier::BeginCheckpoint(bool held) {
  PERSIA_RETURN_IF_ERROR(status());
  const std::lock_guard lock(mutex_);
  if (held && held_) {
    return FailedPrecondition("checkpoint " + std::to_string(*held_) +
                              " is held; commit or drop it first");
  }
  const uint64_t batch = batch_.load();
  PERSIA_RETURN_IF_ERROR(pool_->BeginCheckpoint(batch));
  if (held) {
    held_ = batch;
    checkpoint_error_ = Status::Ok();  // what came before need not concern it
  }
  last_checkpoint_ = batch;
  CountBatch();
  return batch;
}

// Writes to the device without the mutex: Prepare() may take long, and calls report through it.
Status Tier::EndCheckpoint(uint64_t batch) {
  std::unique_lock lock(mutex_);
  const bool is_held = held_ == batch;
  lock.unlock();
  if (!is_held) return Commit(batch);
  PERSIA_RETURN_IF_ERROR(status());
  auto prepared = pool_->Prepare(batch);
  lock.lock();
  // Dropped, or cleared with all others, meanwhile.
  if (held_ != batch || pool_->oldest_pending() != batch) return Status::Ok();
  if (prepared.ok()) prepared_ = *prepared;
  return prepared.status();
}

bool Tier::IsPrepared(uint64_t batch) const {
  const std::lock_guard lock(mutex_);
  return prepared_ && prepared_->batch == batch;
}

Status Tier::CheckHeld(uint64_t batch) const {
  if (held_ == batch) return Status::Ok();
  return FailedPrecondition("checkpoint " + std::to_string(batch) +
                            " is not held: it has ended, or the rows were cleared or loaded since");
}

StatusOr<std::optional<pool::PreparedCheckpoint>> Tier::PreparedHeld(uint64_t batch) const {
  PERSIA_RETURN_IF_ERROR(status());
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckHeld(batch));
  if (!prepared_) PERSIA_RETURN_IF_ERROR(checkpoint_error_);
  return prepared_;
}

Status Tier::CommitHeld(uint64_t batch) {
  PERSIA_RETURN_IF_ERROR(status());
  std::unique_lock lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckHeld(batch));
  if (!prepared_) {
    return FailedPrecondition("checkpoint " + std::to_string(batch) + " is not written yet");
  }
  lock.unlock();  // the device may take its time, and Wake() needs the mutex
  const Status status = pool_->Commit(batch);
  // It may have been dropped or cleared meanwhile, which is no failure of the device.
  if (status.code() != StatusCode::kInvalidArgument) Fail(status);
  PERSIA_RETURN_IF_ERROR(status);
  lock.lock();
  LetGo(batch);
  NoteCommitted(batch);
  return Status::Ok();
}

// With others in the store: last_checkpoint_ falls to what is still wanted. The caller keeps
// BeginCheckpoint() away.
Status Tier::DropHeld(uint64_t batch) {
  std::unique_lock lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckHeld(batch));
  lock.unlock();  // a commit may be at the device
  PERSIA_RETURN_IF_ERROR(pool_->DropCheckpoint(batch));
  lock.lock();
  LetGo(batch);
  last_checkpoint_ = pool_->last_checkpoint();
  checkpoint_error_ = Status::Ok();
  progress_.notify_all();
  return Status::Ok();
}

void Tier::LetGo(uint64_t batch) {
  if (held_ != batch) return;
  held_.reset();
  prepared_.reset();
}

void Tier::NoteCommitted(uint64_t batch) {
  if (pool_->committed() < batch) return;  // cleared since
  last_committed_ = std::max(last_committed_.load(), batch);
  progress_.notify_all();
}

Status Tier::Commit(uint64_t batch) {
  PERSIA_RETURN_IF_ERROR(this->status());
  const Status status = pool_->Commit(batch);
  if (status.ok()) {
    const std::lock_guard lock(mutex_);
    NoteCommitted(batch);
  }
  // Where it is pending no more, Clear() or the one who held it came in between.
  return pool_->oldest_pending() == batch ? status : Status::Ok();
}

Status Tier::Clear() {
  PERSIA_RETURN_IF_ERROR(status());
  PERSIA_RETURN_IF_ERROR(pool_->Clear());
  last_checkpoint_ = 0;
  last_committed_ = 0;
  const std::lock_guard lock(mutex_);
  held_.reset();
  prepared_.reset();
  checkpoint_error_ = Status::Ok();
  progress_.notify_all();
  return Status::Ok();
}

// Order matters: a committed checkpoint stays committed although the tier failed later.
Status Tier::WaitCheckpoint(uint64_t batch, std::chrono::milliseconds timeout) const {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
  const auto deadline = std::chrono::steady_clock::now() + std::min(timeout, kLongest);
  std::unique_lock lock(mutex_);
  while (true) {
    if (last_committed_ >= batch && batch != 0) return Status::Ok();
    if (has_failed_) return failure_;
    if (batch == 0 || last_checkpoint_ < batch) {
      return FailedPrecondition("no checkpoint of number " + std::to_string(batch) +
                                " is pending: it was not asked for, or the rows were cleared "
                                "since; ask for another");
    }
    if (!checkpoint_error_.ok()) return checkpoint_error_;
    if (std::chrono::steady_clock::now() >= deadline) {
      return DeadlineExceeded("checkpoint " + std::to_string(batch) + " was not committed within " +
                              std::to_string(timeout.count()) +
                              " ms; it is still pending: wait longer");
    }
    progress_.wait_until(lock, deadline);
  }
}

// The first failure stays: later ones follow from it. A lack of room is none, as it may end.
void Tier::Fail(const Status& status) {
  if (status.ok() || status.code() == StatusCode::kResourceExhausted || has_failed_.load()) return;
  const std::lock_guard lock(mutex_);
  failure_ = status;
  has_failed_ = true;
  progress_.notify_all();
}

void Tier::NoteRound(const Status& cache, const Status& checkpoints, uint64_t batch,
                     bool has_more) {
  const std::lock_guard lock(mutex_);
  cache_error_ = cache;
  has_more_ = has_more;
  // Of one that was dropped meanwhile it concerns nobody.
  checkpoint_error_ = pool_->oldest_pending() == batch ? checkpoints : Status::Ok();
  progress_.notify_all();
}

Status Tier::last_error() const {
  const std::lock_guard lock(mutex_);
  return checkpoint_error_.ok() ? cache_error_ : checkpoint_error_;
}

Status Tier::status() const {
  if (!has_failed_.load(std::memory_order_acquire)) return Status::Ok();
  const std::lock_guard lock(mutex_);
  return failure_;
}

// The mutex is taken between the flag and the signal: a thread that has read the flag as unset, and
// does not wait yet, would miss it.
void Tier::Wake() {
  if (has_work_.exchange(true)) return;
  {
    const std::lock_guard lock(mutex_);
  }
  wake_.notify_one();
}

// Polls while something is in the way: the reason, such as a full disk, may end without a call.
bool Tier::WaitForWork() {
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

void Tier::Stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
  read_ahead_.Stop();
}

}  // namespace persia::store
