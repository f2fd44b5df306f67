#include "server/row_copy.h"

#include <chrono>
#include <utility>

#include "checkpoint/block_writer.h"

namespace persia::server {
namespace {

// A piece is far below what the standby accepts at once, and no operation waits long behind it.
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr size_t kMaxGatheredBytes = size_t{64} << 20;
constexpr size_t kRowsAtATime = 512;
// Operations that change rows wait at most so long for the copy; then the copy fails.
constexpr std::chrono::milliseconds kPatience(2000);

}  // namespace

StatusOr<std::unique_ptr<RowCopy>> RowCopy::Begin(store::EmbeddingStore& store,
                                                  const UpdateDeduplicator& updates) {
  PERSIA_ASSIGN_OR_RETURN(auto rows, store::StoreSnapshot::Begin(store, {.patience = kPatience}));
  return std::unique_ptr<RowCopy>(new RowCopy(std::move(rows), updates.Applied()));
}

// The end comes last, and alone makes the copy count: a standby that has lost its primary halfway
// never takes over with a part of the rows.
Status RowCopy::SendTo(const Send& send) {
  std::vector<std::byte> config;
  if (rows_->config().has_value()) config = rows_->config()->Encode();
  PERSIA_RETURN_IF_ERROR(send(ReplicateKind::kCopyConfig, config));
  if (rows_->config().has_value()) PERSIA_RETURN_IF_ERROR(SendRows(send));
  PERSIA_RETURN_IF_ERROR(send(ReplicateKind::kCopyUpdates, std::as_bytes(std::span(updates_))));
  return send(ReplicateKind::kCopyEnd, {});
}

Status RowCopy::SendRows(const Send& send) {
  std::vector<std::byte> piece;
  checkpoint::BlockWriter writer(*rows_->config(), /*with_state=*/true, kMaxGatheredBytes,
                                 /*offset=*/0, &piece);
  const auto send_piece = [&](size_t least) {
    if (piece.size() < least || piece.empty()) return Status::Ok();
    PERSIA_RETURN_IF_ERROR(send(ReplicateKind::kCopyRows, piece));
    piece.clear();
    return Status::Ok();
  };
  const auto add = [&](const store::RowRecords& rows) {
    Status status;
    rows.ForEach([&](const store::RowHead& head, const float* values) {
      if (status.ok()) status = writer.Add(head, values);
    });
    return status;
  };
  checkpoint::RowFeed feed(rows_.get(), /*num_parts=*/1, kRowsAtATime);
  store::StoreSnapshot::Batch batch;
  for (bool has_more = true; has_more;) {
    PERSIA_ASSIGN_OR_RETURN(has_more, feed.Next(0, &batch));
    PERSIA_RETURN_IF_ERROR(add(batch.read));
    for (const store::RowRecords& rows : batch.saved) PERSIA_RETURN_IF_ERROR(add(rows));
    PERSIA_RETURN_IF_ERROR(send_piece(kPieceBytes));
  }
  for (bool has_flushed = true; has_flushed;) {
    PERSIA_ASSIGN_OR_RETURN(has_flushed, writer.FlushSome());
    PERSIA_RETURN_IF_ERROR(send_piece(kPieceBytes));
  }
  PERSIA_RETURN_IF_ERROR(send_piece(0));
  // A copy that lacks rows would be found out only when the standby is needed.
  if (writer.num_rows() == rows_->num_rows()) return Status::Ok();
  return Internal("the copy has ", writer.num_rows(), " of ", rows_->num_rows(), " rows");
}

Status RowReceiver::Take(ReplicateKind kind, std::span<const std::byte> body) {
  if (kind == ReplicateKind::kCopyConfig) return TakeConfig(body);
  if (kind == ReplicateKind::kCopyRows) {
    if (loader_ == nullptr) return FailedPrecondition("rows before their config");
    return loader_->Add(body).status();
  }
  if (kind == ReplicateKind::kCopyUpdates) {
    if (body.size() % sizeof(AppliedUpdate) != 0) return Corruption("updates of another length");
    const auto* begin = reinterpret_cast<const AppliedUpdate*>(body.data());
    updates_.Replace({begin, body.size() / sizeof(AppliedUpdate)});
    return Status::Ok();
  }
  if (loader_ != nullptr) loader_->Commit();
  loader_.reset();
  return Status::Ok();
}

// All rows of the primary are this server's, however many servers there are.
Status RowReceiver::TakeConfig(std::span<const std::byte> body) {
  loader_.reset();
  if (body.empty()) return Status::Ok();
  PERSIA_ASSIGN_OR_RETURN(const TrainConfig config, TrainConfig::Decode(body));
  PERSIA_ASSIGN_OR_RETURN(loader_, checkpoint::Loader::Begin(store_, {.config = config}));
  return loader_->Replace();
}

}  // namespace persia::server
