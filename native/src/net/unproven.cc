#include "net/unproven.h"

#include <algorithm>

namespace persia::net {
namespace {

// A machine of the job may connect with all its processes at once.
constexpr size_t kOrdinary = 8;

}  // namespace

void UnprovenConnections::Add(uint64_t tag, const std::string& host) {
  hosts_[tag] = host;
  tags_[host].insert(tag);
}

void UnprovenConnections::Remove(uint64_t tag) {
  const auto node = hosts_.extract(tag);
  if (node.empty()) return;
  const auto of_host = tags_.find(node.mapped());
  of_host->second.erase(tag);
  if (of_host->second.empty()) tags_.erase(of_host);
}

size_t UnprovenConnections::CountOf(const std::string& host) const {
  const auto found = tags_.find(host);
  return found == tags_.end() ? 0 : found->second.size();
}

std::optional<uint64_t> UnprovenConnections::OldestOf(const std::string& host) const {
  const auto found = tags_.find(host);
  if (found == tags_.end()) return std::nullopt;
  return *found->second.begin();
}

std::optional<uint64_t> UnprovenConnections::FirstToClose() const {
  const auto most = std::max_element(tags_.begin(), tags_.end(), [](const auto& a, const auto& b) {
    if (a.second.size() != b.second.size()) return a.second.size() < b.second.size();
    return *a.second.begin() > *b.second.begin();
  });
  if (most == tags_.end()) return std::nullopt;
  if (most->second.size() > kOrdinary) return *most->second.begin();
  const auto oldest = std::min_element(
      hosts_.begin(), hosts_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return oldest->first;
}

}  // namespace persia::net
