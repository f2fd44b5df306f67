// What lets memory have huge pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "base/kept_memory.h"
#include "base/mapped_memory.h"

namespace persia {
namespace {

bool AllowedBy(const std::string& setting) {
  const std::string path = testing::TempDir() + "page_size_test_setting";
  std::ofstream(path) << setting << "\n";
  const bool allowed = AllowsHugePages(path.c_str());
  std::filesystem::remove(path);
  return allowed;
}

TEST(PageSizeTest, OnlyNeverForbidsHugePages) {
  EXPECT_FALSE(AllowedBy("always madvise [never]"));
  EXPECT_TRUE(AllowedBy("always [madvise] never"));
  EXPECT_TRUE(AllowedBy("[always] madvise never"));
  EXPECT_TRUE(AllowsHugePages("/no/such/setting")) << "advice that a system ignores does no harm";
}

TEST(PageSizeTest, ReleasedPagesAreZeroAndTheirNeighboursStay) {
  constexpr size_t kPage = MappedMemory::kPageBytes, kSize = MappedMemory::kHugePageBytes;
  const MappedMemory memory = MappedMemory::Allocate(kSize);
  ASSERT_NE(memory.data(), nullptr);
  std::byte* data = memory.data();
  std::memset(data, 1, kSize);
  EXPECT_EQ(ReleasePages(data + 100, 10 * kPage), 9 * kPage);
  EXPECT_EQ(std::count(data, data + kSize, std::byte{0}), 9 * kPage);
  EXPECT_EQ(data[kPage], std::byte{0});
  EXPECT_EQ(data[10 * kPage], std::byte{1});
  EXPECT_EQ(ReleasePages(data + 100, kPage), 0u) << "no page is whole";
  std::memset(data, 2, kSize);
  EXPECT_EQ(std::count(data, data + kSize, std::byte{2}), kSize) << "used again";
}

// Last: memory is kept from here on.
TEST(PageSizeTest, FreedMemoryIsKeptZeroedForTheSameSizeAndUnmappedForOthers) {
  constexpr size_t kSize = MappedMemory::kHugePageBytes;
  {
    const MappedMemory freed = MappedMemory::Allocate(kSize);
  }
  EXPECT_EQ(KeptMemoryBytes(), 0u) << "not enabled yet";
  KeepFreedMemory();
  std::byte* data = nullptr;
  {
    MappedMemory freed = MappedMemory::Allocate(kSize);
    data = freed.data();
    std::memset(data, 1, kSize);
    const MappedMemory moved = std::move(freed);
  }
  EXPECT_EQ(KeptMemoryBytes(), kSize);
  {
    const MappedMemory small = MappedMemory::Allocate(MappedMemory::kPageBytes);
  }
  {
    const MappedMemory sparse = MappedMemory::AllocateSparse(MappedMemory::kPageBytes);
  }
  EXPECT_EQ(KeptMemoryBytes(), kSize);
  {
    const MappedMemory again = MappedMemory::Allocate(kSize);
    EXPECT_EQ(again.data(), data);
    EXPECT_EQ(std::count(data, data + kSize, std::byte{0}), kSize);
    EXPECT_EQ(KeptMemoryBytes(), 0u);
  }
  const MappedMemory larger = MappedMemory::Allocate(2 * kSize);
  ASSERT_NE(larger.data(), nullptr);
  EXPECT_EQ(KeptMemoryBytes(), 0u) << "the process stays at its peak";
}

}  // namespace
}  // namespace persia
