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

static_assert(std::endian::native == std::endian::little, "the wire format is used in place");

class ByteWriter {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    PutBytes(&value, sizeof(T));
  }
  void PutBytes(const void* data, size_t size) {
    const auto* p = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), p, p + size);
  }
  // Zero bytes up to the next multiple of 8.
  void Align() { bytes_.resize((bytes_.size() + 7) / 8 * 8); }
  // Aligns, then writes the elements (their count is
  // written by the caller, where the format has it).
  template <typename T>
  void PutArray(std::span<const T> values) {
    Align();
    PutBytes(values.data(), values.size_bytes());
    Align();
  }
  // Aligns, writes the characters, aligns.
  void PutString(std::string_view text) {
    Align();
    PutBytes(text.data(), text.size());
    Align();
  }
  size_t size() const { return bytes_.size(); }
  std::span<const std::byte> span() const { return bytes_; }
  std::vector<std::byte> Release() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class ByteReader {
 public:
  // `bytes` must start at a multiple of 8.
  explicit ByteReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

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
  std::string_view GetString(size_t length) {
    auto chars = GetArray<char>(length);
    return {chars.data(), chars.size()};
  }
  bool ok() const { return ok_; }
  size_t remaining() const { return bytes_.size() - position_; }

 private:
  bool Require(size_t size) {
    if (!ok_ || size > bytes_.size() - position_) ok_ = false;
    return ok_;
  }

  std::span<const std::byte> bytes_;
  size_t position_ = 0;
  bool ok_ = true;
};

}  // namespace persia
