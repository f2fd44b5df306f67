// The network of a World: connections between processes, each an ordered stream in both directions
// that may be slow, break, or be cut.
//
// Sent bytes of a connection that breaks may have arrived or not. While the link between two hosts
// is cut, bytes wait, as the system repeats them; after some seconds without an answer the
// connection breaks, as net/ closes it.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "world.h"

namespace persia::net {
class Server;
}

namespace persia::simulation {

struct Connection {
  struct End {
    int process = 0;
    std::function<void()> on_broken;  // told once, unless this end has closed it
    Time last_arrival = 0;
  };
  std::array<End, 2> ends;  // of the client, of the server
  bool is_open = true;
  net::Server* server = nullptr;
};
using ConnectionPtr = std::shared_ptr<Connection>;

// What the network does to messages; set for each seed.
struct Weather {
  Time min_latency = 50'000;
  Time max_latency = 2'000'000;
  double spikes = 0;  // share of messages that take up to max_spike
  Time max_spike = 400'000'000;
  double breaks = 0;  // share of messages at which the connection breaks
};

class Wire {
 public:
  static Wire& Get();

  Weather weather;
  // A server of a process that listens at "host:port".
  struct Listener {
    net::Server* server;
    int process;
  };
  std::map<std::string, Listener> listeners;
  uint16_t next_port = 10'000;

  void Cut(int host, int other, bool is_cut);
  bool IsCut(int process, int other) const;
  Time Latency();

  // Calls back with the connection, or with null and a reason.
  using OnConnected = std::function<void(ConnectionPtr, const std::string& refusal)>;
  void Connect(int process, const std::string& address, OnConnected done);
  // `arrive` runs as the process at the other end.
  void Send(const ConnectionPtr& connection, int from, std::function<void()> arrive);
  // By `from`, or by the network (-1): the other end, or both, hear of it.
  void Break(const ConnectionPtr& connection, int from);
  // Ends the connections and the listeners of a process that was killed.
  void OnKilled(int process);
  // The same for a server of a process that lives.
  void OnStopped(const net::Server* server);

  // Which parameter server of an index has answered about rows: one that another has followed must
  // not answer again.
  void NoteAnswer(int process, uint8_t method);
  std::map<int, std::pair<int, uint64_t>> servers;  // index and incarnation, by process
  std::string violation;

 private:
  void Reach(int process, const std::string& address, Time begin, const OnConnected& done);
  void Arrive(const ConnectionPtr& connection, int from, Time sent_at,
              std::function<void()> arrive);

  std::set<std::pair<int, int>> cuts_;
  std::vector<ConnectionPtr> connections_;         // not by address, which no seed decides
  std::map<int, std::vector<uint64_t>> answered_;  // incarnations by index, the last one answers
};

void ResetWire();

}  // namespace persia::simulation
