// Floats between embedding worker and NN worker: embeddings and their gradients travel as float32,
// or with 16 bits where the network is what limits (docs/adr/0004-float32-on-the-wire.md).
//
// A float16 stands for itself times a unit, a power of two that each slot of a message has. It is
// chosen by the slot's greatest magnitude, so that nothing overflows and gradients, which are
// small, do not vanish: an error is at most 2^-11 of the element or 2^-39 of the greatest. A
// bfloat16 has float32's range and no unit; its error is at most 2^-8 of the element. (Within so
// much of float32's own end either rounds to infinity.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "base/bytes.h"
#include "base/status.h"

namespace persia::worker {

enum class WireDtype : uint8_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// kInvalidArgument names the number, or the name and those that are known.
StatusOr<WireDtype> ToWireDtype(uint32_t number);
StatusOr<WireDtype> ParseWireDtype(std::string_view name);

constexpr size_t WireBytes(WireDtype dtype) { return dtype == WireDtype::kFloat32 ? 4 : 2; }

// The greatest magnitude; NaN or infinite where an element is.
float MaxMagnitude(std::span<const float> values);

// 1 for what has no unit, and where an element is not finite.
float WireUnit(WireDtype dtype, std::span<const float> values);

// Whether Widen() takes it: a power of two that WireUnit() may give.
bool IsWireUnit(float unit);

// Of 16 bits only. To nearest, ties to even; NaN and infinities stay what they are.
void Narrow(WireDtype dtype, std::span<const float> values, float unit, uint16_t* out);
void Widen(WireDtype dtype, std::span<const uint16_t> values, float unit, float* out);

// Reads `count` floats of 16 bits and appends them to `widened`, as float32; returns where they
// are. kCorruption: the unit is none. The caller checks that the reader is still ok: null if it is
// not.
StatusOr<const float*> ReadNarrow(ByteReader* reader, WireDtype dtype, float unit, uint64_t count,
                                  std::vector<Buffer>* widened);

}  // namespace persia::worker
