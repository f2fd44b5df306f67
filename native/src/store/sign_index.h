// SignIndex: finds a sign's row; an open-addressing table of 16-byte entries.
//
// An entry is the sign's key, its row's cell and the batch that touched it last, side by side: a
// lookup reads one cache line here and none beside the row. The key is the sign scrambled by a
// bijection (SignKey), so that it tells the sign and is spread like a hash. A key's home is a cache
// line of four entries; homes grow with the keys, and the table is kept in ascending order of keys:
// linear probing whose runs are sorted. It follows that
//  * a search counts the smaller keys of the home line without a branch, and three times in four
//    that is the place;
//  * successful or not, it ends at the first entry that is not smaller, so the table can be 4/5
//    full;
//  * growing copies from front to back, sequentially, and may be by any factor: a quarter at a time
//    here, so that an entry costs 20 to 25 bytes. Indexes that are filled side by side, as those of
//    a store's shards are, would all be at 25 at the same time: their phases keep them apart, so
//    that together they cost 22 to 23;
//  * removal closes the gap by moving followers back: no tombstones.
//
// Not thread-safe, but finding and reading may go on in several threads at once, as may writing the
// stamps of different entries.
#pragma once

#include <cstdint>
#include <memory>

#include "base/mapped_memory.h"
#include "store/row_arrays.h"

namespace persia::store {

// SplitMix64's finaliser, which is a bijection, and its inverse.
inline uint64_t SignKey(uint64_t sign) {
  sign = (sign ^ (sign >> 30)) * 0xbf58476d1ce4e5b9u;
  sign = (sign ^ (sign >> 27)) * 0x94d049bb133111ebu;
  return sign ^ (sign >> 31);
}
inline uint64_t SignOfKey(uint64_t key) {
  key = (key ^ (key >> 31) ^ (key >> 62)) * 0x319642b2d24d8ec3u;
  key = (key ^ (key >> 27) ^ (key >> 54)) * 0x96de1b173f119089u;
  return key ^ (key >> 30) ^ (key >> 60);
}
// The low half of a key chooses its internal shard, the high half its place in the shard's index.
inline uint32_t ShardOfKey(uint64_t key, uint32_t num_shards) {
  return static_cast<uint32_t>((uint64_t{static_cast<uint32_t>(key)} * num_shards) >> 32);
}

class SignIndex {
 public:
  static constexpr uint32_t kNoCell = UINT32_MAX;

  // 16 bytes: four to a cache line. A stamp is the batch that used the row last, which the order of
  // eviction needs; it is here and not at the row, so that finding the oldest rows reads the index
  // alone.
  struct Entry {
    uint64_t key;
    uint32_t cell;
    uint32_t stamp;
  };

  // `growth_phase`, from 0 to 1, is where between two growths it is while one with phase 0 grows.
  explicit SignIndex(double growth_phase = 0) : growth_phase_(growth_phase) {}

  // Whether the stamp in the entry is a copy; see Clear().
  bool IsInArray(const Entry& entry) const { return entry.cell < num_array_cells_; }
  void Refresh(Entry* entry) const {
    if (!IsInArray(*entry)) return;
    const uint32_t stamp = arrays_->IdStateOf(entry->cell).stamp;
    if (stamp != entry->stamp) entry->stamp = stamp;
  }
  void SetStamp(Entry* entry, uint32_t stamp) const {
    entry->stamp = stamp;
    if (IsInArray(*entry)) arrays_->IdStateOf(entry->cell).stamp = stamp;
  }

  // Null: there is none. Valid until the next insertion or removal.
  Entry* Find(uint64_t key) const {
    Entry* entry = FindFrom(SkipHome(HomeOf(key), key), key);
    if (entry != nullptr) Refresh(entry);
    return entry;
  }
  // The same in steps, each of which reads what the one before it returned: first a cache line,
  // then an entry that is in the same line or begins the next one.
  Entry* HomeOf(uint64_t key) const { return entries_ + Home(key); }
  static Entry* SkipHome(Entry* home, uint64_t key) {
    return home + (home[0].key < key) + (home[1].key < key) + (home[2].key < key) +
           (home[3].key < key);
  }
  static Entry* FindFrom(Entry* entry, uint64_t key) {
    while (entry->key < key) ++entry;
    return entry->key == key && entry->cell != kNoCell ? entry : nullptr;
  }

