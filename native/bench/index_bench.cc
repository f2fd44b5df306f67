// SignIndex beside general hash maps, for what the store asks of an index: 64-bit keys to 32-bit
// slots, one thread.
//
//   index_bench NUM_KEYS [MAP...]      one line for each map, one column for each operation
//
// Beside the slot each map holds the 32-bit stamp of the last use, and a hit writes it, as in the
// store. Lookups come one by one and in batches; in batches the entry of a key is prefetched some
// keys before it is used. Of the general maps only absl's can prefetch; the others are left out.
//
// All maps take the keys in the same order and hash them with the same SignKey; maps that use only
// a part of the hash mix it further by themselves. A program of its own rather than Google
// Benchmark, as a map of 5e7 keys is to be filled once for all operations. The maps are measured
// one after another, each kind of lookup in several passes over fresh keys, of which the fastest
// counts: what disturbs a pass only adds to it.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store/sign_index.h"

#ifdef PERSIA_HAVE_ABSL
#include <absl/container/flat_hash_map.h>
#endif
#ifdef PERSIA_HAVE_BOOST_FLAT
#include <boost/unordered/unordered_flat_map.hpp>
#endif
#ifdef PERSIA_HAVE_TSL
#include <tsl/robin_map.h>
#endif
#ifdef PERSIA_HAVE_ANKERL
#include <ankerl/unordered_dense.h>
#endif

namespace persia::store {
namespace {

constexpr size_t kQueries = 1'000'000;
constexpr size_t kBatch = 4096;
constexpr int kPasses = 7;

struct Hash {
  using is_avalanching = void;  // boost, ankerl: every bit depends on every bit of the key
  size_t operator()(uint64_t key) const { return SignKey(key); }
};

// Distinct keys in no order: multiplication by an odd number is a bijection.
uint64_t Key(uint64_t i) { return (i + 1) * 0x9e3779b97f4a7c15ULL; }

// Bounded Zipf(1.1) by inverting the integral of its density: rank 0 is the most frequent.
uint64_t ZipfRank(double uniform, double num_keys) {
  constexpr double kExponent = -0.1;  // 1 - 1.1
  const double end = std::pow(num_keys, kExponent);
  return static_cast<uint64_t>(std::pow(1 + uniform * (end - 1), 1 / kExponent)) - 1;
}

// What a map holds, counted where it asks for it. Large blocks are advised to be huge pages, as
// SignIndex's own memory is: otherwise page size would decide the comparison.
uint64_t bytes_held = 0;

template <typename T>
struct HugePageAllocator {
  using value_type = T;
  HugePageAllocator() = default;
  template <typename U>
  HugePageAllocator(const HugePageAllocator<U>&) {}  // NOLINT: implicit, as allocators are
  T* allocate(size_t count) {
    constexpr size_t kHugePageBytes = size_t{2} << 20;
    const size_t size = count * sizeof(T);
    bytes_held += size;
    if (size < kHugePageBytes) return static_cast<T*>(std::malloc(size));
    const size_t rounded = (size + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    void* block = std::aligned_alloc(kHugePageBytes, rounded);
    if (block == nullptr) std::abort();
    ::madvise(block, rounded, MADV_HUGEPAGE);
    return static_cast<T*>(block);
  }
  void deallocate(T* block, size_t count) {
    bytes_held -= count * sizeof(T);
    std::free(block);
  }
  friend bool operator==(const HugePageAllocator&, const HugePageAllocator&) { return true; }
};

struct Use {
  uint32_t slot;
  uint32_t stamp;
};
constexpr uint32_t kLookupStamp = 1;

using Entries = HugePageAllocator<std::pair<const uint64_t, Use>>;
using Slots = HugePageAllocator<std::pair<uint64_t, Use>>;  // of maps that move entries
using Equal = std::equal_to<uint64_t>;

// ---- the maps, each behind the same operations

constexpr uint32_t kAbsent = SignIndex::kNoCell;

// Looks all keys up, with the entries that are needed soon on their way.
template <typename Map>
uint64_t FindAhead(Map& map, const uint64_t* keys, size_t count) {
  constexpr size_t kAhead = 32;
  uint64_t sum = 0;
  for (size_t i = 0; i < count + kAhead; ++i) {
    if (i < count) map.Prefetch(keys[i]);
    if (i >= kAhead) sum += map.Find(keys[i - kAhead], kLookupStamp);
  }
  return sum;
}

class Ours {
 public:
  static constexpr bool kPrefetches = true;

