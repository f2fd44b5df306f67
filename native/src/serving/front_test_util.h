// A port with a queue, for the tests of this layer.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "serving/front.h"
#include "serving/serving_test_util.h"

namespace persia::serving::testing {

inline const std::string kInfer = "/inference.GRPCInferenceService/ModelInfer";

// So patient that no connection is closed for its age.
inline FrontOptions Patient() {
  FrontOptions options;
  options.grpc.patience = std::chrono::hours(1);
  return options;
}

class FrontTest : public ::testing::Test {
 protected:
  void Start(FrontOptions options = {}, std::shared_ptr<AnsweredRequests> log = nullptr) {
    std::vector<FrontModel> models{{.name = "m", .queue = queue_, .counts = counts_, .log = log}};
    Start(std::move(options), std::move(models));
  }
  void Start(FrontOptions options, std::vector<FrontModel> models) {
    front_ = std::make_unique<Front>(std::move(options), std::move(models), counts_);
    front_->SetInputs(std::make_shared<ModelInputs>(Inputs()));
    port_ = front_->Start("127.0.0.1", 0).value();
  }
  // Answers with each sample's age, until the queue is closed.
  void Compute() {
    while (const auto batch = queue_->Next()) {
      std::vector<std::byte> values;
      for (const auto& request : batch->requests()) {
        const auto ages = request->samples().dense[0].values;
        values.insert(values.end(), ages.begin(), ages.end());
      }
      batch->Answer({"m", "7", {}, {{"FP32", {1}, sizeof(float), values}}});
    }
  }
  void StartComputing() {
    computing_ = std::thread([this] { Compute(); });
  }
  // Waits for one event of a kind; what comes before is dropped.
  CallEvent Await(CallEvent::Kind kind) {
    while (true) {
      pollfd waiting{front_->events_fd(), POLLIN, 0};
      if (::poll(&waiting, 1, 120'000) == 0) throw std::runtime_error("no event has come");
      for (CallEvent& event : front_->TakeEvents()) {
        if (event.kind == kind) return std::move(event);
      }
    }
  }
  uint64_t NumOf(GrpcCode code) { return counts_->snapshot().by_code[static_cast<size_t>(code)]; }
  void TearDown() override {
    queue_->Close();
    if (computing_.joinable()) computing_.join();
  }

  std::shared_ptr<RequestQueue> queue_ =
      std::make_shared<RequestQueue>(QueueOptions{.max_batch_size = 8, .max_queued = 4});
  std::shared_ptr<RequestCounts> counts_ = std::make_shared<RequestCounts>("test");
  std::unique_ptr<Front> front_;
  std::thread computing_;
  uint16_t port_ = 0;
};

}  // namespace persia::serving::testing
