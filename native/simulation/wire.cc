#include "wire.h"

#include <algorithm>

#include "base/row_protocol.h"

namespace persia::simulation {
namespace {

// As ClientConnection and Connection of net/, which hear nothing of the other end for so long.
constexpr Time kSilence = 4'000'000'000;
constexpr Time kRepeat = 100'000'000;  // of bytes that got no answer
std::unique_ptr<Wire> wire;

}  // namespace

Wire& Wire::Get() {
  if (wire == nullptr) wire = std::make_unique<Wire>();
  return *wire;
}

void ResetWire() { wire = std::make_unique<Wire>(); }

void Wire::Cut(int host, int other, bool is_cut) {
  const auto link = std::minmax(host, other);
  if (is_cut) {
    cuts_.insert(link);
  } else {
    cuts_.erase(link);
  }
}

bool Wire::IsCut(int process, int other) const {
  World& world = World::Get();
  return cuts_.contains(std::minmax(world.process(process).host, world.process(other).host));
}

Time Wire::Latency() {
  World& world = World::Get();
  if (world.Chance(weather.spikes)) return world.Between(weather.max_latency, weather.max_spike);
  return world.Between(weather.min_latency, weather.max_latency);
}

void Wire::Connect(int process, const std::string& address, OnConnected done) {
  World& world = World::Get();
  const Time begin = world.now();
  world.At(begin + Latency(), [this, process, address, begin, done = std::move(done)] {
    Reach(process, address, begin, done);
  });
}

// The system of the other host answers, also for a process that is frozen.
void Wire::Reach(int process, const std::string& address, Time begin, const OnConnected& done) {
  World& world = World::Get();
  const auto finish = [&](ConnectionPtr connection, const std::string& refusal) {
    world.AtProcess(process, world.now() + Latency(),
                    [done, connection, refusal] { done(connection, refusal); });
  };
  const auto found = listeners.find(address);
  if (found == listeners.end()) return finish(nullptr, "connection refused");
  if (IsCut(process, found->second.process)) {
    if (world.now() - begin > kSilence) return finish(nullptr, "no answer");
    return world.At(world.now() + kRepeat, [this, process, address, begin, done] {
      Reach(process, address, begin, done);
    });
  }
  auto connection = std::make_shared<Connection>();
  connection->ends[0].process = process;
  connection->ends[1].process = found->second.process;
  connection->server = found->second.server;
  connections_.push_back(connection);
  finish(connection, "");
}

void Wire::Send(const ConnectionPtr& connection, int from, std::function<void()> arrive) {
  if (!connection->is_open) return;
  World& world = World::Get();
  Connection::End& end = connection->ends[1 - from];
  end.last_arrival = std::max(end.last_arrival + 1, world.now() + Latency());
  world.At(end.last_arrival, [this, connection, from, sent_at = world.now(), arrive] {
    Arrive(connection, from, sent_at, arrive);
  });
}

void Wire::Arrive(const ConnectionPtr& connection, int from, Time sent_at,
                  std::function<void()> arrive) {
  if (!connection->is_open) return;
  World& world = World::Get();
  const auto& ends = connection->ends;
  if (IsCut(ends[0].process, ends[1].process)) {
    if (world.now() - sent_at > kSilence) return Break(connection, -1);
    // Nothing overtakes it: what was sent later waits as well.
    connection->ends[1 - from].last_arrival =
        std::max(connection->ends[1 - from].last_arrival, world.now() + kRepeat);
    return world.At(world.now() + kRepeat, [this, connection, from, sent_at, arrive] {
      Arrive(connection, from, sent_at, arrive);
    });
  }
  if (world.Chance(weather.breaks)) {
    const bool is_lost = world.Chance(0.5);
    if (!is_lost) world.AtProcess(ends[1 - from].process, world.now(), arrive);
    return Break(connection, -1);
  }
  // A process that is frozen reads it later, even if the connection is closed by then.
  world.AtProcess(ends[1 - from].process, world.now(), std::move(arrive));
}

void Wire::Break(const ConnectionPtr& connection, int from) {
  if (!connection->is_open) return;
  connection->is_open = false;
  std::erase(connections_, connection);
  World& world = World::Get();
  for (int end = 0; end < 2; ++end) {
    auto told = std::exchange(connection->ends[end].on_broken, nullptr);
    if (end == from || told == nullptr) continue;
    // An end that the other one does not reach finds out after a while.
    const bool is_cut = IsCut(connection->ends[0].process, connection->ends[1].process);
    const Time after = is_cut ? kSilence : Latency();
    world.AtProcess(connection->ends[end].process, world.now() + after, std::move(told));
  }
}

void Wire::OnKilled(int process) {
  std::erase_if(listeners, [&](const auto& entry) { return entry.second.process == process; });
  const std::vector<ConnectionPtr> connections = connections_;
  for (const ConnectionPtr& connection : connections) {
    for (int end = 0; end < 2; ++end) {
      if (connection->ends[end].process == process) Break(connection, end);
    }
  }
}

void Wire::OnStopped(const net::Server* server) {
  std::erase_if(listeners, [&](const auto& entry) { return entry.second.server == server; });
  const std::vector<ConnectionPtr> connections = connections_;
  for (const ConnectionPtr& connection : connections) {
    if (connection->server == server) Break(connection, 1);
  }
}

void Wire::NoteAnswer(int process, uint8_t method) {
  const auto found = servers.find(process);
  // The others wait for the standby, and may so be answered after it has taken over.
  const bool is_read = method == kCountRows.number || method == kPrefetchRows.number;
  if (found == servers.end() || !is_read) return;
  const auto [index, incarnation] = found->second;
  auto& answered = answered_[index];
  if (!answered.empty() && answered.back() == incarnation) return;
  if (std::find(answered.begin(), answered.end(), incarnation) != answered.end()) {
    violation = "two primaries: a parameter server of index " + std::to_string(index) +
                " answered a read after another one had answered in its place";
  }
  answered.push_back(incarnation);
}

}  // namespace persia::simulation