  // False when there is no memory to grow; the index
  // is then unchanged. The key must not be there.
  [[nodiscard]] bool Insert(const Entry& entry);
  // Room for so many entries in all, so that growing need not copy them time and again; as much as
  // it would have grown to, which keeps phases apart. Where there is no memory for that, it grows
  // as it always does.
  void Reserve(uint64_t num_entries);
  // Moves later entries of the run back, so entries found before are not valid afterwards.
  void Erase(Entry* entry);
  // Later entries with a cell below arrays->num_cells() have their stamps in `arrays`
  // (row_arrays.h). The stamp in such an entry is a copy, which Find(), ForEach() and Refresh()
  // renew. Null: there are no such entries.
  void Clear(std::shared_ptr<RowArrays> arrays = nullptr);

  // Calls visit(entry) for each, in ascending order of keys.
  template <typename Visit>
  void ForEach(Visit visit) const {
    RefreshAll();
    ForEachAsIs(visit);
  }
  // ForEach() in two steps, so that several walks renew the stamps once.
  void RefreshAll() const;
  template <typename Visit>
  void ForEachAsIs(Visit visit) const {
    for (const Entry* entry = entries_; entry != entries_ + length_; ++entry) {
      if (entry->cell != kNoCell) visit(*entry);
    }
  }
  // Each stamp becomes change(stamp).
  template <typename Change>
  void ChangeStamps(Change change) const {
    RefreshAll();
    for (Entry* entry = entries_; entry != entries_ + length_; ++entry) {
      if (entry->cell != kNoCell) SetStamp(entry, change(entry->stamp));
    }
  }

  // A walk in steps: the same from key *next on, until visit returns false. Then *next is that
  // entry's key, where the next step begins, whatever was inserted or removed in between. Returns
  // whether the step reached the end.
  template <typename Visit>
  bool ForEachFrom(uint64_t* next, Visit visit) const {
    if (size_ == 0) return true;
    const uint64_t first = *next;
    for (Entry* entry = HomeOf(first); entry != entries_ + length_; ++entry) {
      if (entry->cell == kNoCell || entry->key < first) continue;
      Refresh(entry);
      if (visit(*entry)) continue;
      *next = entry->key;
      return false;
    }
    return true;
  }

  uint64_t size() const { return size_; }
  uint64_t memory_bytes() const { return memory_.size(); }

 private:
  static constexpr uint64_t kLineEntries = 4;
  // The greatest key, so that a search in ascending order ends at an empty entry without another
  // test. A sign may have this key, too; kNoCell tells the two apart.
  static constexpr Entry kEmpty = {UINT64_MAX, kNoCell, 0};

  // home_count_ is a multiple of the line.
  uint64_t Home(uint64_t key) const {
    return (((key >> 32) * home_count_) >> 32) & ~(kLineEntries - 1);
  }
  bool Grow();
  uint64_t NextHomeCount() const;
  // The home counts that its phase makes it grow through.
  uint64_t FirstOfSeries() const;
  uint64_t RoundUpToSeries(uint64_t home_count) const;
  bool Rebuild(uint64_t home_count, uint64_t tail);

  // What an index without memory reads: empty entries. Never written.
  alignas(64) static inline Entry no_entries_[kLineEntries] = {kEmpty, kEmpty, kEmpty, kEmpty};

  double growth_phase_;
  MappedMemory memory_;
  Entry* entries_ = no_entries_;
  uint64_t length_ = 1;  // entries in memory; the last one is always empty, so that searches end
  uint64_t home_count_ = 0;  // the entries behind take the overflow of the last homes
  uint64_t size_ = 0;
  std::shared_ptr<RowArrays> arrays_;
  uint32_t num_array_cells_ = 0;  // of arrays_
};

}  // namespace persia::store
