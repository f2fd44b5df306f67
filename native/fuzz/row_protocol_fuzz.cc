// The parameter server's request and reply bodies: the first byte chooses the decoder.
#include <cstdlib>
#include <utility>

#include "aligned_input.h"
#include "base/row_protocol.h"

namespace persia::fuzz {
namespace {

void Check(const SignBlocks& blocks, uint64_t num_floats) {
  if (blocks.num_floats() != num_floats) std::abort();
  uint64_t num_signs = 0;
  for (const SignBlock& block : blocks.blocks) num_signs += block.num_signs;
  if (num_signs != blocks.signs.size()) std::abort();
  Touch(blocks.signs);
}

void Decode(uint8_t choice, Buffer message) {
  const auto body = std::as_const(message).span();
  if (choice % 5 == 0) {
    auto request = LookupRowsRequest::Decode(body);
    if (request.ok()) Check(request->blocks, request->blocks.num_floats());
  } else if (choice % 5 == 1) {
    auto request = UpdateRowsRequest::Decode(body);
    if (!request.ok()) return;
    Check(request->blocks, request->gradients.size());
    Touch(request->gradients);
  } else if (choice % 5 == 2) {
    auto request = SetRowsRequest::Decode(body);
    if (!request.ok()) return;
    Check(request->blocks, request->rows.size());
    Touch(request->rows);
  } else if (choice % 5 == 3) {
    auto signs = DecodeMessage<std::span<const uint64_t>>(body);
    if (signs.ok()) Touch(*signs);
  } else {
    auto reply = ServerRows::Decode(std::move(message));
    if (reply.ok()) Touch(reply->rows);
  }
}

}  // namespace
}  // namespace persia::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return -1;
  persia::fuzz::Decode(data[0], persia::fuzz::AlignedInput(data + 1, size - 1));
  return 0;
}
