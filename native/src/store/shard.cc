#include "store/shard.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "store/probe_in_blocks.h"
#include "store/row_steps.h"
#include "store/tier.h"
#include "store/tier_cells.h"

namespace persia::store {
namespace {

constexpr uint32_t kNoSlot = RowSlabs::kNoSlot;
static_assert(kNoSlot == SignIndex::kNoSlot);

constexpr auto kKeyOfMissing = [](const auto& missing) { return missing.ref->key; };

// Of an update whose other rows, here or in other shards, have their gradients already. To look for
// cold rows in all shards first would cost too much, so the store stops instead: no checkpoint
// begins that has a part of the update.
Status CutShort(const Status& status) {
  return IOError("an update ended half way: " + status.message() +
                 "; the store has stopped: start again, from the last checkpoint");
}

}  // namespace

template <typename Use>
void Shard::ForEachRow(const Run& run, size_t row_floats, Use use) const {
  const std::span<const RowRef> refs = run.refs;
  ProbeInBlocks(
      refs.size(), row_floats, [&](size_t i) { return std::pair(refs[i].key, &index_); },
      [&](size_t, const SignIndex::Entry* entry) {
        return slabs_.dim(entry->slot) == run.dim ? slabs_.values(entry->slot) : nullptr;
      },
      [&](size_t i, SignIndex::Entry* entry, const float* row) {
        use(refs[i], row == nullptr ? nullptr : entry);
      });
}

Status Shard::Lookup(std::span<const Run> runs, LookupMode mode, float* rows,
                     LookupReport* report) {
  Lock lock(mutex_);
  LookupReport counts;
  Status status;
  if (mode == LookupMode::kInference) {
    for (const Run& run : runs) {
      status = LookupForInference(&lock, run, rows, &counts);
      if (!status.ok()) break;
    }
  } else {
    status = LookupForTraining(&lock, runs, rows, &counts);
  }
  CountLookups(counts);
  Add(counts, report);
  return status;
}

void Shard::BeginBatch() {
  missing_.clear();
  if (now_ == kLastStamp) {
    if (snapshot_ != nullptr) snapshot_->RebaseStamp();
    RebaseStamps(index_);
    ForgetVictims();
    expiry_.Forget();
    now_ -= kStampRebase;
  }
  ++now_;
  if (expiry_.is_on()) RemoveExpired();
}

void Shard::RemoveExpired() {
  const auto expired = expiry_.Step(index_, *rules_, now_, std::chrono::steady_clock::now());
  for (const uint64_t key : expired) {
    // Where there is no room to remove it, it is due again with the next walk.
    if (Remove(index_.Find(key)).ok()) ++lookups_.num_expired;
  }
}

Status Shard::LookupForInference(Lock* lock, const Run& run, float* rows, LookupReport* counts) {
  const size_t bytes = run.dim * sizeof(float);
  uint64_t num_missing = 0;
  std::vector<Missing> cold;
  const size_t row_floats = format_.EmbeddingFloats(run.dim);
  ForEachRow(run, row_floats, [&](const RowRef& ref, const SignIndex::Entry* entry) {
    float* out = rows + run.FloatOffset(ref);
    if (entry != nullptr) {
      format_.Read(out, slabs_.values(entry->slot), run.dim);
      return;
    }
    if (tier_ != nullptr) {
      entry = index_.Find(ref.key);
      if (entry != nullptr && IsColdOfDim(*entry, run.dim)) return cold.push_back({&run, &ref});
    }
    std::memset(out, 0, bytes);
    ++num_missing;
  });
  num_hits_ += run.refs.size() - num_missing - cold.size();
  num_misses_ += cold.size();
  Status status;
  for (size_t begin = 0; begin < cold.size() && status.ok(); begin += kAheadAtATime) {
    const auto some = std::span(cold).subspan(begin, std::min(kAheadAtATime, cold.size() - begin));
    status = CopyColdOf(lock, some, rows, &num_missing);
  }
  counts->num_missing += num_missing;
  return status;
}

// A run's rows are usually of one group; where they are not, only the prefetching is off.
size_t Shard::StrideOf(const Run& run) const { return ShapeOf(run.refs[0].key, run.dim).Stride(); }

template <typename Use>
void Shard::UseFound(const Run& run, Use use) {
  // To be saved, a row is wanted with its state.
  const size_t row_floats = snapshot_ == nullptr ? format_.EmbeddingFloats(run.dim) : StrideOf(run);
  ForEachRow(run, row_floats, [&](const RowRef& ref, SignIndex::Entry* entry) {
    if (entry != nullptr) {
      if (snapshot_ != nullptr) [[unlikely]]
        snapshot_->SaveBeforeTouch(*entry, slabs_);
      entry->stamp = now_;
      use(ref, entry->slot);
    } else {
      missing_.push_back({&run, &ref});
    }
  });
}

// While the mutex is let go of, rows that were missing may have been made, and have left the cache:
// hence the second round.
template <typename Use>
Status Shard::UseCold(Lock* lock, Use use) {
  std::vector<Missing> missing = std::move(missing_);
  thread_local ColdReads reads;
  bool has_let_go = false;
  Status status;
  const auto use_all = [&](bool may_let_go) {
    size_t num_left = 0;
    for (size_t begin = 0; begin < missing.size(); begin += kAheadAtATime) {
      const auto some =
          std::span(missing).subspan(begin, std::min(kAheadAtATime, missing.size() - begin));
      reads.Clear();
      if (may_let_go && status.ok()) has_let_go |= ReadAside(lock, some, kKeyOfMissing, &reads);
      const auto pass = [&](const Missing& one) { missing[num_left++] = one; };
      if (status.ok()) {
        status = UseColdOf(some, &reads, use, pass);
      } else {
        std::for_each(some.begin(), some.end(), pass);
      }
    }
    missing.resize(num_left);
  };
  KeepFromEviction(missing);
  use_all(/*may_let_go=*/true);
  if (has_let_go) use_all(/*may_let_go=*/false);
  missing_ = std::move(missing);
  return status;
}

// Those that are read are the first to be evicted by calls that come in between. While a snapshot
// wants to know when they were used before, that may be: as if those calls had come first.
void Shard::KeepFromEviction(std::span<const Missing> some) {
  if (marks_ == nullptr || snapshot_ != nullptr) return;
  for (const auto& [run, ref] : some) {
    SignIndex::Entry* entry = index_.Find(ref->key);
    if (entry != nullptr && IsColdOfDim(*entry, run->dim)) entry->stamp = now_;
  }
}

template <typename Use, typename Pass>
Status Shard::UseColdOf(std::span<const Missing> some, ColdReads* reads, Use use, Pass pass) {
  Status status;
  std::array<SignIndex::Entry*, kAheadAtATime> entries;
  for (size_t i = 0; i < some.size(); ++i) entries[i] = index_.Find(some[i].ref->key);
  if (reads->is_empty()) TouchCold(std::span(entries).first(some.size()));
  for (size_t i = 0; i < some.size(); ++i) {
    const Missing missing = some[i];
    SignIndex::Entry* entry = entries[i];
    const ColdReads::Row* read = reads->Find(missing.ref->key);
    if (status.ok() && entry != nullptr && IsColdOfDim(*entry, missing.run->dim)) {
      status = Promote(entry, read);
    }
    if (!status.ok() || !HasDim(entry, missing.run->dim)) {
      pass(missing);
      continue;
    }
    if (snapshot_ != nullptr) snapshot_->SaveBeforeTouch(*entry, slabs_);
    entry->stamp = now_;
    use(*missing.run, *missing.ref, entry->slot);
  }
  return status;
}

Status Shard::CopyColdOf(Lock* lock, std::span<const Missing> some, float* rows,
                         uint64_t* num_missing) {
  thread_local ColdReads reads;
  reads.Clear();
  ReadAside(lock, some, kKeyOfMissing, &reads);
  for (const auto& [run, ref] : some) {
    float* out = rows + run->FloatOffset(*ref);
    const ColdReads::Row* read = reads.Find(ref->key);
    const SignIndex::Entry* entry = index_.Find(ref->key);
    if (entry != nullptr && IsColdOfDim(*entry, run->dim)) {
      if (IsOf(*entry, read)) {
        std::copy_n(read->values.begin(), run->dim, out);
      } else {
        PERSIA_RETURN_IF_ERROR(CopyCold(*entry, run->dim, out));
      }
    } else if (HasDim(entry, run->dim)) {
      format_.Read(out, slabs_.values(entry->slot), run->dim);
    } else {  // it has gone meanwhile
      std::memset(out, 0, run->dim * sizeof(float));
      ++*num_missing;
    }
  }
  return Status::Ok();
}

template <typename Use>
Status Shard::InsertMissing(Use use, LookupReport* counts) {
  Status status;
  for (const Missing& missing : missing_) {
    PERSIA_RETURN_IF_ERROR(CheckFits(missing.ref->key, missing.run->dim));
  }
  // First, so that no other row goes for want of the room that these leave.
  for (const Missing& missing : missing_) {
    RemoveOfAnotherDim(missing.ref->key, missing.run->dim, &status);
  }
  if (!status.ok()) return status;
  if (limits_.is_on()) {
    for (const Missing& missing : missing_) ExpectInsert(missing.ref->key);
    PERSIA_RETURN_IF_ERROR(MakeRoomInGroups(/*keep_batch=*/false, counts).status());
  }
  PERSIA_RETURN_IF_ERROR(MakeRoom(missing_.size(), /*keep_batch=*/false, counts).status());
  for (const auto& [run, ref] : missing_) {
    // A caller that breaks its promise and names a sign twice gets the same row twice.
    const SignIndex::Entry* entry = RemoveOfAnotherDim(ref->key, run->dim, &status);
    if (!status.ok()) return status;
    const uint32_t slot = entry != nullptr ? entry->slot : Insert(ref->key, run->dim, counts);
    if (slot == kNoSlot) return OutOfMemory();
    use(*run, *ref, slot);
  }
  return tier_ == nullptr ? Status::Ok() : LimitCache();
}

SignIndex::Entry* Shard::RemoveOfAnotherDim(uint64_t key, uint32_t dim, Status* status) {
  SignIndex::Entry* entry = index_.Find(key);
  if (entry == nullptr || HasDim(entry, dim)) return entry;
  if (Status removed = Remove(entry); !removed.ok()) *status = std::move(removed);
  return nullptr;
}

bool Shard::Admit(uint64_t key) {
  const uint64_t sign = SignOfKey(key);
  const RowRules& rules = rules_->Of(sign);
  if (rules.admit_after() == 1 && rules.Admits(sign)) return true;
  if (index_.Find(key) != nullptr) return true;
  return rules.Admits(sign) && filter_.Count(key) >= rules.admit_after();
}

Status Shard::LookupForTraining(Lock* lock, std::span<const Run> runs, float* rows,
                                LookupReport* counts) {
  const auto copy = [&](const Run& run, const RowRef& ref, uint32_t slot) {
    format_.Read(rows + run.FloatOffset(ref), slabs_.values(slot), run.dim);
  };
  BeginBatch();
  for (const Run& run : runs) {
    UseFound(run, [&](const RowRef& ref, uint32_t slot) { copy(run, ref, slot); });
  }
  if (tier_ != nullptr) {
    for (const Run& run : runs) num_hits_ += run.refs.size();
    num_hits_ -= missing_.size();
    const size_t num_missing = missing_.size();
    const Status status = UseCold(lock, copy);
    num_misses_ += num_missing - missing_.size();
    if (!status.ok()) return status;
  }
  counts->num_missing += missing_.size();
  std::erase_if(missing_, [&](const Missing& missing) {
    if (Admit(missing.ref->key)) return false;
    ++counts->num_unadmitted;
    std::memset(rows + missing.run->FloatOffset(*missing.ref), 0, missing.run->dim * sizeof(float));
    return true;
  });
  return InsertMissing(copy, counts);
}

// Only while a checkpoint is pending do changes need room.
Status Shard::PrepareUpdate(std::span<const Run> runs) {
  const std::lock_guard lock(mutex_);
  PERSIA_RETURN_IF_ERROR(LimitCache());
  if (!tier_->HasPending()) return Status::Ok();
  Status status;
  for (const Run& run : runs) {
    ForEachRow(run, run.dim, [&](const RowRef& ref, const SignIndex::Entry* entry) {
      if (entry != nullptr && status.ok()) status = WriteForCheckpoint(ref.key, entry->slot);
    });
  }
  return status;
}

Status Shard::Update(std::span<const Run> runs, const float* gradients, UpdateReport* report) {
  Lock lock(mutex_);
  UpdateReport counts;
  Status status;
  for (const Run& run : runs) {
    if (rules_ == nullptr) {  // then there are no rows
      counts.num_missing += run.refs.size();
      continue;
    }
    RowSteps steps(run.dim, &counts);
    ChangeBatch changed(changes_);
    const auto update = [&](const RowRef& ref, const SignIndex::Entry* entry) {
      if (snapshot_ != nullptr) [[unlikely]] {
        snapshot_->SaveBeforeUpdate(*entry, slabs_);
      }
      if (!MayChange(ref.key, entry->slot, &status)) return;
      changed.Add(ref.key);
      steps.Add(rules_->OfKey(ref.key), slabs_.View(entry->slot), gradients + run.FloatOffset(ref));
      if (counts_updates_) CountUpdate(slabs_.values(entry->slot), slabs_.shape(entry->slot));
    };
    missing_.clear();
    ForEachRow(run, StrideOf(run), [&](const RowRef& ref, const SignIndex::Entry* entry) {
      if (entry != nullptr) {
        update(ref, entry);
      } else if (tier_ != nullptr) {
        missing_.push_back({&run, &ref});
      } else {
        ++counts.num_missing;
      }
    });
    steps.Flush();  // it points to rows, which may move while other calls come in between
    if (missing_.empty()) continue;
    // They have left the cache since their lookup.
    const std::vector<Missing> missing = std::move(missing_);
    thread_local ColdReads reads;
    for (size_t begin = 0; begin < missing.size(); begin += kAheadAtATime) {
      const auto some =
          std::span(missing).subspan(begin, std::min(kAheadAtATime, missing.size() - begin));
      reads.Clear();
      if (status.ok()) ReadAside(&lock, some, kKeyOfMissing, &reads);
      for (const auto& [_, ref] : some) {
        SignIndex::Entry* entry = index_.Find(ref->key);
        const ColdReads::Row* read = reads.Find(ref->key);
        if (status.ok() && entry != nullptr && IsColdOfDim(*entry, run.dim)) {
          status = Promote(entry, read);
        }
        if (status.ok() && HasDim(entry, run.dim)) {
          update(*ref, entry);
        } else {
          ++counts.num_missing;
        }
      }
      steps.Flush();
    }
  }
  if (!status.ok()) {  // as only rows of a tier are
    status = CutShort(status);
    tier_->Fail(status);
  }
  // What is applied has not failed: where the cache stays too large, the next call is told.
  if (tier_ != nullptr) tier_->Fail(LimitCache());
  CountUpdates(counts);
  Add(counts, report);
  return status;
}

Status Shard::SetRows(std::span<const Run> runs, const float* rows) {
  Lock lock(mutex_);
  LookupReport counts;
  ChangeBatch changed(changes_);
  Status change_status;
  const auto set = [&](const Run& run, const RowRef& ref, uint32_t slot) {
    if (!MayChange(ref.key, slot, &change_status)) return;
    changed.Add(ref.key);
    const RowView row = slabs_.View(slot);
    format_.Write(row.values, rows + run.FloatOffset(ref), run.dim);
    rules_->OfKey(ref.key).InitializeState(row);
    BeginCount(slot);
  };
  BeginBatch();
  for (const Run& run : runs) {
    UseFound(run, [&](const RowRef& ref, uint32_t slot) { set(run, ref, slot); });
  }
  if (tier_ != nullptr) PERSIA_RETURN_IF_ERROR(UseCold(&lock, set));
  const Status status = InsertMissing(set, &counts);
  CountLookups(counts);
  return status.ok() ? change_status : status;
}

StatusOr<bool> Shard::MakeRoom(uint64_t num_new, bool keep_batch, LookupReport* counts) {
  if (keep_batch && num_new > capacity_) return false;
  const uint64_t wanted = index_.size() + num_new;
  uint64_t num_left = wanted > capacity_ ? std::min(wanted - capacity_, index_.size()) : 0;
  for (; num_left > 0; --num_left) {
    SignIndex::Entry* victim = victims_.Pop(index_);
    if (keep_batch && victim->stamp == now_) return false;
    PERSIA_RETURN_IF_ERROR(RemoveVictim(victim));
    ++counts->num_evicted;
  }
  return true;
}

StatusOr<bool> Shard::MakeRoomInGroups(bool keep_batch, LookupReport* counts) {
  Status status;
  bool has_room = !keep_batch || !limits_.HasTooMany();
  while (has_room) {
    SignIndex::Entry* victim = limits_.NextVictim(index_);
    if (victim == nullptr) break;
    has_room = !keep_batch || victim->stamp != now_;
    if (!has_room) break;
    status = RemoveVictim(victim);
    if (!status.ok()) break;
    ++counts->num_evicted;
  }
  limits_.ExpectNothing();
  if (!status.ok()) return status;
  return has_room;
}

// One that stays is the oldest again.
Status Shard::RemoveVictim(SignIndex::Entry* entry) {
  Status status = Remove(entry);
  if (!status.ok()) ForgetVictims();
  return status;
}

uint32_t Shard::Insert(uint64_t key, uint32_t dim, LookupReport* counts) {
  if (limits_.is_on()) {
    ExpectInsert(key);
    if (!MakeRoomInGroups(/*keep_batch=*/false, counts).ok()) return kNoSlot;
  }
  if (index_.size() >= capacity_ && !MakeRoom(1, /*keep_batch=*/false, counts).ok()) return kNoSlot;
  const uint32_t slot = AllocateRow(key, dim, now_);
  if (slot == kNoSlot) return kNoSlot;
  rules_->OfKey(key).Initialize(SignOfKey(key), slabs_.View(slot));
  ++counts->num_inserted;
  return slot;
}

uint32_t Shard::AllocateRow(uint64_t key, uint32_t dim, uint32_t stamp) {
  const uint32_t slot = slabs_.Allocate(slabs_.FindOrAddPool(ShapeOf(key, dim)));
  if (slot == kNoSlot) return kNoSlot;
  if (index_.Insert({key, slot, stamp})) {
    BeginCount(slot);
    if (tier_ != nullptr) {
      SetCell(slabs_, slot, HotCell{pool::kNoAddress, tier_->batch()});
      NoteHot(key, slot);
    }
    limits_.CountInsert(key);
    if (changes_ != nullptr) [[unlikely]]
      changes_->Add(key);
    return slot;
  }
  slabs_.Free(slot);
  return kNoSlot;
}

Status Shard::Remove(SignIndex::Entry* entry) {
  if (tier_ != nullptr) PERSIA_RETURN_IF_ERROR(WriteForCheckpoint(entry->key, entry->slot));
  if (snapshot_ != nullptr) [[unlikely]]
    snapshot_->SaveBeforeTouch(*entry, slabs_);
  if (changes_ != nullptr) [[unlikely]]
    changes_->Add(entry->key);
  if (tier_ != nullptr) tier_->Fail(RemoveFromTier(*entry));
  limits_.CountRemoval(entry->key);
  slabs_.Free(entry->slot);
  index_.Erase(entry);
  ++num_removals_;
  return Status::Ok();
}

void Shard::CountLookups(const LookupReport& counts) { Add(counts, &lookups_); }
void Shard::CountUpdates(const UpdateReport& counts) { Add(counts, &updates_); }

Status Shard::OutOfMemory() const {
  return ResourceExhausted("no memory for another row beside the " + std::to_string(index_.size()) +
                           " in this shard (" + std::to_string(slabs_.memory_bytes()) +
                           " bytes); lower the capacity or add parameter servers");
}

void Shard::AddStatsTo(StoreStats* stats) const {
  std::lock_guard lock(mutex_);
  stats->num_rows += index_.size();
  stats->memory_bytes +=
      sizeof(Shard) + index_.memory_bytes() + slabs_.memory_bytes() + victims_.memory_bytes() +
      coldest_.memory_bytes() + hot_keys_.memory_bytes() + wanted_.memory_bytes() +
      filter_.memory_bytes() + expiry_.memory_bytes() + limits_.memory_bytes() +
      missing_.capacity() * sizeof(Missing) + (marks_ == nullptr ? 0 : sizeof(RowMarks));
  Add(lookups_, &stats->lookups);
  Add(updates_, &stats->updates);
}

uint64_t Shard::size() const {
  std::lock_guard lock(mutex_);
  return index_.size();
}

void Shard::Clear() {
  std::lock_guard lock(mutex_);
  ClearLocked();
}

void Shard::ClearLocked() {
  if (snapshot_ != nullptr) snapshot_->TakeOver(std::move(index_), std::move(slabs_));
  index_.Clear();
  slabs_.Clear();
  victims_.Clear();
  coldest_.Clear();
  hot_.RemoveAll();
  hot_keys_.Clear();
  limits_.CountClear();
  filter_.Clear();
  ++num_removals_;
}

void Shard::ForgetVictims() {
  victims_.Clear();
  coldest_.Clear();
  limits_.ForgetVictims();
}

uint32_t Shard::NumUpdates(uint64_t key) const {
  const std::lock_guard lock(mutex_);
  const SignIndex::Entry* entry = index_.Find(key);
  return entry == nullptr ? 0
                          : UpdateCountOf(slabs_.values(entry->slot), slabs_.shape(entry->slot));
}

void Shard::SetRules(std::shared_ptr<const RuleSet> rules, uint64_t num_filter_cells,
                     uint32_t number, uint32_t num_shards) {
  const std::lock_guard lock(mutex_);
  // Without rows, drop what pools remember of the former rules' shapes.
  if (index_.size() == 0) ClearLocked();
  // Until the limits know the new rules, they use the old ones.
  const std::shared_ptr<const RuleSet> old_rules = std::exchange(rules_, std::move(rules));
  limits_.SetRules(*rules_, index_, number, num_shards);
  expiry_.SetShortest(rules_->ShortestTimeToLive());
  filter_.Resize(num_filter_cells);
}

void Add(const LookupReport& counts, LookupReport* total) {
  total->num_missing += counts.num_missing;
  total->num_inserted += counts.num_inserted;
  total->num_unadmitted += counts.num_unadmitted;
  total->num_evicted += counts.num_evicted;
  total->num_expired += counts.num_expired;
  total->num_small += counts.num_small;
}

void Add(const UpdateReport& counts, UpdateReport* total) {
  total->num_updated += counts.num_updated;
  total->num_missing += counts.num_missing;
  total->num_nonfinite += counts.num_nonfinite;
}

}  // namespace persia::store
