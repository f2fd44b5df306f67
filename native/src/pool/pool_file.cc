#include "pool/pool_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

namespace persia::pool {
namespace {

std::string PathOf(const std::string& directory) { return directory + "/rows.pool"; }
std::string PartialPathOf(const std::string& directory) { return directory + "/rows.pool.partial"; }

}  // namespace

Status SystemError(const std::string& what, const std::string& path) {
  const int error = errno;
  return IOError(what, " ", path, ": ", std::strerror(error));
}

Status SyncPath(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC);
  if (fd < 0) return SystemError("cannot open", path);
  const Status status = ::fsync(fd) == 0 ? Status::Ok() : SystemError("cannot sync", path);
  ::close(fd);
  return status;
}

PoolFile::PoolFile(int fd, std::string directory, bool syncs)
    : fd_(fd), directory_(std::move(directory)), path_(PathOf(directory_)), syncs_(syncs) {}

PoolFile::~PoolFile() { ::close(fd_); }

// The lock is taken before the file is emptied: another process may be making the pool just now.
StatusOr<std::unique_ptr<PoolFile>> PoolFile::Create(const std::string& directory, bool syncs) {
  if (::access(PathOf(directory).c_str(), F_OK) == 0) {
    return FailedPrecondition("there is a pool in ", directory, "; open it, or remove ",
                              PathOf(directory), " to begin anew");
  }
  const std::string partial = PartialPathOf(directory);
  const int fd = ::open(partial.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) {
    return errno == ENOENT ? NotFound("no directory ", directory, "; make it, or correct path")
                           : SystemError("cannot create", partial);
  }
  std::unique_ptr<PoolFile> file(new PoolFile(fd, directory, syncs));
  PERSIA_RETURN_IF_ERROR(file->Lock());
  if (::ftruncate(fd, 0) != 0) return SystemError("cannot truncate", partial);
  return file;
}

// A link, not a renaming: that would replace a tier file that another process has created.
Status PoolFile::Publish() {
  const std::string partial = PartialPathOf(directory_);
  if (::fsync(fd_) != 0) return SystemError("cannot sync", partial);
  if (::link(partial.c_str(), path_.c_str()) != 0) return SystemError("cannot create", path_);
  if (::unlink(partial.c_str()) != 0) return SystemError("cannot remove", partial);
  return SyncPath(directory_, O_RDONLY | O_DIRECTORY);
}

StatusOr<std::unique_ptr<PoolFile>> PoolFile::Open(const std::string& directory, Access access,
                                                   bool syncs) {
  const std::string path = PathOf(directory);
  const int mode = access == Access::kReadOnly ? O_RDONLY : O_RDWR;
  const int fd = ::open(path.c_str(), mode | O_CLOEXEC);
  if (fd < 0) {
    return errno == ENOENT
               ? NotFound("no pool in ", directory, ": there is no ", path, "; create one")
               : SystemError("cannot open", path);
  }
  std::unique_ptr<PoolFile> file(new PoolFile(fd, directory, syncs));
  if (access == Access::kExclusive) PERSIA_RETURN_IF_ERROR(file->Lock());
  struct stat stat;
  if (::fstat(fd, &stat) != 0) return SystemError("cannot stat", path);
  file->size_ = static_cast<uint64_t>(stat.st_size);
  return file;
}

// flock() and not fcntl(): it is bound to this opening of the file, so that a second pool object of
// the same process is refused as well, and no close() elsewhere releases it.
Status PoolFile::Lock() const {
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) return Status::Ok();
  if (errno != EWOULDBLOCK) return SystemError("cannot lock", path_);
  return Unavailable("pool ", path_,
                     " is in use; stop the server that has it, or give each its own directory");
}

// A read may return less than was asked for; 0 bytes are the end of the file.
Status PoolFile::Read(uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("cannot read", path_);
    if (count == 0) {
      return Corruption("pool ", path_, " ends before byte ", offset,
                        "; it was cut short: remove it and load a checkpoint");
    }
    out = out.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
  return Status::Ok();
}

Status PoolFile::Write(uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("cannot write", path_);
    bytes = bytes.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
  return Status::Ok();
}

// fdatasync() also writes the file's size, which finding the rows again needs.
Status PoolFile::Sync() {
  if (syncs_ && ::fdatasync(fd_) != 0) return SystemError("cannot sync", path_);
  return Status::Ok();
}

// What the page cache has costs what Read() does; the rest is asked for before the first of it is
// waited for.
Status PoolFile::ReadMany(std::span<const ReadPiece> pieces) const {
  // RWF_NOWAIT fails where the page cache lacks a page; then the device is asked, and not waited
  // for yet.
  std::vector<const ReadPiece*> waited_for;
  for (const ReadPiece& piece : pieces) {
    const iovec out = {piece.out.data(), piece.out.size()};
    const auto offset = static_cast<off_t>(piece.offset);
    const auto size = static_cast<off_t>(piece.out.size());
    if (::preadv2(fd_, &out, 1, offset, RWF_NOWAIT) == size) continue;
    static_cast<void>(::posix_fadvise(fd_, offset, size, POSIX_FADV_WILLNEED));
    waited_for.push_back(&piece);
  }
  for (const ReadPiece* piece : waited_for) {
    PERSIA_RETURN_IF_ERROR(Read(piece->offset, piece->out));
  }
  return Status::Ok();
}

// Else the system reads ahead around each row, and a page cache full of neighbours is what remains.
void PoolFile::ExpectRandomReads() {
  static_cast<void>(::posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM));
}

// Allocated, not only extended: a full disk is then an error here and none later, when rows are
// written, where a mapped one would kill the process.
Status PoolFile::Grow(uint64_t size) {
  const uint64_t old_size = size_;
  const int error =
      ::posix_fallocate(fd_, static_cast<off_t>(old_size), static_cast<off_t>(size - old_size));
  if (error == ENOSPC || error == EFBIG || error == EDQUOT) {
    return ResourceExhausted("no room on the device for pool ", path_, " to grow to ", size,
                             " bytes: ", std::strerror(error));
  }
  if (error != 0) {
    errno = error;
    return SystemError("cannot grow", path_);
  }
  size_ = size;
  return Status::Ok();
}

}  // namespace persia::pool
