// How tests wait for what another thread does.
#pragma once

#include <chrono>
#include <thread>

namespace persia {

// Whether the condition comes about in a time that is long even for a busy machine.
template <typename Condition>
bool Eventually(Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace persia
