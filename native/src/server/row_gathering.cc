#include "server/row_gathering.h"

#include <utility>

namespace persia::server {

// `number` holds the source below and the number of the piece above. Pointers into the map stay
// valid: sources are never removed.
StatusOr<RowGathering::Source*> RowGathering::Find(const ReplicateRequest& message) {
  if (message.standby != incarnation_) {
    return FailedPrecondition("the rows are for another server, which this one has replaced");
  }
  const auto source = static_cast<uint32_t>(message.number);
  if (source >= num_sources_) {
    return InvalidArgument("source ", source, ": there are only ", num_sources_,
                           ", counted from 0");
  }
  const std::lock_guard lock(mutex_);
  Source& found = sources_[source];
  if (found.incarnation == 0) found.incarnation = message.primary;
  if (found.incarnation == message.primary) return &found;
  return FailedPrecondition("server ", source, " was replaced while it was sending its rows");
}

// In turn: a piece that was sent again, as its connection broke, must not come behind the next one.
Status RowGathering::Take(const ReplicateRequest& message) {
  PERSIA_ASSIGN_OR_RETURN(Source* const source, Find(message));
  const auto piece = static_cast<uint32_t>(message.number >> 32);
  const std::lock_guard one_piece(source->mutex);
  if (piece < source->next) return Status::Ok();  // repeated
  if (piece > source->next) {
    return FailedPrecondition("piece ", piece, " comes before piece ", source->next);
  }
  PERSIA_RETURN_IF_ERROR(TakePiece(message, static_cast<uint32_t>(message.number)));
  ++source->next;
  return Status::Ok();
}

Status RowGathering::TakePiece(const ReplicateRequest& message, uint32_t source) {
  if (message.kind == ReplicateKind::kCopyRows) return TakeRows(message.body);
  const std::lock_guard lock(mutex_);
  if (message.kind == ReplicateKind::kCopyConfig) return TakeConfig(message.body);
  if (message.kind == ReplicateKind::kCopyUpdates) return updates_.Add(message.body);
  if (message.kind == ReplicateKind::kCopyEnd) return TakeEnd(source, message.body);
  return InvalidArgument("a new server takes rows, not operations");
}

// Each source sends its config. The first one empties the store and opens the loader that all of
// them add to; kChanges, so that rows of one source do not replace another's.
Status RowGathering::TakeConfig(std::span<const std::byte> body) {
  PERSIA_ASSIGN_OR_RETURN(config_, TrainConfig::Decode(body));
  if (loader_ != nullptr) return Status::Ok();
  {
    PERSIA_ASSIGN_OR_RETURN(const auto begin,
                            checkpoint::Loader::Begin(store_, {.config = *config_}));
    PERSIA_RETURN_IF_ERROR(begin->Replace());
  }
  PERSIA_ASSIGN_OR_RETURN(
      loader_, checkpoint::Loader::Begin(
                   store_, {.config = *config_, .kind = checkpoint::FileKind::kChanges}));
  return Status::Ok();
}

// Applied by several threads at once: one may apply what another has prepared.
Status RowGathering::TakeRows(std::span<const std::byte> body) {
  std::shared_ptr<checkpoint::Loader> loader;
  {
    const std::lock_guard lock(mutex_);
    loader = loader_;
  }
  if (loader == nullptr) return FailedPrecondition("rows before their config");
  PERSIA_RETURN_IF_ERROR(loader->Prepare(body).status());
  return loader->Apply().status();
}

// Sources that do not agree on the placement have sent rows to the wrong servers.
Status RowGathering::TakeEnd(uint32_t source, std::span<const std::byte> moved) {
  if (moved.size() % sizeof(MovedShard) != 0) {
    return InvalidArgument("moved shards of ", moved.size(), " bytes");
  }
  const auto* begin = reinterpret_cast<const MovedShard*>(moved.data());
  PERSIA_ASSIGN_OR_RETURN(
      const Placement of_source,
      Placement::Create(placement_.num_servers(), 0, {begin, moved.size() / sizeof(MovedShard)}));
  if (ended_.empty()) placement_ = of_source;
  if (placement_ != of_source) {
    return FailedPrecondition("server ", source, " has placed its rows otherwise than the others");
  }
  ended_.insert(source);
  if (ended_.size() < num_sources_ || loader_ == nullptr) return Status::Ok();
  loader_->Commit();
  loader_.reset();
  // The last one: what rows do not depend on may have changed since the first.
  return store_.Configure(*config_, /*replace=*/true);
}

bool RowGathering::is_complete() const {
  const std::lock_guard lock(mutex_);
  return ended_.size() == num_sources_;
}

Placement RowGathering::placement() const {
  const std::lock_guard lock(mutex_);
  return placement_;
}

bool RowGathering::has_begun() const {
  const std::lock_guard lock(mutex_);
  return !sources_.empty();
}

}  // namespace persia::server
