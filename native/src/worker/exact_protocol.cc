#include "worker/exact_protocol.h"

#include <memory>
#include <utility>

#include "base/bytes.h"

namespace persia::worker {

// 24 bytes and the count come before the bits, so that the bits, and the ID features behind them,
// begin at a multiple of 8 and are read in place.
Segments LookupWholeRequest::Encode() && {
  ByteWriter head;
  head.Put(key);
  head.Put(slots);
  head.Put(uint32_t{0});
  head.Put(static_cast<uint64_t>(wanted.size()));
  Segments segments;
  segments.AddOwned(head.Release());
  segments.AddArray(wanted);
  segments.AddView(id_features);
  return segments;
}

StatusOr<LookupWholeRequest> LookupWholeRequest::Decode(std::span<const std::byte> body) {
  ByteReader reader(body);
  LookupWholeRequest request;
  request.key = reader.Get<BatchKey>();
  request.slots = reader.Get<SlotMask>();
  reader.Get<uint32_t>();  // reserved
  const auto num_words = reader.Get<uint64_t>();
  request.wanted = reader.GetArray<uint64_t>(num_words);
  if (!reader.ok()) return Corruption("it ends before its bits of wanted signs do");
  request.id_features = body.last(reader.remaining());
  return request;
}

Segments WholeRows::Encode() && {
  ByteWriter head;
  head.Put(key);
  head.Put(static_cast<uint64_t>(rows.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    head.Put(incarnations[i]);
    head.Put(uint64_t{rows[i].size()});
  }
  Segments segments;
  segments.AddOwned(head.Release());
  for (const std::span<const float> of_server : rows) segments.AddArray(of_server);
  if (placement.generation() > 0) {
    ByteWriter tail;
    tail.Put(placement.generation());
    tail.Put(uint64_t{placement.moved().size()});
    tail.PutArray(placement.moved());
    segments.AddOwned(tail.Release());
  }
  // The rows are sent from here, after the handler has returned.
  segments.owned.push_back(std::make_shared<const std::vector<Buffer>>(std::move(storage)));
  return segments;
}

StatusOr<WholeRows> WholeRows::Decode(Buffer body) {
  struct Head {
    uint64_t incarnation;
    uint64_t num_floats;
  };
  ByteReader reader(std::as_const(body).span());
  WholeRows answer;
  answer.key = reader.Get<BatchKey>();
  const auto num_servers = reader.Get<uint64_t>();
  // Bounded by the bytes that the body has, before a list is made.
  const auto heads = reader.GetArray<Head>(num_servers);
  for (const Head& head : heads) {
    answer.incarnations.push_back(head.incarnation);
    answer.rows.push_back(reader.GetArray<float>(head.num_floats));
  }
  const bool has_placement = reader.ok() && reader.remaining() > 0;
  const auto generation = has_placement ? reader.Get<uint64_t>() : 0;
  const auto num_moved = has_placement ? reader.Get<uint64_t>() : 0;
  const auto moved = reader.GetArray<MovedShard>(num_moved);
  // Servers are numbered with 16 bits in a plan.
  if (!reader.ok() || reader.remaining() != 0 || num_servers > UINT16_MAX) {
    return Corruption("its ", body.size(), " bytes do not have the rows of ", num_servers,
                      " servers");
  }
  PERSIA_ASSIGN_OR_RETURN(answer.placement,
                          Placement::Create(static_cast<uint32_t>(num_servers), generation, moved));
  answer.storage.push_back(std::move(body));  // its bytes stay where they are
  return answer;
}

// The head goes before the segments of an ordinary return, whose decoder then reads the rest.
// BatchKey has 16 bytes, so what follows keeps its alignment.
Segments OrderedGradientsRequest::Encode() && {
  ByteWriter head;
  head.Put(after);
  Segments segments;
  segments.AddOwned(head.Release());
  Segments rest = std::move(gradients).Encode();
  segments.views.insert(segments.views.end(), rest.views.begin(), rest.views.end());
  segments.owned.insert(segments.owned.end(), rest.owned.begin(), rest.owned.end());
  return segments;
}

StatusOr<OrderedGradientsRequest> OrderedGradientsRequest::Decode(std::span<const std::byte> body) {
  ByteReader reader(body);
  OrderedGradientsRequest request;
  request.after = reader.Get<BatchKey>();
  if (!reader.ok()) return Corruption("it ends within its head");
  PERSIA_ASSIGN_OR_RETURN(request.gradients,
                          GradientsRequest::Decode(body.subspan(sizeof(BatchKey))));
  return request;
}

}  // namespace persia::worker