  void Insert(uint64_t key, uint32_t slot) {
    if (!index_.Insert({SignKey(key), slot, 0})) std::abort();
  }
  uint32_t Find(uint64_t key, uint32_t stamp) {
    SignIndex::Entry* entry = index_.Find(SignKey(key));
    if (entry == nullptr) return kAbsent;
    entry->stamp = stamp;
    return entry->cell;
  }
  void Prefetch(uint64_t key) const { __builtin_prefetch(index_.HomeOf(SignKey(key))); }
  void Erase(uint64_t key) { index_.Erase(index_.Find(SignKey(key))); }
  uint64_t memory_bytes() const { return index_.memory_bytes(); }

 private:
  SignIndex index_;
};

template <typename Iterator>
Use& ValueOf(Iterator& found) {
  if constexpr (requires { found.value(); }) {
    return found.value();  // robin_map
  } else {
    return found->second;
  }
}

// Any map with the interface of std::unordered_map.
template <typename Map>
class General {
 public:
  static constexpr bool kPrefetches = requires(const Map& map) { map.prefetch(uint64_t{}); };

  void Insert(uint64_t key, uint32_t slot) { map_.emplace(key, Use{slot, 0}); }
  uint32_t Find(uint64_t key, uint32_t stamp) {
    auto found = map_.find(key);
    if (found == map_.end()) return kAbsent;
    Use& use = ValueOf(found);
    use.stamp = stamp;
    return use.cell;
  }
  void Prefetch(uint64_t key) const {
    if constexpr (kPrefetches) map_.prefetch(key);
  }
  void Erase(uint64_t key) { map_.erase(key); }
  uint64_t memory_bytes() const { return bytes_held; }

