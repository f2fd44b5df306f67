// CallBytes: how many bytes of messages one call holds, of those that the server holds in all.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace persia::serving {

// Of all calls. Thread-safe.
using HeldBytes = std::atomic<uint64_t>;

// Shared by what holds a message of the call or its content, wherever that waits; the last one
// releases the bytes. Add and Release: on the server's thread alone.
class CallBytes {
 public:
  explicit CallBytes(std::shared_ptr<HeldBytes> all) : all_(std::move(all)) {}
  CallBytes(const CallBytes&) = delete;
  ~CallBytes() { *all_ -= own_; }

  void Add(uint64_t size) {
    own_ += size;
    *all_ += size;
  }
  void Release(uint64_t size) {
    own_ -= size;
    *all_ -= size;
  }

 private:
  const std::shared_ptr<HeldBytes> all_;
  uint64_t own_ = 0;
};

}  // namespace persia::serving
