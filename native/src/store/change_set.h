// ChangeSet: the keys of rows that were changed, made or removed since the set was made.
//
// The set holds keys only. Whether a key's row or its removal is sent, the store decides when
// changes are taken: a row that was inserted and removed in between is a removal like any other.
//
// A table of fixed size without locks: adding a key that it has already, as is usual in training,
// costs one read. Beyond `max_keys` it overflows for good: a set that lacks some keys would make
// followers miss rows, and only a full snapshot helps then.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace persia::store {

// All methods may be called by several threads at once, but for KeysByShard().
class ChangeSet {
 public:
  static constexpr uint64_t kMaxKeys = uint64_t{1} << 30;

  // `max_keys`: 1 to kMaxKeys.
  explicit ChangeSet(uint64_t max_keys);  // allocates 16 to 32 bytes for each

  // Some tens of keys at a time overlap their cache misses.
  void Add(std::span<const uint64_t> keys);
  void Add(uint64_t key) { Add({&key, 1}); }
  // All rows were removed at once, which followers repeat before all else. The keys stay: those of
  // rows inserted since must.
  void NoteClear() { was_cleared_.store(true, std::memory_order_relaxed); }
  // Adds all that the other one has, to which no thread adds any more: changes that were taken and
  // not committed return this way.
  void AddAll(const ChangeSet& other);
  // May miss a key that is being added at the same time.
  bool Contains(uint64_t key) const;

  uint64_t max_keys() const { return max_keys_; }
  uint64_t size() const { return size_.load(std::memory_order_relaxed); }
  bool has_overflowed() const { return has_overflowed_.load(std::memory_order_relaxed); }
  bool was_cleared() const { return was_cleared_.load(std::memory_order_relaxed); }
  uint64_t memory_bytes() const { return num_cells() * sizeof(uint64_t); }

  // In ascending order, by internal shard. Nobody adds any more.
  std::vector<std::vector<uint64_t>> KeysByShard(uint32_t num_shards) const;

 private:
  using Cell = std::atomic<uint64_t>;
  enum class Outcome { kAdded, kWasThere, kNoRoom };

  uint64_t num_cells() const { return uint64_t{1} << bits_; }
  // The top bits, so that walking through the cells nearly sorts.
  uint64_t HomeOf(uint64_t key) const { return key >> (64 - bits_); }
  Outcome AddOne(uint64_t key);
  template <typename Visit>
  void ForEach(Visit visit) const;

  const uint64_t max_keys_;
  const uint32_t bits_;
  const std::unique_ptr<Cell[]> cells_;  // 0 is an empty one: key 0 has a flag instead
  std::atomic<bool> has_key_zero_ = false;
  std::atomic<bool> has_overflowed_ = false;
  std::atomic<bool> was_cleared_ = false;
  std::atomic<uint64_t> size_ = 0;
};

// Gathers keys of one call for a set, so that the cache misses of many overlap. The set may be
// null, which is the usual case: then each Add() is one branch. The destructor adds the rest.
class ChangeBatch {
 public:
  explicit ChangeBatch(ChangeSet* changes) : changes_(changes) {}
  ~ChangeBatch() { Flush(); }
  ChangeBatch(const ChangeBatch&) = delete;
  ChangeBatch& operator=(const ChangeBatch&) = delete;

  void Add(uint64_t key) {
    if (changes_ == nullptr) [[likely]]
      return;
    keys_[count_++] = key;
    if (count_ == keys_.size()) Flush();
  }

 private:
  void Flush() {
    if (count_ > 0) changes_->Add(std::span(keys_).first(count_));
    count_ = 0;
  }

  ChangeSet* changes_;
  size_t count_ = 0;
  std::array<uint64_t, 64> keys_;
};

}  // namespace persia::store
