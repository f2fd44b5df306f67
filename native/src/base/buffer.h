// Buffer: the bytes of one message, 64-byte aligned, movable, uninitialised until written.
//
// Messages are read from the network straight into a Buffer and their arrays are used where they
// lie, so alignment is a contract: data() is aligned to 64 bytes and every array inside a message
// starts at a multiple of 8 (see base/bytes.h and docs/wire_format.md). Not thread-safe; move it,
// do not share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <utility>

namespace persia {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size_bytes) : data_(Allocate(size_bytes)), size_(size_bytes) {}
  // What is moved from is empty: its size must not outlive its bytes.
  Buffer(Buffer&& other) noexcept
      : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    data_ = std::move(other.data_);
    size_ = std::exchange(other.size_, 0);
    return *this;
  }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }
  std::span<std::byte> span() { return {data_.get(), size_}; }
  std::span<const std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  static std::unique_ptr<std::byte, Free> Allocate(size_t size_bytes) {
    if (size_bytes == 0) return nullptr;
    const size_t rounded = (size_bytes + 63) / 64 * 64;
    auto* p = static_cast<std::byte*>(std::aligned_alloc(64, rounded));
    if (p == nullptr) std::abort();  // out of memory: nothing sensible is left to do
    return std::unique_ptr<std::byte, Free>(p);
  }

  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0;
};

}  // namespace persia
