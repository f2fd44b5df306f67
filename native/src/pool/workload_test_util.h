// A training job as a pool sees it, and the model of what must be in the pool after it.
//
// What a batch does to which signs, and a row's values after it, are functions of the job's seed
// and the batch: so the progress of a job determines all rows. When rows are written back
// and when checkpoints are taken is random too, but does not matter for that.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "pool/row_pool.h"

namespace persia::pool {

// A folder for a pool that goes with the test.
struct PoolDirectory {
  PoolDirectory() { EXPECT_NE(::mkdtemp(path.data()), nullptr); }
  ~PoolDirectory() { std::filesystem::remove_all(path); }
  PoolDirectory(const PoolDirectory&) = delete;
  PoolDirectory& operator=(const PoolDirectory&) = delete;

  std::string path = ::testing::TempDir() + "row_pool_XXXXXX";
};

struct Job {
  uint64_t seed = 1;
  uint64_t num_signs = 60;
  uint32_t batch_size = 12;

  struct Change {
    uint64_t sign;
    bool removes;
  };
  std::vector<Change> Batch(uint64_t batch) const {
    std::mt19937_64 random(seed * 1000003 + batch);
    std::map<uint64_t, bool> changes;
    for (uint32_t i = 0; i < batch_size; ++i) {
      const uint64_t sign = random() % num_signs;
      changes.emplace(sign, random() % 5 == 0);
    }
    std::vector<Change> all;
    for (const auto& [sign, removes] : changes) all.push_back({sign, removes});
    return all;
  }
  // Three sizes of cells.
  RowHead Head(uint64_t sign, uint64_t version) const {
    const auto dim = static_cast<uint32_t>(4 + 8 * (sign % 3));
    return {sign, version, dim, dim / 2, static_cast<uint32_t>(version * 7 + sign), 1};
  }
  std::vector<float> Values(uint64_t sign, uint64_t version) const {
    std::vector<float> values(Head(sign, version).num_floats());
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>((sign * 31 + version * 17 + i * 3 + seed) % 9973);
    }
    return values;
  }
  // A sign's row is of the last batch that changed it, if that did not remove it.
  using Rows = std::map<uint64_t, uint64_t>;
  // Which rows there are after all batches up to `last`, and the batch that made each. Tests ask
  // for the same ones after each of thousands of failures. Until the next call on this thread.
  const Rows& RowsAfter(uint64_t last) const {
    thread_local Job job;
    thread_local std::vector<Rows> after{Rows()};
    if (job != *this) {
      job = *this;
      after.resize(1);
    }
    while (after.size() <= last) {
      Rows rows = after.back();
      for (const Change& change : Batch(after.size())) {
        if (change.removes) {
          rows.erase(change.sign);
        } else {
          rows[change.sign] = after.size();
        }
      }
      after.push_back(std::move(rows));
    }
    return after[last];
  }

  bool operator==(const Job&) const = default;
};

// Gathers what recovery finds.
class RecoveredRows {
 public:
  VisitRows Visitor() {
    return [this](std::span<const RecoveredRow> rows) {
      std::lock_guard lock(mutex_);
      rows_.insert(rows_.end(), rows.begin(), rows.end());
    };
  }
  const std::vector<RecoveredRow>& rows() const { return rows_; }

 private:
  std::mutex mutex_;
  std::vector<RecoveredRow> rows_;
};

// The pool holds exactly the rows of the job at the pool's checkpoint, with all their values.
inline ::testing::AssertionResult HoldsJob(const RowPool& pool, const RecoveredRows& found,
                                           const Job& job) {
  const Job::Rows& expected = job.RowsAfter(pool.committed());
  const auto fail = [&](uint64_t sign) {
    return ::testing::AssertionFailure()
           << "sign " << sign << " at checkpoint " << pool.committed() << ": ";
  };
  std::set<uint64_t> signs;
  for (const RecoveredRow& row : found.rows()) {
    const uint64_t sign = row.head.sign;
    if (!signs.insert(sign).second) return fail(sign) << "found twice";
    const auto it = expected.find(sign);
    if (it == expected.end()) return fail(sign) << "not in the model";
    if (it->second != row.head.version) {
      return fail(sign) << "version " << row.head.version << ", not " << it->second;
    }
    const std::vector<float> values = job.Values(sign, it->second);
    std::vector<float> read(values.size());
    RowHead head;
    const Status status = pool.Read(row.address, sign, &head, read);
    if (!status.ok()) return fail(sign) << status.ToString();
    if (read != values || head.scalar != job.Head(sign, it->second).scalar) {
      return fail(sign) << "other values";
    }
  }
  if (signs.size() != expected.size()) {
    return ::testing::AssertionFailure() << signs.size() << " rows, not " << expected.size()
                                         << " at checkpoint " << pool.committed();
  }
  return ::testing::AssertionSuccess();
}

