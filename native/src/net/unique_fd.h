// UniqueFd: a file descriptor and the duty to close it. Private to net/.
#pragma once

#include <unistd.h>

#include <utility>

namespace persia::net {

// Move-only. -1 stands for no descriptor. Closing is the last thing that happens to a socket: as
// long as a thread may use the number, it must not be given to another file.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }

  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

}  // namespace persia::net
