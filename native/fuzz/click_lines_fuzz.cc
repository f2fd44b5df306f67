// Text of click logs. Every line is in the columns or among the bad ones, and columns have one
// length.
#include <algorithm>
#include <cstdlib>

#include "base/click_lines.h"

namespace {

void Check(std::string_view text, size_t num_numbers, size_t num_categories) {
  const persia::ClickLines lines = persia::ParseClickLines(text, num_numbers, num_categories);
  const size_t num_good = lines.labels.size();
  if (num_good + lines.num_bad != lines.num_lines) std::abort();
  if (lines.bad.size() != std::min(lines.num_bad, lines.kMaxNamed)) std::abort();
  if (lines.numbers.size() != num_numbers * num_good) std::abort();
  if (lines.ids.size() != num_categories * num_good) std::abort();
  size_t line = 0;
  for (const persia::ClickLines::Bad& bad : lines.bad) {
    if (bad.line <= line || bad.reason.empty()) std::abort();
    line = bad.line;
  }
  if (line > lines.num_lines) std::abort();
  for (const uint8_t label : lines.labels) {
    if (label > 1) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data + 1), size - 1);
  Check(text, data[0] % 3, data[0] / 3 % 4);
  return 0;
}
