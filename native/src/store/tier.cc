#include "store/tier.h"

#include <string>

namespace persia::store {

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
    trouble_ = Status::Ok();  // what came before need not concern it
  }
  last_checkpoint_ = batch;
  CountBatch();
  return batch;
}

Status Tier::EndCheckpoint(uint64_t batch) {
  std::unique_lock lock(mutex_);
  const bool is_held = held_ == batch;
  lock.unlock();
  if (!is_held) return Commit(batch);
  PERSIA_RETURN_IF_ERROR(status());
  auto prepared = pool_->Prepare(batch);
  lock.lock();
  if (held_ != batch) return Status::Ok();  // dropped, or cleared with all others, meanwhile
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
  if (!prepared_) PERSIA_RETURN_IF_ERROR(trouble_);
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
  PERSIA_RETURN_IF_ERROR(pool_->Commit(batch));
  lock.lock();
  held_.reset();
  prepared_.reset();
  return Status::Ok();
}

Status Tier::DropHeld(uint64_t batch) {
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(CheckHeld(batch));
  held_.reset();
  prepared_.reset();
  return pool_->DropCheckpoint(batch);
}

Status Tier::Commit(uint64_t batch) {
  PERSIA_RETURN_IF_ERROR(this->status());
  const Status status = pool_->Commit(batch);
  // Clear() may have come in between.
  return pool_->oldest_pending() == batch || pool_->committed() == batch ? status : Status::Ok();
}

Status Tier::Clear() {
  PERSIA_RETURN_IF_ERROR(status());
  PERSIA_RETURN_IF_ERROR(pool_->Clear());
  last_checkpoint_ = 0;
  const std::lock_guard lock(mutex_);
  held_.reset();
  prepared_.reset();
  return Status::Ok();
}

void Tier::Fail(const Status& status) {
  if (status.ok() || has_failed_.load()) return;
  const std::lock_guard lock(mutex_);
  failure_ = status;
  has_failed_ = true;
}

void Tier::NoteTrouble(const Status& status) {
  const std::lock_guard lock(mutex_);
  trouble_ = status;
}

Status Tier::status() const {
  if (!has_failed_.load(std::memory_order_acquire)) return Status::Ok();
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Tier::Wake() {
  if (has_work_.exchange(true)) return;
  {
    const std::lock_guard lock(mutex_);
  }
  wake_.notify_one();
}

bool Tier::WaitForWork() {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return is_stopping_.load() || has_work_.load(); });
  has_work_ = false;
  return !is_stopping_;
}

void Tier::StopKeeper() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
}

}  // namespace persia::store
