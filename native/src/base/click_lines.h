// The text of click logs, as Criteo publishes them: a line has a label, integers and categories,
// separated by tabs. Columns come out, which is how they are stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace persia {

// Good lines in their order, column after column. A line that is bad is in no column.
//
// The ID of a category is its StringHash, but 0 for an empty field. ID 1 is left to values that are
// rare, so the two hashes of 2^64 that are 0 and 1 become 2 and 3.
struct ClickLines {
  // Of bad lines: enough to see what is wrong with a file, without a list as long as the file.
  static constexpr size_t kMaxNamed = 100;

  struct Bad {
    size_t line;  // from 1
    std::string reason;
  };

  size_t num_lines = 0, num_bad = 0;
  std::vector<uint8_t> labels;   // 0 or 1
  std::vector<int64_t> numbers;  // [num_numbers][labels.size()]; 0 where the field is empty
  std::vector<uint64_t> ids;     // [num_categories][labels.size()]
  std::vector<Bad> bad;          // the first ones, at most kMaxNamed
};

// A line ends at \n, \r\n or the end of the text. A number is a decimal integer of 64 bits.
// Never fails: logs of terabytes have broken lines, and the caller decides how many it accepts. It
// cuts the text at line ends, so that blocks can be parsed in any order. Stateless, hence
// thread-safe.
ClickLines ParseClickLines(std::string_view text, size_t num_numbers, size_t num_categories);

}  // namespace persia
