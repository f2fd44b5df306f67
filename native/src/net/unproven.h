// The connections of a server whose clients have proved nothing yet, by the clients' hosts. Private
// to net/. Not thread-safe.
//
// A client of the job proves itself within a round trip, so the oldest connection is a stranger's.
// A full server closes one of the host that has the most, if that host has more than a machine of
// the job would. So many connections of other hosts do not close the only one of a host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

namespace persia::net {

class UnprovenConnections {
 public:
  // Tags grow with time.
  void Add(uint64_t tag, const std::string& host);
  // Does nothing where `tag` is not here.
  void Remove(uint64_t tag);
  size_t size() const { return hosts_.size(); }
  size_t CountOf(const std::string& host) const;
  // None where the host has none.
  std::optional<uint64_t> OldestOf(const std::string& host) const;
  // The oldest one of the host that has the most, and more than eight; otherwise the oldest of all.
  std::optional<uint64_t> FirstToClose() const;

 private:
  std::unordered_map<uint64_t, std::string> hosts_;           // by tag
  std::unordered_map<std::string, std::set<uint64_t>> tags_;  // by host; none is empty
};

}  // namespace persia::net
