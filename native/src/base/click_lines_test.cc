#include "base/click_lines.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/string_hash.h"

namespace persia {
namespace {

TEST(ClickLines, AreCutIntoColumns) {
  const ClickLines lines = ParseClickLines("1\t7\t\ta\t\n0\t-3\t 12 \t\tbc", 2, 2);
  EXPECT_EQ(lines.num_lines, 2u);
  EXPECT_EQ(lines.labels, (std::vector<uint8_t>{1, 0}));
  EXPECT_EQ(lines.numbers, (std::vector<int64_t>{7, -3, 0, 12}));
  EXPECT_EQ(lines.ids, (std::vector<uint64_t>{StringHash("a"), 0, 0, StringHash("bc")}));
  EXPECT_TRUE(lines.bad.empty());
}

TEST(ClickLines, EndInEitherWay) {
  for (const char* text : {"1\tx\n0\ty\n", "1\tx\r\n0\ty\r\n", "1\tx\n0\ty"}) {
    const ClickLines lines = ParseClickLines(text, 0, 1);
    EXPECT_EQ(lines.num_lines, 2u);
    EXPECT_EQ(lines.ids, (std::vector<uint64_t>{StringHash("x"), StringHash("y")}));
  }
  EXPECT_EQ(ParseClickLines("", 1, 1).num_lines, 0u);
  EXPECT_EQ(ParseClickLines("\n", 1, 1).bad.size(), 1u);
}

TEST(ClickLines, BadOnesAreNamedAndLeftOut) {
  struct Case {
    std::string line, reason;
  };
  const std::vector<Case> cases = {
      {"1\t2", "it has 2 fields, must have 4"},
      {"", "it has 1 fields, must have 4"},
      {"1\t2\t3\ta\tb", "it has 5 fields, must have 4"},
      {"1\tx7\t3\ta", "num_0 is 'x7', must be an integer"},
      {"1\t2\t0x1F\ta", "num_1 is '0x1F', must be an integer"},
      {"1\t2\t99999999999999999999\ta", "num_1 is '99999999999999999999', must be an integer"},
      {"1\t2\t\xff\x01\ta", "num_1 is '\?\?', must be an integer"},
      {"x\t2\t3\ta", "label is 'x', must be an integer"},
      {"\t2\t3\ta", "the label is empty, must be 0 or 1"},
      {"2\t2\t3\ta", "the label is 2, must be 0 or 1"},
      {std::string(99, '0') + "2\t2\t3\ta", "the label is 2, must be 0 or 1"},
  };
  std::string text;
  for (const Case& one : cases) text += "1\t5\t6\tgood\n" + one.line + "\n";
  const ClickLines lines = ParseClickLines(text, 2, 1);
  EXPECT_EQ(lines.num_lines, 2 * cases.size());
  EXPECT_EQ(lines.labels, std::vector<uint8_t>(cases.size(), 1));
  EXPECT_EQ(lines.ids, std::vector<uint64_t>(cases.size(), StringHash("good")));
  std::vector<int64_t> numbers(cases.size(), 5);
  numbers.resize(2 * cases.size(), 6);
  EXPECT_EQ(lines.numbers, numbers);
  EXPECT_EQ(lines.num_bad, cases.size());
  ASSERT_EQ(lines.bad.size(), cases.size());
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(lines.bad[i].line, 2 * i + 2);
    EXPECT_EQ(lines.bad[i].reason, cases[i].reason);
  }
}

// A file of other data must be an error, and not the end of a machine's memory.
TEST(ClickLines, ShortOnesNeedNoColumns) {
  const std::string text = "1\t2\ta\n" + std::string(100'000, '\n') + "0\t\t\n" + "0\t";
  const ClickLines lines = ParseClickLines(text, 1, 1);
  EXPECT_EQ(lines.labels, (std::vector<uint8_t>{1, 0}));
  EXPECT_EQ(lines.ids, (std::vector<uint64_t>{StringHash("a"), 0}));
  EXPECT_EQ(lines.num_bad, 100'001u);
  EXPECT_EQ(lines.bad.size(), ClickLines::kMaxNamed);
  EXPECT_EQ(lines.bad.back().reason, "it has 1 fields, must have 3");
  EXPECT_LT(lines.ids.capacity(), text.size());
}

}  // namespace
}  // namespace persia
