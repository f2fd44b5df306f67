// What lets memory have huge pages.
#include "base/page_size.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

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

}  // namespace
}  // namespace persia
