// Pools of rows: writes, reads and removals a second, and how long recovery takes.
//
//   pool_bench DIRECTORY [file|pmem] [GIGABYTES] [DIM] [STATE_FLOATS]
//
// DIRECTORY must be empty; the pool is removed at the end. Recovery runs on one thread, three
// times; its seconds are per 10^9 bytes of rows as they lie in the pool.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "pool/row_pool.h"

namespace persia::pool {
namespace {

constexpr size_t kBatch = 4096;

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

[[noreturn]] void Fail(const Status& status) {
  std::fprintf(stderr, "pool_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}
void Check(const Status& status) {
  if (!status.ok()) Fail(status);
}

void Report(const char* what, uint64_t rows, double seconds) {
  std::printf("%-24s %8.2f s %8.2f Mrows/s\n", what, seconds, double(rows) / seconds / 1e6);
}

struct Rows {
  uint32_t dim, state_floats;
  std::vector<uint64_t> addresses;
  std::vector<float> values;

  void WriteAll(RowPool& pool, uint64_t version) {
    std::vector<RowWrite> writes;
    for (uint64_t begin = 0; begin < addresses.size(); begin += kBatch) {
      const auto part =
          std::span(addresses).subspan(begin, std::min(kBatch, addresses.size() - begin));
      writes.clear();
      for (uint64_t i = 0; i < part.size(); ++i) {
        writes.push_back({{begin + i, version, dim, state_floats, 0, 0}, values.data(), part[i]});
      }
      Check(pool.Write(writes, part));
    }
  }
  void ReadAll(const RowPool& pool) {
    std::vector<uint64_t> order(addresses.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
    RowHead head;
    for (const uint64_t sign : order) Check(pool.Read(addresses[sign], sign, &head, values));
  }
};

void Commit(RowPool& pool, uint64_t batch) {
  const double start = Seconds();
  Check(pool.BeginCheckpoint(batch));
  Check(pool.Commit(batch));
  std::printf("%-24s %8.2f s\n", "commit", Seconds() - start);
}

void Run(const std::string& directory, PoolKind kind, double gigabytes, uint32_t dim,
         uint32_t state_floats) {
  const size_t cell_bytes = CellBytes(dim + state_floats);
  const auto num_rows = static_cast<uint64_t>(gigabytes * 1e9 / double(cell_bytes));
  PoolOptions options{.kind = kind, .size_bytes = uint64_t(gigabytes * 2.2e9) + (256 << 20)};
  Rows rows{dim, state_floats, std::vector<uint64_t>(num_rows, kNoAddress),
            std::vector<float>(dim + state_floats, 0.5f)};
  std::printf("%llu rows of %zu bytes\n", static_cast<unsigned long long>(num_rows), cell_bytes);
  {
    auto pool = RowPool::Create(directory, options);
    Check(pool.status());
    double start = Seconds();
    rows.WriteAll(**pool, 1);
    Report("write new rows", num_rows, Seconds() - start);
    Commit(**pool, 1);
    start = Seconds();
    rows.ReadAll(**pool);
    Report("read at random", num_rows, Seconds() - start);
    start = Seconds();
    rows.WriteAll(**pool, 2);
    Report("write new versions", num_rows, Seconds() - start);
    Commit(**pool, 2);
  }
  for (int round = 0; round < 3; ++round) {
    uint64_t count = 0;
    const double start = Seconds();
    auto pool = RowPool::Open(directory, options,
                              [&](std::span<const RecoveredRow> found) { count += found.size(); });
    Check(pool.status());
    const double seconds = Seconds() - start;
    const uint64_t bytes = (*pool)->stats().size_bytes;
    std::printf("recovery: %llu rows in %.2f s; %.3f s/GB of rows, %.3f s/GB of file\n",
                static_cast<unsigned long long>(count), seconds,
                seconds / (double(num_rows * cell_bytes) / 1e9), seconds / (double(bytes) / 1e9));
  }
}

}  // namespace
}  // namespace persia::pool

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc < 2) {
    std::fprintf(stderr, "usage: pool_bench DIRECTORY [file|pmem] [GIGABYTES] [DIM] [STATE]\n");
    return 2;
  }
  const bool is_pmem = argc > 2 && std::string(argv[2]) == "pmem";
  const auto number = [&](int i, double otherwise) {
    return argc > i ? std::atof(argv[i]) : otherwise;
  };
  persia::pool::Run(
      argv[1], is_pmem ? persia::pool::PoolKind::kPmem : persia::pool::PoolKind::kFile,
      number(3, 1), static_cast<uint32_t>(number(4, 64)), static_cast<uint32_t>(number(5, 64)));
  std::remove((std::string(argv[1]) + "/rows.pool").c_str());
}
