#include "store/tier.h"

namespace persia::store {

StatusOr<uint64_t> Tier::BeginCheckpoint() {
  PERSIA_RETURN_IF_ERROR(status());
  const uint64_t batch = batch_.load();
  PERSIA_RETURN_IF_ERROR(pool_->BeginCheckpoint(batch));
  last_checkpoint_ = batch;
  CountBatch();
  return batch;
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
  return Status::Ok();
}

void Tier::Fail(const Status& status) {
  if (status.ok() || has_failed_.load()) return;
  const std::lock_guard lock(mutex_);
  failure_ = status;
  has_failed_ = true;
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
