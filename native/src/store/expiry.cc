#include "store/expiry.h"

#include <algorithm>
#include <iterator>

namespace persia::store {
namespace {

constexpr double kMarkShare = 32;  // marks are a 32nd of their age apart
constexpr double kWalkShare = 4;   // of the shortest time to live, for all entries

double Seconds(Expiry::Time::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Longer ones than the clock can tell are cut: nothing is as old as that.
Expiry::Time::duration Duration(double seconds) {
  constexpr double kHundredYears = 100.0 * 366 * 86400;
  return std::chrono::duration_cast<Expiry::Time::duration>(
      std::chrono::duration<double>(std::min(seconds, kHundredYears)));
}

}  // namespace

void Expiry::SetShortest(double time_to_live_sec) {
  if (time_to_live_sec == shortest_) return;
  shortest_ = time_to_live_sec;
  if (!is_on()) marks_.clear();
}

// Keys, not entries: the caller removes rows, which moves entries.
std::span<const uint64_t> Expiry::Step(const SignIndex& index, const RowPolicies& policies,
                                       uint32_t stamp, Time now) {
  AddMark(stamp, now);
  expired_.clear();
  size_t num_left = EntriesToPass(index.size(), now);
  if (num_left == 0) return expired_;
  const uint32_t end = StampsBefore(now - Duration(shortest_));  // nearly all rows are newer
  const bool has_ended = index.ForEachFrom(&next_key_, [&](const SignIndex::Entry& entry) {
    if (num_left == 0 || expired_.size() == kMaxExpired) return false;
    --num_left;
    if (entry.stamp >= end) return true;
    const double time_to_live = policies.OfKey(entry.key).time_to_live_sec();
    if (time_to_live > 0 && entry.stamp < StampsBefore(now - Duration(time_to_live))) {
      expired_.push_back(entry.key);
    }
    return true;
  });
  if (has_ended) next_key_ = 0;
  return expired_;
}

void Expiry::AddMark(uint32_t stamp, Time now) {
  if (!marks_.empty() && Seconds(now - marks_.back().time) < shortest_ / kMarkShare) return;
  marks_.push_back({stamp, now});
  // Without a mark, rows before it count as used until the mark behind it.
  size_t num_kept = 1;
  for (size_t i = 1; i < marks_.size(); ++i) {
    const bool is_last = i + 1 == marks_.size();
    if (!is_last && Seconds(marks_[i + 1].time - marks_[num_kept - 1].time) * kMarkShare <
                        Seconds(now - marks_[i + 1].time)) {
      continue;
    }
    marks_[num_kept++] = marks_[i];
  }
  marks_.resize(num_kept);
}

// The newest mark that is old enough. Rows that are older than all marks may have been used at any
// time before, and stay until a mark tells.
uint32_t Expiry::StampsBefore(Time time) const {
  const auto next = std::upper_bound(marks_.begin(), marks_.end(), time,
                                     [](Time t, const Mark& mark) { return t < mark.time; });
  return next == marks_.begin() ? 0 : std::prev(next)->stamp;
}

size_t Expiry::EntriesToPass(uint64_t num_entries, Time now) {
  const double elapsed = last_step_ == Time{} ? 0 : Seconds(now - last_step_);
  last_step_ = now;
  // What a batch does not get done is not left to the next: it would never be caught up with.
  num_due_ += static_cast<double>(num_entries) * elapsed * kWalkShare / shortest_;
  num_due_ = std::min(num_due_, static_cast<double>(std::min<uint64_t>(num_entries, kMaxPassed)));
  const auto num_passed = static_cast<size_t>(num_due_);
  num_due_ -= static_cast<double>(num_passed);
  return num_passed;
}

}  // namespace persia::store
