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

enum class MetricKind : uint8_t { kCounter, kGauge, kFlag };

struct MetricInfo {
  const char* key;
  const char* name;  // null: in stats() and /status only, as a flag always is
  const char* help = "";
  MetricKind kind = MetricKind::kCounter;
};

struct Metric {
  MetricInfo info;
  uint64_t value = 0;
  double ratio = 0;  // the value where `is_ratio`
  bool is_ratio = false;
};

class Metrics {
 public:
  void Add(const MetricInfo& info, uint64_t value) { list_.push_back({info, value}); }
  void AddCounter(const char* key, const char* name, const char* help, uint64_t value) {
    Add({key, name, help, MetricKind::kCounter}, value);
  }
  void AddGauge(const char* key, const char* name, const char* help, uint64_t value) {
    Add({key, name, help, MetricKind::kGauge}, value);
  }
  void AddFlag(const char* key, bool value) { Add({key, nullptr, "", MetricKind::kFlag}, value); }
  void AddRatio(const char* key, const char* name, const char* help, double value) {
    list_.push_back({{key, name, help, MetricKind::kGauge}, 0, value, true});
  }

  // 0: there is no such key.
  uint64_t operator[](std::string_view key) const;
  auto begin() const { return list_.begin(); }
  auto end() const { return list_.end(); }

 private:
  std::vector<Metric> list_;
};

class Counter;

// The counters of one object. They must not outlive it.
class CounterList {
 public:
  void AddTo(Metrics* metrics) const;

 private:
  friend class Counter;
  std::vector<const Counter*> counters_;
};

// Thread-safe. A member of the object that counts, declared behind its CounterList.
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
  uint64_t value() const { return value_.load(); }
  const MetricInfo& info() const { return info_; }

 private:
  const MetricInfo info_;
  std::atomic<uint64_t> value_{0};
};

//
// HyperLogLog (Flajolet et al. 2007) with 4096 registers: a standard error of 1.6 %, and linear
// counting where few have been added. Add() is a hash, a load and, rarely, a store. Thread-safe.
class Cardinality {
 public:
  void Add(std::span<const uint64_t> numbers);
  double Estimate() const;

 private:
  static constexpr uint32_t kBits = 12;
  // The longest run of leading zeros, plus one, seen among the hashes of a register.
  std::array<std::atomic<uint8_t>, 1u << kBits> registers_{};
};

}  // namespace persia
