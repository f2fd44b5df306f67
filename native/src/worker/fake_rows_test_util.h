// FakeRows: parameter servers that are maps in this process.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "worker/worker_test_util.h"

namespace persia::worker {

inline Deadline InAMinute() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

// Servers whose rows begin as RowElement() and lose each gradient as it is (a learning rate of 1).
// Like the real ones they need a configuration for training and apply an update's key once.
class FakeRows : public RowService {
 public:
  explicit FakeRows(uint32_t num_servers) : servers_(num_servers) {
    for (uint32_t i = 0; i < num_servers; ++i) servers_[i].incarnation = 100 + i;
  }

  Placement placement() const override { return static_cast<uint32_t>(servers_.size()); }

  Status Configure(const TrainConfig& config, bool replace, Deadline) override {
    const std::lock_guard lock(mutex_);
    ++num_configures;
    for (Server& server : servers_) {
      if (server.config.has_value() && *server.config != config && !replace) {
        return FailedPrecondition("configured differently");
      }
      server.config = config;
    }
    return Status::Ok();
  }

  StatusOr<std::vector<ServerRows>> Lookup(const Placement&, std::span<const ServerBlocks> requests,
                                           bool train, Deadline) override {
    if (before_lookup) before_lookup();
    const std::lock_guard lock(mutex_);
    std::vector<ServerRows> answers(servers_.size());
    for (size_t i = 0; i < servers_.size(); ++i) {
      if (requests[i].signs.empty()) continue;
      if (train && !servers_[i].config.has_value()) return FailedPrecondition("not configured");
      answers[i] = Read(servers_[i], requests[i], train);
    }
    return answers;
  }

  StatusOr<std::vector<UpdateResult>> Update(const Placement&,
                                             std::span<const UpdateRowsRequest> updates,
                                             Deadline) override {
    const std::lock_guard lock(mutex_);
    std::vector<UpdateResult> results(servers_.size());
    for (size_t i = 0; i < servers_.size(); ++i) {
      if (updates[i].blocks.signs.empty()) continue;
      if (failing_server == static_cast<int>(i)) return Unavailable("server is away");
      if (!servers_[i].config.has_value()) return FailedPrecondition("not configured");
      const auto [answer, first] = servers_[i].answers.try_emplace(
          {updates[i].key.worker_incarnation, updates[i].key.reference});
      if (first) answer->second = Apply(servers_[i], updates[i]);
      results[i] = answer->second;
    }
    return results;
  }

  Status SetRows(const Placement&, std::span<const SetRowsRequest> requests, Deadline) override {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < servers_.size(); ++i) {
      if (requests[i].blocks.signs.empty()) continue;
      if (!servers_[i].config.has_value()) return FailedPrecondition("not configured");
      const float* next = requests[i].rows.data();
      ForEach(requests[i].blocks, [&](uint64_t sign, uint32_t dim) {
        servers_[i].rows[sign].assign(next, next + dim);
        next += dim;
      });
    }
    return Status::Ok();
  }

  Status Clear(Deadline) override {
    const std::lock_guard lock(mutex_);
    for (Server& server : servers_) server.rows.clear();
    return Status::Ok();
  }

  StatusOr<std::vector<uint64_t>> Sizes(Deadline) override {
    const std::lock_guard lock(mutex_);
    std::vector<uint64_t> sizes;
    for (const Server& server : servers_) sizes.push_back(server.rows.size());
    return sizes;
  }

  // It forgets everything and returns.
  void Restart(size_t server) {
    const std::lock_guard lock(mutex_);
    Server fresh;
    fresh.incarnation = servers_[server].incarnation + 1000;
    servers_[server] = std::move(fresh);
  }
  // Empty: there is no such row.
  std::vector<float> Row(uint64_t sign) {
    const std::lock_guard lock(mutex_);
    const auto& rows = servers_[placement().ServerOf(SignHash(sign))].rows;
    const auto found = rows.find(sign);
    return found == rows.end() ? std::vector<float>() : found->second;
  }
  size_t num_rows() {
    const std::lock_guard lock(mutex_);
    size_t sum = 0;
    for (const Server& server : servers_) sum += server.rows.size();
    return sum;
  }

  std::function<void()> before_lookup;  // set before the worker is used
  int failing_server = -1;              // for updates; changed while nothing runs
  int num_configures = 0;

 private:
  struct Server {
    uint64_t incarnation = 0;
    uint64_t num_updates = 0;
    std::optional<TrainConfig> config;
    std::map<uint64_t, std::vector<float>> rows;
    std::map<std::pair<uint64_t, uint64_t>, UpdateResult> answers;  // by key
  };

  template <typename Call>
  static void ForEach(const SignBlocks& request, Call call) {
    size_t sign = 0;
    for (const auto& block : request.blocks) {
      for (uint32_t i = 0; i < block.num_signs; ++i) call(request.signs[sign++], block.dim);
    }
  }

  static ServerRows Read(Server& server, const ServerBlocks& request, bool train) {
    ServerRows answer;
    answer.storage = Buffer(request.num_floats() * sizeof(float));
    auto* next = reinterpret_cast<float*>(answer.storage.data());
    answer.rows = {next, request.num_floats()};
    answer.stamp = {server.incarnation, server.num_updates};
    ForEach(request.view(), [&](uint64_t sign, uint32_t dim) {
      const auto found = server.rows.find(sign);
      std::vector<float> row = found == server.rows.end() ? std::vector<float>() : found->second;
      for (uint32_t e = static_cast<uint32_t>(row.size()); e < dim; ++e) {
        row.push_back(train ? RowElement(sign, e) : 0.0f);
      }
      if (train) server.rows[sign] = row;
      next = std::copy(row.begin(), row.end(), next);
    });
    return answer;
  }

  static UpdateResult Apply(Server& server, const UpdateRowsRequest& update) {
    UpdateResult result;
    if (update.lookup.incarnation == server.incarnation) {
      result.staleness = server.num_updates - update.lookup.update_counter;
    }
    ++server.num_updates;
    const float* next = update.gradients.data();
    ForEach(update.blocks, [&](uint64_t sign, uint32_t dim) {
      const auto found = server.rows.find(sign);
      ++(found == server.rows.end() ? result.num_missing : result.num_updated);
      for (uint32_t e = 0; e < dim; ++e, ++next) {
        if (found != server.rows.end()) found->second[e] -= *next;
      }
    });
    return result;
  }

  std::mutex mutex_;
  std::vector<Server> servers_;
};

}  // namespace persia::worker
