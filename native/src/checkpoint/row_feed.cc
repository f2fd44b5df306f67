#include "checkpoint/row_feed.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

namespace persia::checkpoint {
namespace {

using Batch = store::StoreSnapshot::Batch;

// Copying takes a fraction of the time of writing, so that one thread is enough; where it waits for
// a pool, that is to be done at several places at once.
constexpr uint32_t kMaxThreadsOfPool = 8;

}  // namespace

RowFeed::RowFeed(store::StoreSnapshot* rows, uint32_t num_parts, size_t rows_at_a_time)
    : rows_(*rows), rows_at_a_time_(rows_at_a_time), parts_(num_parts) {
  for (uint32_t i = 0; i < num_parts; ++i) {
    parts_[i].next_shard = i;
    parts_[i].is_read = i >= rows_.num_shards();
  }
  const uint32_t num_threads = rows_.has_tier() ? std::min(num_parts, kMaxThreadsOfPool) : 1;
  for (uint32_t i = 0; i < num_threads; ++i) {
    try {
      threads_.emplace_back([this] { Serve(); });
    } catch (const std::system_error&) {  // no more threads for this process; one will do
      if (threads_.empty()) throw;
      break;
    }
  }
}

RowFeed::~RowFeed() { Stop(); }

void RowFeed::Stop() {
  {
    const std::lock_guard lock(mutex_);
    has_stopped_ = true;
    if (status_.ok()) status_ = FailedPrecondition("the snapshot was closed; begin another");
  }
  has_work_.notify_all();
  has_rows_.notify_all();
  std::call_once(is_joined_, [this] {
    for (std::thread& thread : threads_) thread.join();
  });
}

// What was written is handed back first, also where nothing is left to read: training may wait for
// it.
StatusOr<bool> RowFeed::Next(uint32_t number, Batch* batch) {
  std::unique_lock lock(mutex_);
  Part& part = parts_[number];
  for (store::RowRecords& piece : batch->saved) saved_.push_back(std::move(piece));
  batch->saved.clear();
  written_.push_back(std::move(*batch));
  *batch = Batch();
  has_work_.notify_one();
  has_rows_.wait(lock, [&] { return !status_.ok() || !part.ahead.empty() || part.is_read; });
  PERSIA_RETURN_IF_ERROR(status_);
  if (part.ahead.empty()) return false;
  *batch = std::move(part.ahead.front());
  part.ahead.pop_front();
  has_work_.notify_one();
  return !part.ahead.empty() || !part.is_read;
}

// Parts in turns, so that none of their writers waits for all of another's rows.
bool RowFeed::HasWork(Part** part) {
  *part = nullptr;
  if (has_stopped_ || !status_.ok()) return has_stopped_ || !saved_.empty();
  for (size_t i = 0; i < parts_.size() && *part == nullptr; ++i) {
    Part& candidate = parts_[next_part_];
    next_part_ = (next_part_ + 1) % parts_.size();
    if (candidate.is_read || candidate.is_being_read) continue;
    if (candidate.ahead.size() < kMaxBatchesAhead) *part = &candidate;
  }
  return *part != nullptr || !saved_.empty();
}

// A part is read by one thread at a time, as its shards are read in order.
void RowFeed::Serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    Part* part = nullptr;
    has_work_.wait(lock, [&] { return HasWork(&part); });
    if (has_stopped_) return;
    std::vector<store::RowRecords> saved = std::exchange(saved_, {});
    Batch batch;
    if (part != nullptr) part->is_being_read = true;
    if (part != nullptr && !written_.empty()) {
      batch = std::move(written_.back());
      written_.pop_back();
    }
    lock.unlock();
    rows_.Release(&saved);
    StatusOr<bool> has_more = part == nullptr ? false : Read(part, &batch);
    lock.lock();
    if (part == nullptr) continue;
    part->is_being_read = false;
    if (!has_more.ok()) {
      status_ = has_more.status();
    } else {
      part->is_read = !has_more.value();
      part->ahead.push_back(std::move(batch));
    }
    has_rows_.notify_all();
  }
}

StatusOr<bool> RowFeed::Read(Part* part, Batch* batch) {
  try {
    return ReadShards(part, batch);
  } catch (const std::bad_alloc&) {
    return ResourceExhausted(
        "no memory to copy rows of a snapshot to; training continues without it");
  }
}

StatusOr<bool> RowFeed::ReadShards(Part* part, Batch* batch) {
  const auto step = static_cast<uint32_t>(parts_.size());
  PERSIA_ASSIGN_OR_RETURN(const bool has_more,
                          rows_.Read(part->next_shard, rows_at_a_time_, batch));
  // Rows of shards whose turn is later: else they would take the room of the budget until then.
  for (uint32_t shard = part->next_shard + step; shard < rows_.num_shards(); shard += step) {
    rows_.TakeSaved(shard, batch);
  }
  if (!has_more) part->next_shard += step;
  return part->next_shard < rows_.num_shards();
}

}  // namespace persia::checkpoint
