#include "base/buffer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

namespace persia {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif

TEST(BufferTest, IsAlignedAndWritableAtAnySize) {
  for (const size_t size :
       {size_t{1}, size_t{63}, size_t{64}, size_t{65'535}, size_t{65'536}, size_t{5} << 20}) {
    Buffer buffer(size);
    EXPECT_EQ(buffer.size(), size);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    std::memset(buffer.data(), 1, size);
  }
  EXPECT_EQ(Buffer(0).data(), nullptr);  // also after others
}

TEST(BufferTest, ALargeOneIsUsedAgainWhereTheSizeIsNear) {
  if (!kKeeps) GTEST_SKIP() << "under AddressSanitizer nothing is kept";
  const std::byte* first = nullptr;
  {
    Buffer buffer(10 << 20);
    first = buffer.data();
  }
  EXPECT_EQ(Buffer(9 << 20).data(), first);
  EXPECT_NE(Buffer(1 << 20).data(), first) << "would waste nine tenths";
  EXPECT_NE(Buffer(11 << 20).data(), first) << "would not fit";
}

TEST(BufferTest, KeepsABoundedAmount) {
  if (!kKeeps) GTEST_SKIP() << "under AddressSanitizer nothing is kept";
  constexpr size_t kSize = size_t{16} << 20;
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < 2 * Buffer::kMaxKeptBytes / kSize; ++i) buffers.emplace_back(kSize);
  buffers.clear();
  EXPECT_LE(Buffer::KeptBytes(), Buffer::kMaxKeptBytes);
  EXPECT_GT(Buffer::KeptBytes(), Buffer::kMaxKeptBytes - 2 * kSize);
  for (int i = 0; i < 200; ++i) buffers.emplace_back(100'000);
  buffers.clear();
  EXPECT_LE(Buffer::KeptBytes(), 64u * 2 * 100'000)
      << "many small ones take the large ones' places";
}

TEST(BufferTest, ThreadsShareWhatIsKept) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 500; ++i) {
        Buffer buffer(static_cast<size_t>(70'000 + i * 100));
        std::memset(buffer.data(), t, buffer.size());
        EXPECT_EQ(buffer.data()[buffer.size() - 1], std::byte(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace persia
