// ByteWriter and ByteReader: little-endian encoding with every array aligned to 8 bytes.
//
// The reader never trusts a length: each read is checked against what is left
// before anything is allocated or dereferenced, and a failed read makes ok()
// false for good, so a decoder may read a whole section and check once. Views
// returned by the reader point into its bytes and live as long as they do.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

namespace persia {

// Fields are copied and arrays used in place: a big-endian host would need another implementation
// of both classes.
static_assert(std::endian::native == std::endian::little, "the wire format is used in place");

// Appends fields and arrays to bytes of its own. Alignment counts from the first byte written, so a
// writer's bytes must be placed at a multiple of 8 in the message, as the first segment or behind a
// padded one. Not thread-safe.
// For headers and small messages: large arrays are sent from where they are, as segments behind the
// writer's bytes (base/method.h).
class ByteWriter {
 public:
  // Allocates this many bytes once, so that appending does not copy the buffer as it grows.
  void Reserve(size_t size) { bytes_.reserve(size); }
  // The bytes of the value, without alignment: the caller orders the fields of a format such that
  // each is aligned by those before it. A struct must have no padding, or uninitialised bytes would
  // be sent.
  template <typename T>
  void Put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    PutBytes(&value, sizeof(T));
  }
  // Any bytes, as they are. For what another encoder has made, such as a train config.
  void PutBytes(const void* data, size_t size) {
    const auto* p = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), p, p + size);
  }
  // Zero bytes up to the next multiple of 8.
  // Padding is zeros, never what the memory held before: messages must not leak it, and equal
  // messages have equal bytes.
  void Align() { bytes_.resize((bytes_.size() + 7) / 8 * 8); }
  // Aligns, then writes the elements (their count is
  // written by the caller, where the format has it).
  // The elements must be trivially copyable and without padding, as for Put(). An empty array takes
  // no byte.
  template <typename T>
  void PutArray(std::span<const T> values) {
    Align();
    PutBytes(values.data(), values.size_bytes());
    Align();
  }
  // Aligns, writes the characters, aligns.
  // The reader must know the length: a format writes it before, usually together with the other
  // counts of its entry.
  void PutString(std::string_view text) {
    Align();
    PutBytes(text.data(), text.size());
    Align();
  }
  // So far, padding included.
  size_t size() const { return bytes_.size(); }
  // Valid until the next byte is written.
  std::span<const std::byte> span() const { return bytes_; }
  // Ends the use of the writer: only its destruction may follow.
  std::vector<std::byte> Release() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

// Reads what a ByteWriter wrote, from bytes that another keeps. Not thread-safe. After the first
// failed read every further one fails as well, and returns zeros and empty arrays: results may be
// used only once ok() has been asked. Reading never allocates.
class ByteReader {
 public:
  // `bytes` must start at a multiple of 8.
  // A Buffer and the body of a frame begin so; BytesArgument of the bindings copies what does not.
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  // Copies, so the position need not be aligned for T.
  template <typename T>
  T Get() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    if (!Require(sizeof(T))) return value;
    std::memcpy(&value, bytes_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return value;
  }
  // Skips padding up to the next multiple of 8.
  void Align() {
    const size_t aligned = (position_ + 7) / 8 * 8;
    if (aligned > bytes_.size()) {
      ok_ = false;
      return;
    }
    position_ = aligned;
  }
  // `count` elements in place; empty when they are not all there.
  // The count is compared with what is left before it is multiplied: a count from the network
  // cannot wrap around. The padding behind the elements must be there as well.
  template <typename T>
  std::span<const T> GetArray(uint64_t count) {
    Align();
    if (!ok_ || count > (bytes_.size() - position_) / sizeof(T)) {
      ok_ = false;
      return {};
    }
    const auto* p = reinterpret_cast<const T*>(bytes_.data() + position_);
    position_ += count * sizeof(T);
    Align();
    return ok_ ? std::span<const T>(p, count) : std::span<const T>();
  }
  // Not checked for UTF-8: names are compared as bytes, and the bindings refuse what is no text.
  std::string_view GetString(size_t length) {
    auto chars = GetArray<char>(length);
    return {chars.data(), chars.size()};
  }
  // False for good after a read past the end.
  bool ok() const { return ok_; }
  // A decoder that has read all fields refuses a message of which something remains: it is of
  // another version, or damaged.
  size_t remaining() const { return bytes_.size() - position_; }

 private:
  // Written so that no sum can overflow: position_ never passes the end.
  bool Require(size_t size) {
    if (!ok_ || size > bytes_.size() - position_) ok_ = false;
    return ok_;
  }

  // Borrowed, like the views that point into them.
  std::span<const std::byte> bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

}  // namespace persia
