#include "store/bias_corrections.h"

#include <cmath>
#include <map>
#include <mutex>
#include <utility>

namespace persia::store {
namespace {

// With beta2 = 0.999 the corrections are 1 in float from step 17,000 on.
constexpr uint32_t kTabulatedSteps = 1 << 14;

}  // namespace

std::shared_ptr<const BiasCorrections> BiasCorrections::For(float beta1, float beta2) {
  static std::mutex mutex;
  static std::map<std::pair<float, float>, std::weak_ptr<const BiasCorrections>> tables;
  const std::lock_guard lock(mutex);
  // Tables that nobody has any more leave nothing behind.
  std::erase_if(tables, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<const BiasCorrections>& known = tables[{beta1, beta2}];
  std::shared_ptr<const BiasCorrections> table = known.lock();
  if (table == nullptr) known = table = std::make_shared<const BiasCorrections>(beta1, beta2);
  return table;
}

BiasCorrections::BiasCorrections(float beta1, float beta2) : beta1_(beta1), beta2_(beta2) {
  table_.reserve(kTabulatedSteps);
  for (uint32_t step = 1; step <= kTabulatedSteps; ++step) table_.push_back(Compute(step));
}

BiasCorrections::Correction BiasCorrections::Compute(uint32_t step) const {
  return {.first = 1.0 - std::pow(beta1_, step),
          .second_scale = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2_, step)))};
}

}  // namespace persia::store
