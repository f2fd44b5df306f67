// NarrowEmbeddings: an embeddings message (docs/wire_format.md) with 16 bits a float.
//
// The worker pools in float32 and knows nothing of this; the service narrows what it sends.
#pragma once

#include <cstddef>
#include <span>

#include "base/buffer.h"
#include "base/status.h"
#include "worker/wire_floats.h"

namespace persia::worker {

// `message` is one of float32, as EmbeddingsWriter makes it; kInternal when it is not. `dtype` is
// one of 16 bits.
StatusOr<Buffer> NarrowEmbeddings(std::span<const std::byte> message, WireDtype dtype);

}  // namespace persia::worker
