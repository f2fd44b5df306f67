#include "worker/worker_protocol.h"

#include <cmath>
#include <string>
#include <utility>

#include "base/bytes.h"

namespace persia::worker {
namespace {

// A skipped slot is sent by name: the worker counts it, and refuses names that the batch has not.
enum class SlotState : uint32_t { kPresent = 0, kSkipped = 1, kSummed = 2 };

SlotState StateOf(const SlotGradient& gradient) {
  if (gradient.skipped) return SlotState::kSkipped;
  return gradient.summed ? SlotState::kSummed : SlotState::kPresent;
}

// The second byte of a slot's state is the dtype of its rows.
constexpr uint32_t kDtypeShift = 8;

// What a slot whose gradients the rank has added up has in front of its rows.
Status ReadSummed(ByteReader* reader, WireDtype dtype, SlotGradient* gradient) {
  gradient->max_magnitude = reader->Get<float>();
  reader->Get<uint32_t>();  // reserved
  if (!reader->ok()) return Status::Ok();
  const std::string slot = "slot '" + std::string(gradient->slot) + "': ";
  if (dtype != WireDtype::kFloat32) {
    return Corruption(slot, "gradients summed by row must be float32");
  }
  if (std::isfinite(gradient->max_magnitude) && gradient->max_magnitude >= 0.0f) {
    return Status::Ok();
  }
  return Corruption(slot, "its greatest magnitude is ", gradient->max_magnitude,
                    ", not a finite number of 0 or more");
}

// Fields are read first and judged once the reader is known to be ok: zeros of a truncated message
// must not be taken for values.
Status ReadSlot(ByteReader* reader, SlotGradient* gradient, std::vector<Buffer>* widened) {
  const auto name_bytes = reader->Get<uint32_t>();
  const auto state_and_dtype = reader->Get<uint32_t>();
  const uint32_t state = state_and_dtype & ((1u << kDtypeShift) - 1);
  auto dtype = ToWireDtype(state_and_dtype >> kDtypeShift);
  gradient->num_rows = reader->Get<uint32_t>();
  gradient->dim = reader->Get<uint32_t>();
  gradient->slot = reader->GetString(name_bytes);
  if (reader->ok() && state > static_cast<uint32_t>(SlotState::kSummed)) {
    return Corruption("slot '", gradient->slot, "' has state ", state,
                      ", known are 0 (present), 1 (skipped) and 2 (summed)");
  }
  if (reader->ok() && !dtype.ok()) {
    return Corruption("slot '", gradient->slot, "': ", dtype.status().message());
  }
  gradient->skipped = state == static_cast<uint32_t>(SlotState::kSkipped);
  if (reader->ok() && gradient->skipped && (gradient->num_rows != 0 || gradient->dim != 0)) {
    return Corruption("slot '", gradient->slot, "' is skipped and yet has a shape");
  }
  gradient->summed = state == static_cast<uint32_t>(SlotState::kSummed);
  if (reader->ok() && gradient->summed) {
    PERSIA_RETURN_IF_ERROR(ReadSummed(reader, *dtype, gradient));
  }
  if (reader->ok() && !gradient->skipped && *dtype != WireDtype::kFloat32) {
    const auto unit = reader->Get<float>();
    reader->Get<uint32_t>();  // reserved
    auto rows =
        ReadNarrow(reader, *dtype, unit, uint64_t{gradient->num_rows} * gradient->dim, widened);
    if (!rows.ok()) {
      return Corruption("slot '", gradient->slot, "': ", rows.status().message());
    }
    gradient->rows = *rows;
  } else if (!gradient->skipped) {
    gradient->rows = reader->GetArray<float>(uint64_t{gradient->num_rows} * gradient->dim).data();
  }
  if (!reader->ok()) return Corruption("the message ends before its last slot does");
  return Status::Ok();
}

}  // namespace

Segments LookupDirectRequest::Encode() && {
  ByteWriter head;
  head.Put(options);
  head.Put(original);
  Segments segments;
  segments.AddOwned(head.Release());
  segments.AddView(id_features);
  return segments;
}

StatusOr<LookupDirectRequest> LookupDirectRequest::Decode(std::span<const std::byte> body) {
  ByteReader reader(body);
  const auto options = reader.Get<LookupOptions>();
  const auto original = reader.Get<BatchKey>();
  if (!reader.ok()) return Corruption("it ends within its head");
  return LookupDirectRequest{options, original, body.subspan(sizeof(options) + sizeof(original))};
}

// A slot's head is written into its own segment, in front of the rows, which are sent from the
// caller's memory.
Segments GradientsRequest::Encode() && {
  Segments segments;
  ByteWriter head;
  head.Put(key);
  head.Put(scale);
  head.Put(static_cast<uint32_t>(gradients.size()));
  for (const SlotGradient& gradient : gradients) {
    head.Put(static_cast<uint32_t>(gradient.slot.size()));
    head.Put(static_cast<uint32_t>(StateOf(gradient)) |
             (gradient.skipped ? 0 : static_cast<uint32_t>(dtype) << kDtypeShift));
    head.Put(gradient.skipped ? 0 : gradient.num_rows);
    head.Put(gradient.skipped ? 0 : gradient.dim);
    head.PutString(gradient.slot);
    if (gradient.skipped) continue;
    const std::span rows(gradient.rows, uint64_t{gradient.num_rows} * gradient.dim);
    if (gradient.summed) {
      head.Put(gradient.max_magnitude);
      head.Put(uint32_t{0});
    }
    const float unit = WireUnit(dtype, rows);
    if (dtype != WireDtype::kFloat32) {
      head.Put(unit);
      head.Put(uint32_t{0});
    }
    segments.AddOwned(std::exchange(head, ByteWriter()).Release());
    if (dtype == WireDtype::kFloat32) {
      segments.AddView(std::as_bytes(rows));
    } else {
      Buffer narrow(rows.size() * sizeof(uint16_t));
      Narrow(dtype, rows, unit, reinterpret_cast<uint16_t*>(narrow.data()));
      segments.AddOwned(std::move(narrow));
    }
    segments.AddPadding(rows.size() * WireBytes(dtype));
  }
  segments.AddOwned(head.Release());
  return segments;
}

// num_slots is not trusted: each slot is read before the list grows, and reading past the end
// fails.
StatusOr<GradientsRequest> GradientsRequest::Decode(std::span<const std::byte> body) {
  ByteReader reader(body);
  GradientsRequest request;
  request.key = reader.Get<BatchKey>();
  request.scale = reader.Get<float>();
  const auto num_slots = reader.Get<uint32_t>();
  if (!reader.ok()) return Corruption("the message ends within its head");
  for (uint32_t i = 0; i < num_slots; ++i) {
    SlotGradient gradient;
    PERSIA_RETURN_IF_ERROR(ReadSlot(&reader, &gradient, &request.widened));
    request.gradients.push_back(gradient);
  }
  if (reader.remaining() == 0) return request;
  return Corruption(reader.remaining(), " bytes are left over after the last slot");
}

// The lookups are an array of 16-byte entries, as the struct is in memory.
Segments ReturnReport::Encode() && {
  ByteWriter writer;
  writer.Put(update);
  writer.Put(num_nonfinite_slots);
  writer.Put(num_skipped_slots);
  writer.Put(static_cast<uint32_t>(lookups.size()));
  writer.Put(uint32_t{0});
  writer.PutArray(std::span<const LookupStaleness>(lookups));
  Segments segments;
  segments.AddOwned(writer.Release());
  return segments;
}

// The number of lookups is bounded before memory is taken for them.
StatusOr<ReturnReport> ReturnReport::Decode(std::span<const std::byte> body) {
  ByteReader reader(body);
  ReturnReport report;
  report.update = reader.Get<UpdateResult>();
  report.num_nonfinite_slots = reader.Get<uint32_t>();
  report.num_skipped_slots = reader.Get<uint32_t>();
  // Each has at least one mode of its own, so there are at most as many as modes.
  const auto num_lookups = reader.Get<uint32_t>();
  reader.Get<uint32_t>();  // reserved
  if (num_lookups > kMaxSlotModes) {
    return Corruption("it tells of ", num_lookups, " lookups, above ", kMaxSlotModes);
  }
  const auto lookups = reader.GetArray<LookupStaleness>(num_lookups);
  report.lookups.assign(lookups.begin(), lookups.end());
  if (reader.ok() && reader.remaining() == 0) return report;
  return Corruption("it has ", body.size(), " bytes, which ", num_lookups, " lookups do not fit");
}

}  // namespace persia::worker
