// The gradients of a ReturnGradients request (docs/wire_format.md), for both ends.
//
// They are megabytes, so as float32 neither end copies them: the encoder's parts view the caller's
// rows, the decoder's gradients view the body, which starts at a multiple of 8. With 16 bits each
// end converts them once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "base/status.h"
#include "net/message.h"
#include "worker/embedding_worker.h"
#include "worker/wire_floats.h"

namespace persia::worker {

struct GradientsRequest {
  Reference reference;
  float scale = 1.0f;
  std::vector<SlotGradient> gradients;  // names and rows lie in the bytes that were decoded, or in
  std::vector<Buffer> widened;          // rows that came with 16 bits
};

// The rows are sent from where they lie: `gradients` must stay until the call has returned.
net::Parts EncodeGradients(Reference reference, float scale,
                           std::span<const SlotGradient> gradients,
                           WireDtype dtype = WireDtype::kFloat32);

// kCorruption says what is wrong. Slots and shapes are not compared with a batch here: whoever
// knows the batch does that.
StatusOr<GradientsRequest> DecodeGradients(std::span<const std::byte> body);

// The reply, of a fixed size.
std::vector<std::byte> EncodeReport(const ReturnReport& report);
StatusOr<ReturnReport> DecodeReport(std::span<const std::byte> body);

}  // namespace persia::worker
