#include "worker/wire_floats.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>

#include "simd/kernels.h"

namespace persia::worker {
namespace {

constexpr std::array<std::string_view, 3> kNames = {"float32", "float16", "bfloat16"};

// The greatest magnitude comes to lie in [2^14, 2^15); float16 ends just below 2^16.
constexpr int kTopExponent = 14;
constexpr int kMinUnitExponent = -112;  // far from where floats lose bits
constexpr int kMaxUnitExponent = 127 - kTopExponent;

// Values that are converted at once, in the cache of the first level.
constexpr size_t kChunk = 1024;

}  // namespace

// Shared by the choice of a unit and by the reduction's check of overflow.
float MaxMagnitude(std::span<const float> values) {
  return simd::ActiveKernels().max_magnitude(values.data(), values.size());
}

StatusOr<WireDtype> ToWireDtype(uint32_t number) {
  if (number < kNames.size()) return static_cast<WireDtype>(number);
  return InvalidArgument("wire dtype ", number,
                         ": known are 0 (float32), 1 (float16) and 2 (bfloat16)");
}

StatusOr<WireDtype> ParseWireDtype(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found != kNames.end()) return static_cast<WireDtype>(found - kNames.begin());
  return InvalidArgument("wire_dtype is '", name, "': choose float32, float16 or bfloat16");
}

// A power of two, so that scaling by it rounds nothing.
float WireUnit(WireDtype dtype, std::span<const float> values) {
  if (dtype != WireDtype::kFloat16) return 1.0f;
  const float max = MaxMagnitude(values);
  if (max == 0.0f || !std::isfinite(max)) return 1.0f;
  const int exponent = std::max(std::ilogb(max) - kTopExponent, kMinUnitExponent);
  return std::ldexp(1.0f, exponent);
}

// A unit from the network multiplies every value: anything but a power of two would round them.
bool IsWireUnit(float unit) {
  int exponent = 0;
  if (!std::isfinite(unit) || std::frexp(unit, &exponent) != 0.5f) return false;
  return exponent - 1 >= kMinUnitExponent && exponent - 1 <= kMaxUnitExponent;
}

void Narrow(WireDtype dtype, std::span<const float> values, float unit, uint16_t* out) {
  const simd::Kernels& kernels = simd::ActiveKernels();
  if (dtype == WireDtype::kBfloat16) {
    return kernels.float_to_bfloat16(out, values.data(), values.size());
  }
  const float inverse = 1.0f / unit;  // exact
  std::array<float, kChunk> scaled;
  for (size_t begin = 0; begin < values.size(); begin += kChunk) {
    const auto chunk = values.subspan(begin, std::min(kChunk, values.size() - begin));
    // The caller's values stay as they are.
    std::copy(chunk.begin(), chunk.end(), scaled.begin());
    kernels.scale(scaled.data(), inverse, chunk.size());
    kernels.float_to_half(out + begin, scaled.data(), chunk.size());
  }
}

void Widen(WireDtype dtype, std::span<const uint16_t> values, float unit, float* out) {
  const simd::Kernels& kernels = simd::ActiveKernels();
  if (dtype == WireDtype::kBfloat16) {
    return kernels.bfloat16_to_float(out, values.data(), values.size());
  }
  for (size_t begin = 0; begin < values.size(); begin += kChunk) {
    const size_t count = std::min(kChunk, values.size() - begin);
    kernels.half_to_float(out + begin, values.data() + begin, count);
    kernels.scale(out + begin, unit, count);
  }
}

StatusOr<const float*> ReadNarrow(ByteReader* reader, WireDtype dtype, float unit, uint64_t count,
                                  std::vector<Buffer>* widened) {
  const auto rows = reader->GetArray<uint16_t>(count);
  if (!reader->ok()) return nullptr;
  if (!IsWireUnit(unit)) {
    return Corruption("its unit is ", unit, ", no power of two in range");
  }
  auto* floats =
      reinterpret_cast<float*>(widened->emplace_back(rows.size() * sizeof(float)).data());
  Widen(dtype, rows, unit, floats);
  return floats;
}

}  // namespace persia::worker
