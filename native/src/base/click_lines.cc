#include "base/click_lines.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <system_error>
#include <utility>

#include "base/string_hash.h"

namespace persia {
namespace {

constexpr size_t kShownChars = 40;

// What a message can show of a field: its begin, in quotes, as ASCII.
std::string Quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text.substr(0, kShownChars)) quoted += c >= ' ' && c <= '~' ? c : '?';
  return quoted + "'";
}

std::string_view WithoutSpaces(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

// Nothing where it is no integer of 64 bits.
std::optional<int64_t> Integer(std::string_view text) {
  text = WithoutSpaces(text);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

uint64_t CategoryId(std::string_view text) {
  if (text.empty()) return 0;
  const uint64_t hash = StringHash(text);
  return hash > 1 ? hash : hash + 2;
}

// Cuts lines into fields, and writes those of good lines into columns of `stride` values.
// Columns are sized before by the number of lines, so that a value is written once and in its
// place. Bad lines leave the end of each column unused; Finish() closes the gaps.
class Parser {
 public:
  Parser(size_t num_numbers, size_t num_categories, size_t stride)
      : num_numbers_(num_numbers), num_categories_(num_categories), stride_(stride) {
    lines_.labels.resize(stride);
    lines_.numbers.resize(num_numbers * stride);
    lines_.ids.resize(num_categories * stride);
  }

  void Add(std::string_view line) {
    ++lines_.num_lines;
    const std::string reason = Read(line);
    if (reason.empty()) {
      ++num_good_;
    } else if (++lines_.num_bad <= ClickLines::kMaxNamed) {
      lines_.bad.push_back({lines_.num_lines, reason});
    }
  }

  // Columns move together where bad lines have left room.
  ClickLines Finish() {
    Join(&lines_.numbers, num_numbers_);
    Join(&lines_.ids, num_categories_);
    lines_.labels.resize(num_good_);
    return std::move(lines_);
  }

 private:
  // What is wrong with the line, or nothing. The next line writes over what a bad one has written.
  std::string Read(std::string_view line) {
    const size_t num_fields = 1 + num_numbers_ + num_categories_;
    // Too short to be good, and perhaps behind the end of the columns.
    if (line.size() < num_fields) return WrongFields(NumFields(line));
    std::string reason;
    size_t index = 0;
    const char* begin = line.data();
    const char* const end = begin + line.size();
    while (true) {
      const char* tab = begin;
      while (tab != end && *tab != '\t') ++tab;
      const std::string_view field(begin, static_cast<size_t>(tab - begin));
      if (index > num_numbers_ && index < num_fields) {
        lines_.ids[(index - 1 - num_numbers_) * stride_ + num_good_] = CategoryId(field);
      } else if (index <= num_numbers_ && reason.empty()) {
        reason = ReadNumber(index, field);
      }
      ++index;
      if (tab == end) break;
      begin = tab + 1;
    }
    return index == num_fields ? reason : WrongFields(index);
  }

  static size_t NumFields(std::string_view line) {
    return 1 + static_cast<size_t>(std::count(line.begin(), line.end(), '\t'));
  }

  std::string WrongFields(size_t count) const {
    return "it has " + std::to_string(count) + " fields, must have " +
           std::to_string(1 + num_numbers_ + num_categories_);
  }

  std::string ReadNumber(size_t index, std::string_view field) {
    const std::optional<int64_t> value = Integer(field);
    if (!value.has_value() && !field.empty()) {
      return (index == 0 ? "label" : "num_" + std::to_string(index - 1)) + " is " + Quoted(field) +
             ", must be an integer";
    }
    if (index > 0) {
      lines_.numbers[(index - 1) * stride_ + num_good_] = value.value_or(0);
    } else if (value == 0 || value == 1) {
      lines_.labels[num_good_] = static_cast<uint8_t>(*value);
    } else {
      return "the label is " + (field.empty() ? "empty" : std::to_string(*value)) +
             ", must be 0 or 1";
    }
    return {};
  }

  template <typename T>
  void Join(std::vector<T>* columns, size_t num_columns) const {
    for (size_t column = 1; num_good_ < stride_ && column < num_columns; ++column) {
      const auto begin = columns->begin() + static_cast<ptrdiff_t>(column * stride_);
      std::copy_n(begin, num_good_, columns->begin() + static_cast<ptrdiff_t>(column * num_good_));
    }
    columns->resize(num_columns * num_good_);
  }

  const size_t num_numbers_, num_categories_, stride_;
  size_t num_good_ = 0;
  ClickLines lines_;
};

}  // namespace

ClickLines ParseClickLines(std::string_view text, size_t num_numbers, size_t num_categories) {
  const auto num_ends = static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  // A good line has a digit for its label, and its tabs: short ones need no room in the columns.
  const size_t most = text.size() / (1 + num_numbers + num_categories);
  Parser parser(num_numbers, num_categories, std::min(num_ends + 1, most));
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.ends_with('\r')) line.remove_suffix(1);
    parser.Add(line);
  }
  return parser.Finish();
}

}  // namespace persia