// Runs the job over a pool: rows wait in memory and are written back at random, but before they
// change where a pending checkpoint is older than that.
class JobRunner {
 public:
  JobRunner(const Job& job, RowPool* pool, const RecoveredRows& found, uint64_t random_seed)
      : job_(job), pool_(*pool), batch_(pool->committed()), random_(random_seed) {
    for (const RecoveredRow& row : found.rows()) {
      rows_[row.head.sign] = {row.head.version, row.address, false};
    }
  }

  Status RunBatch() {
    ++batch_;
    for (const Job::Change& change : job_.Batch(batch_)) PERSIA_RETURN_IF_ERROR(Apply(change));
    PERSIA_RETURN_IF_ERROR(WriteSome(batch_, random_() % 8));
    // Now and then more than one is pending.
    if (random_() % 3 == 0 && num_pending_ < 3) {
      PERSIA_RETURN_IF_ERROR(pool_.BeginCheckpoint(batch_));
      ++num_pending_;
    }
    return Advance();
  }
  // 0: none is under way.
  uint64_t committing() const { return committing_; }

 private:
  struct Row {
    uint64_t version;
    uint64_t address;
    bool is_dirty;
  };

  Status Apply(const Job::Change& change) {
    const auto it = rows_.find(change.sign);
    if (it != rows_.end() && it->second.is_dirty && it->second.version <= pool_.last_checkpoint()) {
      PERSIA_RETURN_IF_ERROR(WriteBack({change.sign}));
    }
    if (!change.removes) {
      Row& row = rows_.emplace(change.sign, Row{0, kNoAddress, true}).first->second;
      row.version = batch_;
      row.is_dirty = true;
      return Status::Ok();
    }
    if (it == rows_.end()) return Status::Ok();
    const uint64_t address = it->second.address;
    rows_.erase(it);
    if (address == kNoAddress) return Status::Ok();
    const RowRemoval removal{address, change.sign, batch_};
    return pool_.Remove(std::span(&removal, 1));
  }

  Status WriteBack(const std::vector<uint64_t>& signs) {
    std::vector<RowWrite> writes;
    std::vector<std::vector<float>> values;
    for (const uint64_t sign : signs) {
      const Row& row = rows_.at(sign);
      values.push_back(job_.Values(sign, row.version));
      writes.push_back({job_.Head(sign, row.version), values.back().data(), row.address});
    }
    std::vector<uint64_t> addresses(signs.size());
    PERSIA_RETURN_IF_ERROR(pool_.Write(writes, addresses));
    for (size_t i = 0; i < signs.size(); ++i) {
      Row& row = rows_.at(signs[i]);
      row.address = addresses[i];
      row.is_dirty = false;
    }
    return Status::Ok();
  }

  // Of the dirty rows up to `version`.
  Status WriteSome(uint64_t version, size_t count) {
    std::vector<uint64_t> signs;
    for (const auto& [sign, row] : rows_) {
      if (row.is_dirty && row.version <= version) signs.push_back(sign);
    }
    std::shuffle(signs.begin(), signs.end(), random_);
    signs.resize(std::min(count, signs.size()));
    return WriteBack(signs);
  }

  // Brings the oldest pending checkpoint some way towards being committed.
  Status Advance() {
    const auto pending = pool_.oldest_pending();
    if (!pending) return Status::Ok();
    PERSIA_RETURN_IF_ERROR(WriteSome(*pending, random_() % 16));
    for (const auto& [sign, row] : rows_) {
      if (row.is_dirty && row.version <= *pending) return Status::Ok();
    }
    committing_ = *pending;
    PERSIA_RETURN_IF_ERROR(pool_.Commit(*pending));
    committing_ = 0;
    --num_pending_;
    return Status::Ok();
  }

  const Job job_;
  RowPool& pool_;
  uint64_t batch_;
  uint64_t committing_ = 0;
  uint32_t num_pending_ = 0;
  std::mt19937_64 random_;
  std::map<uint64_t, Row> rows_;
};

}  // namespace persia::pool
