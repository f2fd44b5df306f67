#include "base/mapped_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <mutex>
#include <span>
#include <string>

#include "base/kept_memory.h"

namespace persia {
namespace {

// The whole pages among some bytes.
struct Pages {
  Pages(std::byte* bytes, size_t num_bytes) {
    constexpr uintptr_t kPage = MappedMemory::kPageBytes;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(bytes) + kPage - 1) / kPage * kPage;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(bytes) + num_bytes) / kPage * kPage;
    data = reinterpret_cast<void*>(first);
    size = std::max(first, end) - first;
  }
  void* data;
  size_t size;
};

using Memory = std::span<std::byte>;

// Freed memory that waits to be allocated again.
class KeptMemory {
 public:
  // Never destroyed: stores may end after static objects.
  static KeptMemory& Get() {
    static auto* kept = new KeptMemory();
    return *kept;
  }

  void Enable() { is_enabled_ = true; }

  // False: the caller unmaps it.
  bool Put(Memory memory) {
    if (!is_enabled_) return false;
    const std::lock_guard lock(mutex_);
    kept_.push_back(memory);
    num_bytes_ += memory.size();
    return true;
  }

  // Zeroed; null where nothing of that size is kept.
  std::byte* Take(size_t size) {
    if (!is_enabled_) return nullptr;
    std::byte* data = Find(size);
    if (data != nullptr) std::memset(data, 0, size);
    return data;
  }

  size_t num_bytes() {
    const std::lock_guard lock(mutex_);
    return num_bytes_;
  }

 private:
  std::byte* Find(size_t size) {
    const std::lock_guard lock(mutex_);
    // From the newest on: of many blocks nearly all have one size.
    const auto found = std::find_if(kept_.rbegin(), kept_.rend(),
                                    [&](Memory memory) { return memory.size() == size; });
    if (found != kept_.rend()) {
      std::byte* data = found->data();
      kept_.erase(std::next(found).base());
      num_bytes_ -= size;
      return data;
    }
    for (size_t unmapped = 0; unmapped < size && !kept_.empty(); kept_.pop_front()) {
      const Memory oldest = kept_.front();
      munmap(oldest.data(), oldest.size());
      unmapped += oldest.size();
      num_bytes_ -= oldest.size();
    }
    return nullptr;
  }

  std::atomic<bool> is_enabled_ = false;
  std::mutex mutex_;
  std::deque<Memory> kept_;
  size_t num_bytes_ = 0;
};

std::byte* MapPages(size_t size, int flags) {
  flags |= MAP_PRIVATE | MAP_ANONYMOUS;
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

// mmap aligns to small pages only: map more than is needed and give back both ends.
std::byte* MapAligned(size_t size, size_t alignment, int flags) {
  std::byte* data = MapPages(size + alignment, flags);
  if (data == nullptr) return nullptr;
  const size_t past = reinterpret_cast<uintptr_t>(data) % alignment;
  const size_t head = past == 0 ? 0 : alignment - past;
  if (head > 0) munmap(data, head);
  if (head < alignment) munmap(data + head + size, alignment - head);
  return data + head;
}

}  // namespace

MappedMemory MappedMemory::Allocate(size_t size) { return Map(size, 0); }

MappedMemory MappedMemory::AllocateSparse(size_t size) { return Map(size, MAP_NORESERVE); }

MappedMemory MappedMemory::Map(size_t size, int flags) {
  size = (size + kPageBytes - 1) / kPageBytes * kPageBytes;
  const bool huge = size >= kHugePageBytes;
  std::byte* data = huge && flags == 0 ? KeptMemory::Get().Take(size) : nullptr;
  if (data == nullptr) {
    data = huge ? MapAligned(size, kHugePageBytes, flags) : MapPages(size, flags);
  }
  if (data == nullptr) return {};
  // Advice only: where the system refuses, small pages do.
  if (huge) madvise(data, size, MADV_HUGEPAGE);
  return {data, size};
}

MappedMemory::~MappedMemory() {
  if (data_ == nullptr) return;
  if (size_ >= kHugePageBytes && KeptMemory::Get().Put({data_, size_})) return;
  munmap(data_, size_);
}

void KeepFreedMemory() { KeptMemory::Get().Enable(); }

size_t KeptMemoryBytes() { return KeptMemory::Get().num_bytes(); }

bool AllowsHugePages(const char* setting_file) {
  std::ifstream file(setting_file);
  std::string setting;
  std::getline(file, setting);
  return setting.find("[never]") == std::string::npos;
}

size_t ReleasePages(std::byte* data, size_t size) {
  const Pages pages(data, size);
  // Or a huge page around it would be made whole again.
  madvise(pages.data, pages.size, MADV_NOHUGEPAGE);
  return madvise(pages.data, pages.size, MADV_DONTNEED) == 0 ? pages.size : 0;
}

// All that follows is advice: where the system refuses, pages stay as they are.

void UseSmallPages(const MappedMemory& memory) {
  madvise(memory.data(), memory.size(), MADV_NOHUGEPAGE);
}

void UseHugePages(std::byte* data, size_t size) {
  const Pages pages(data, size);
  madvise(pages.data, pages.size, MADV_HUGEPAGE);
}

void MoveToHugePages(const MappedMemory& memory) {
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1; older headers lack it
  madvise(memory.data(), memory.size(), MADV_HUGEPAGE);
  // Which does not ask for the system's setting.
  static const bool allowed = AllowsHugePages("/sys/kernel/mm/transparent_hugepage/enabled");
  if (allowed) madvise(memory.data(), memory.size(), kCollapse);
}

}  // namespace persia
