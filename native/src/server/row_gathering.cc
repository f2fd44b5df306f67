#include "server/row_gathering.h"

#include <utility>

namespace persia::server {

Status RowGathering::Take(const ReplicateRequest& message) {
  {
    const std::lock_guard lock(mutex_);
    PERSIA_RETURN_IF_ERROR(CheckSource(message));
    if (message.kind == ReplicateKind::kCopyConfig) return TakeConfig(message.body);
    if (message.kind == ReplicateKind::kCopyUpdates) return TakeUpdates(message.body);
    if (message.kind == ReplicateKind::kCopyEnd) return TakeEnd(uint32_t(message.number));
  }
  if (message.kind == ReplicateKind::kCopyRows) return TakeRows(message.body);
  return InvalidArgument("a new server takes rows, not operations");
}

Status RowGathering::CheckSource(const ReplicateRequest& message) {
  if (message.standby != incarnation_) {
    return FailedPrecondition("the rows are for another server, which this one has replaced");
  }
  if (message.number >= num_sources_) {
    return InvalidArgument("source ", message.number, ": there are only ", num_sources_,
                           ", counted from 0");
  }
  const auto source = static_cast<uint32_t>(message.number);
  const uint64_t known = sources_.emplace(source, message.primary).first->second;
  if (known != message.primary) {
    return FailedPrecondition("server ", source, " was replaced while it was sending its rows");
  }
  // A repeated end is no mistake: its reply may have been lost.
  if (!ended_.contains(source) || message.kind == ReplicateKind::kCopyEnd) return Status::Ok();
  return FailedPrecondition("server ", source, " has sent its last rows already");
}

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

Status RowGathering::TakeUpdates(std::span<const std::byte> body) {
  if (body.size() % sizeof(AppliedPart) != 0) return Corruption("updates of another length");
  const auto* begin = reinterpret_cast<const AppliedPart*>(body.data());
  updates_.Add({begin, body.size() / sizeof(AppliedPart)});
  return Status::Ok();
}

Status RowGathering::TakeEnd(uint32_t source) {
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

}  // namespace persia::server
