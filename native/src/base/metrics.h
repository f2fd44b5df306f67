// Metrics: the numbers that a role exports, each declared once.
//
// A Counter is declared with its key (in stats() of the bindings and in /status), its Prometheus
// name and its help text. Roles return all of theirs as one list; bindings and exporter iterate it
// and know no metric by name. So a new counter is a member and the line that adds to it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace persia {

// A counter only grows and begins at 0 with the process; a gauge is what holds now; a flag is shown
// as a bool.
enum class MetricKind : uint8_t { kCounter, kGauge, kFlag };

// Literals: they are kept as pointers and never copied. Prometheus appends "_total" to the names of
// counters.
struct MetricInfo {
  const char* key;
  const char* name;  // null: in stats() and /status only, as a flag always is
  // A sentence for those who read a scrape; metrics with a name need one.
  const char* help = "";
  MetricKind kind = MetricKind::kCounter;
};

// One number as it was when the list was made.
struct Metric {
  MetricInfo info;
  uint64_t value = 0;
  // Only one of the two numbers is meant, see `is_ratio`.
  double ratio = 0;  // the value where `is_ratio`
  bool is_ratio = false;
};

// A list rather than a map: a role has a few dozen, and they are shown in the order of their
// declaration.
class Metrics {
 public:
  // Keys of one role are unique, and so are names: a test compares them. Nothing is checked here.
  void Add(const MetricInfo& info, uint64_t value) { list_.push_back({info, value}); }
  void AddCounter(const char* key, const char* name, const char* help, uint64_t value) {
    Add({key, name, help, MetricKind::kCounter}, value);
  }
  void AddGauge(const char* key, const char* name, const char* help, uint64_t value) {
    Add({key, name, help, MetricKind::kGauge}, value);
  }
  void AddFlag(const char* key, bool value) { Add({key, nullptr, "", MetricKind::kFlag}, value); }
  // For shares and estimates, which are not whole.
  void AddRatio(const char* key, const char* name, const char* help, double value) {
    list_.push_back({{key, name, help, MetricKind::kGauge}, 0, value, true});
  }

  // 0: there is no such key.
  uint64_t operator[](std::string_view key) const;
  // In the order in which they were added.
  auto begin() const { return list_.begin(); }
  auto end() const { return list_.end(); }

 private:
  std::vector<Metric> list_;
};

class Counter;

// The counters of one object. They must not outlive it.
// Not thread-safe while counters are declared; afterwards it is read only. Counters of one object
// are members behind it, so they are destroyed before it.
class CounterList {
 public:
  // Each value is exact, but they are read one after another: of two counters that one event
  // raises, the later one may be ahead.
  void AddTo(Metrics* metrics) const;

 private:
  friend class Counter;
  std::vector<const Counter*> counters_;
};

// Thread-safe. A member of the object that counts, declared behind its CounterList.
// One relaxed addition would do for most; the stronger order costs nothing on x86-64 and lets tests
// and invariants compare counters of one object.
class Counter {
 public:
  Counter(CounterList& list, const MetricInfo& info) : info_(info) {
    list.counters_.push_back(this);
  }
  Counter(const Counter&) = delete;

  // Returns the value before. Sequentially consistent, so that a counter may order what it counts.
  uint64_t Add(uint64_t n = 1) { return value_.fetch_add(n); }
  // The greatest of all that were given.
  void RaiseTo(uint64_t value) {
    uint64_t seen = value_.load();
    while (seen < value && !value_.compare_exchange_weak(seen, value)) {
    }
  }
  // The count now. A reader that compares two counters must read the one that is raised last first,
  // or it may see an effect without its cause.
  uint64_t value() const { return value_.load(); }
  const MetricInfo& info() const { return info_; }

 private:
  const MetricInfo info_;
  std::atomic<uint64_t> value_{0};
};

// About how many different numbers were added, in 4 KiB however many there are.
//
// HyperLogLog (Flajolet et al. 2007) with 4096 registers: a standard error of 1.6 %, and linear
// counting where few have been added. Add() is a hash, a load and, rarely, a store. Thread-safe.
class Cardinality {
 public:
  // Equal numbers count once. Never wrong by order or repetition, so several threads may add the
  // same batch.
  void Add(std::span<const uint64_t> numbers);
  // Reads all 4,096 registers: for a scrape, not for a batch. A number that is being added
  // meanwhile may be in it or not.
  double Estimate() const;

 private:
  static constexpr uint32_t kBits = 12;
  // The longest run of leading zeros, plus one, seen among the hashes of a register.
  std::array<std::atomic<uint8_t>, 1u << kBits> registers_{};
};

}  // namespace persia