 private:
  Map map_;
};

// ---- the operations

struct Figures {
  double insert = 0;  // nanoseconds per key, like all but the last
  double hit_uniform = 0;
  double hit_zipf = 0;
  double hit_uniform_batched = 0;
  double hit_zipf_batched = 0;
  double miss = 0;
  double erase = 0;
  double bytes_per_key = 0;
};

template <typename Function>
double NanosecondsEach(size_t count, Function function) {
  const auto begin = std::chrono::steady_clock::now();
  function();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  return took.count() / static_cast<double>(count);
}

// `make_index(random)` gives the number of a key to ask for; `run(keys)` a sum, compared with what
// the slots of the keys add up to, so that a wrong map does not pass for a fast one.
template <typename MakeIndex, typename Run>
double Measure(MakeIndex make_index, bool present, Run run) {
  std::mt19937_64 random(7);
  std::vector<double> passes;
  std::vector<uint64_t> keys(kQueries);
  for (int pass = 0; pass < kPasses; ++pass) {
    uint64_t expected = 0;
    for (uint64_t& key : keys) {
      const uint64_t i = make_index(random);
      key = Key(i);
      expected += present ? i : kAbsent;
    }
    uint64_t sum = 0;
    passes.push_back(NanosecondsEach(kQueries, [&] { sum = run(keys); }));
    if (sum != expected) {
      std::fprintf(stderr, "a lookup found the wrong slot\n");
      std::exit(1);
    }
  }
  return std::ranges::min(passes);
}

template <typename Map>
Figures MeasureMap(uint64_t num_keys) {
  Figures figures;
  Map map;
  figures.insert = NanosecondsEach(num_keys, [&] {
    for (uint64_t i = 0; i < num_keys; ++i) map.Insert(Key(i), static_cast<uint32_t>(i));
  });
  figures.bytes_per_key = static_cast<double>(map.memory_bytes()) / static_cast<double>(num_keys);
  const auto uniform = [&](std::mt19937_64& random) { return random() % num_keys; };
  const auto zipf = [&](std::mt19937_64& random) {
    // Frequent keys are spread over the slots, as eviction would spread them.
    std::uniform_real_distribution<double> unit;
    return ZipfRank(unit(random), static_cast<double>(num_keys)) * 2654435761 % num_keys;
  };
  const auto absent = [&](std::mt19937_64& random) { return num_keys + random() % num_keys; };
  const auto one_by_one = [&](const std::vector<uint64_t>& keys) {
    uint64_t sum = 0;
    for (const uint64_t key : keys) sum += map.Find(key, kLookupStamp);
    return sum;
  };
  figures.hit_uniform = Measure(uniform, true, one_by_one);
  figures.hit_zipf = Measure(zipf, true, one_by_one);
  if constexpr (Map::kPrefetches) {
    const auto batched = [&](const std::vector<uint64_t>& keys) {
      uint64_t sum = 0;
      for (size_t i = 0; i < keys.size(); i += kBatch) {
        sum += FindAhead(map, keys.data() + i, std::min(kBatch, keys.size() - i));
      }
      return sum;
    };
    figures.hit_uniform_batched = Measure(uniform, true, batched);
    figures.hit_zipf_batched = Measure(zipf, true, batched);
  }
  figures.miss = Measure(absent, false, one_by_one);
  const size_t num_erased = std::min<uint64_t>(kQueries, num_keys / 2);
  const uint64_t stride = num_keys / num_erased;
  figures.erase = NanosecondsEach(num_erased, [&] {
    for (size_t i = 0; i < num_erased; ++i) map.Erase(Key(i * stride));
  });
  return figures;
}

void Print(const char* name, const Figures& figures) {
  const auto print = [](double value) {
    if (value == 0) {
      std::printf(" %9s", "-");
    } else {
      std::printf(" %9.1f", value);
    }
  };
  std::printf("%-28s", name);
  print(figures.insert);
  print(figures.hit_uniform);
  print(figures.hit_uniform_batched);
  print(figures.hit_zipf);
  print(figures.hit_zipf_batched);
  print(figures.miss);
  print(figures.erase);
  print(figures.bytes_per_key);
  std::printf("\n");
  std::fflush(stdout);
}

template <typename Map>
void MeasureIfAsked(const char* name, uint64_t num_keys, const std::vector<std::string>& asked) {
  if (!asked.empty() && std::ranges::find(asked, name) == asked.end()) return;
  Print(name, MeasureMap<Map>(num_keys));
}

}  // namespace
}  // namespace persia::store

int main(int argc, char** argv) {
  using namespace persia::store;  // NOLINT: a program's own names
  const uint64_t num_keys = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  if (num_keys < 2 || num_keys >= UINT32_MAX) {
    std::fprintf(stderr, "usage: index_bench NUM_KEYS [MAP...]   with 2 <= NUM_KEYS < 2^32 - 1\n");
    return 2;
  }
  const std::vector<std::string> asked(argv + std::min(argc, 2), argv + argc);
  std::printf(
      "%lu keys; nanoseconds for each key, 1 thread\n%-28s %9s %9s %9s %9s %9s %9s %9s %9s\n",
      static_cast<unsigned long>(num_keys), "map", "insert", "uniform", "u.batched", "zipf",
      "z.batched", "miss", "erase", "bytes/key");
  MeasureIfAsked<Ours>("SignIndex", num_keys, asked);
#ifdef PERSIA_HAVE_ABSL
  MeasureIfAsked<General<absl::flat_hash_map<uint64_t, Use, Hash, Equal, Entries>>>(
      "absl::flat_hash_map", num_keys, asked);
#endif
#ifdef PERSIA_HAVE_BOOST_FLAT
  MeasureIfAsked<General<boost::unordered_flat_map<uint64_t, Use, Hash, Equal, Entries>>>(
      "boost::unordered_flat_map", num_keys, asked);
#endif
#ifdef PERSIA_HAVE_TSL
  MeasureIfAsked<General<tsl::robin_map<uint64_t, Use, Hash, Equal, Slots>>>("tsl::robin_map",
                                                                             num_keys, asked);
#endif
#ifdef PERSIA_HAVE_ANKERL
  MeasureIfAsked<General<ankerl::unordered_dense::map<uint64_t, Use, Hash, Equal, Slots>>>(
      "ankerl::unordered_dense", num_keys, asked);
#endif
  MeasureIfAsked<General<std::unordered_map<uint64_t, Use, Hash, Equal, Entries>>>(
      "std::unordered_map", num_keys, asked);
}
