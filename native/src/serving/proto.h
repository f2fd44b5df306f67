// Fields of a protobuf message, as they are encoded. A group, which no message of ours has, is
// skipped, as Python's reader does: what follows it is read there too, and so counted here. Of
// anything that does not fit its bytes, reading fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

namespace persia::serving {

// Bounds-checked; views point into the message. Not thread-safe.
class ProtoReader {
 public:
  enum Wire : uint8_t {
    kVarint = 0,
    kFixed64 = 1,
    kBytes = 2,
    kGroup = 3,
    kGroupEnd = 4,
    kFixed32 = 5
  };
  struct Field {
    uint32_t number = 0;
    Wire wire = kVarint;
    uint64_t value = 0;                // of a varint
    std::span<const std::byte> bytes;  // of a message, text or packed numbers

    bool Is(uint32_t wanted, Wire kind) const { return number == wanted && wire == kind; }
    std::string_view text() const {
      return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    }
  };

  explicit ProtoReader(std::span<const std::byte> message) : rest_(message) {}

  // False at the end of the message, and for good once something is wrong.
  bool Next(Field* field) {
    if (rest_.empty() || !ok_) return false;
    const uint64_t tag = Varint();
    constexpr uint64_t kMaxTag = (uint64_t{1} << 32) - 1;
    *field = Field();
    field->number = static_cast<uint32_t>(tag >> 3);
    field->wire = static_cast<Wire>(tag & 7);
    ok_ = ok_ && tag <= kMaxTag && field->number != 0;
    if (field->wire == kGroup) {
      SkipGroup();
    } else {
      ReadValue(field);
    }
    return ok_;
  }
  // For packed numbers: call until empty() or !ok().
  uint64_t Varint() {
    uint64_t value = 0;
    for (uint32_t shift = 0; shift < 64; shift += 7) {
      if (rest_.empty()) break;
      const auto byte = std::to_integer<uint64_t>(rest_.front());
      rest_ = rest_.subspan(1);
      value |= (byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    ok_ = false;
    return 0;
  }
  bool empty() const { return rest_.empty(); }
  bool ok() const { return ok_; }

 private:
  void ReadValue(Field* field) {
    switch (field->wire) {
      case kVarint: field->value = Varint(); break;
      case kFixed64: field->bytes = Take(8); break;
      case kBytes: field->bytes = Take(Varint()); break;
      case kFixed32: field->bytes = Take(4); break;
      default: ok_ = false;
    }
  }
  // With the groups in it.
  void SkipGroup() {
    for (uint64_t depth = 1; depth > 0 && ok_;) {
      Field field;
      field.wire = static_cast<Wire>(Varint() & 7);
      if (field.wire == kGroup) {
        ++depth;
      } else if (field.wire == kGroupEnd) {
        --depth;
      } else {
        ReadValue(&field);
      }
    }
  }
  std::span<const std::byte> Take(uint64_t size) {
    if (!ok_ || size > rest_.size()) {
      ok_ = false;
      return {};
    }
    const auto taken = rest_.first(size);
    rest_ = rest_.subspan(size);
    return taken;
  }

  std::span<const std::byte> rest_;
  bool ok_ = true;
};

// Appends fields to `out`.
class ProtoWriter {
 public:
  explicit ProtoWriter(std::string* out) : out_(*out) {}

  void Varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) out_.push_back(static_cast<char>(value | 0x80));
    out_.push_back(static_cast<char>(value));
  }
  void Number(uint32_t field, uint64_t value) {
    Varint(field << 3 | ProtoReader::kVarint);
    Varint(value);
  }
  // Text, bytes or a message.
  void Bytes(uint32_t field, std::string_view bytes) {
    Head(field, bytes.size());
    out_.append(bytes);
  }
  // Whose `size` bytes the caller appends.
  void Head(uint32_t field, size_t size) {
    Varint(field << 3 | ProtoReader::kBytes);
    Varint(size);
  }

 private:
  std::string& out_;
};

}  // namespace persia::serving
