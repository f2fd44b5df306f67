#include "base/string_hash.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace persia {
namespace {

// Of the reference implementation; of every length class of the algorithm.
TEST(StringHash, IsXxh64) {
  EXPECT_EQ(StringHash(""), 0xef46db3751d8e999u);
  EXPECT_EQ(StringHash("a"), 0xd24ec4f1a98c6e5bu);
  EXPECT_EQ(StringHash("abc"), 0x44bc2cf5ad770999u);
  EXPECT_EQ(StringHash("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1u);
}

TEST(StringHash, ManyAreEachHashedAlone) {
  constexpr std::string_view kData = "xaabcx";
  const std::array<int64_t, 5> offsets = {1, 1, 2, 2, 5};
  std::array<uint64_t, 4> ids = {};
  ASSERT_TRUE(HashStrings(offsets, std::as_bytes(std::span(kData)), ids.data()).ok());
  EXPECT_EQ(ids, (std::array<uint64_t, 4>{StringHash(""), StringHash("a"), StringHash(""),
                                          StringHash("abc")}));
}

TEST(StringHash, RefusesOffsetsOutsideTheData) {
  const std::vector<std::byte> data(4);
  for (const auto& offsets : {std::array<int64_t, 2>{0, 5}, std::array<int64_t, 2>{-1, 2},
                              std::array<int64_t, 2>{3, 2}}) {
    uint64_t id = 0;
    EXPECT_EQ(HashStrings(offsets, data, &id).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(HashStrings({}, data, nullptr).ok());
}

}  // namespace
}  // namespace persia
