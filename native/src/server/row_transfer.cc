#include "server/row_transfer.h"

#include <sys/resource.h>

#include <algorithm>
#include <exception>
#include <future>
#include <optional>
#include <utility>

#include "base/hash.h"
#include "base/row_protocol.h"
#include "checkpoint/block_writer.h"
#include "checkpoint/dump_throttle.h"
#include "checkpoint/row_feed.h"
#include "server/row_gathering.h"

namespace persia::server {
namespace {

constexpr size_t kSentBytes = size_t{1} << 20;
constexpr size_t kGatheredBytes = size_t{64} << 20;
// Operations that change rows wait at most so long for the copy; then it fails.
constexpr std::chrono::milliseconds kCopyPatience(2000);
// Changes that are remembered between two rounds, at least: of some large batches.
constexpr uint64_t kLeastChanges = uint64_t{1} << 18;
// Between two rounds: many small ones would cost more than the changes that they save the last one.
constexpr std::chrono::milliseconds kRoundPause(20);

// Of this thread alone: training comes first. Not by much, because the throttle limits the copy,
// which must proceed on a busy host, too.
void LowerPriority() { setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + 5); }

uint64_t NumChanges(uint64_t wanted) {
  return std::clamp(wanted, kLeastChanges, store::ChangeSet::kMaxKeys);
}

}  // namespace

// What one target gets. One piece at a time is under way, so that the next is encoded meanwhile.
class RowTransfer::Lane {
 public:
  Lane(const Options& options, const Target& target)
      : options_(options), incarnation_(target.incarnation), channel_({.peer = "a new server"}) {
    channel_.SetAddress(target.address);
  }
  // What is under way, and what follows, fails.
  void Close() { channel_.Close(); }

  void Begin(const TrainConfig& config, size_t max_gathered_bytes) {
    piece_.clear();
    writer_.emplace(config, /*with_state=*/true, max_gathered_bytes, /*offset=*/0, &piece_);
  }
  Status Add(const store::RowHead& head, const float* values) { return writer_->Add(head, values); }
  // Sends what is encoded, if it is `least` bytes.
  Status SendPiece(size_t least, std::atomic<uint64_t>* num_bytes) {
    if (piece_.empty() || piece_.size() < least) return Status::Ok();
    *num_bytes += piece_.size();
    const Status status = Send(ReplicateKind::kCopyRows, std::move(piece_));
    piece_ = {};
    return status;
  }
  Status Finish(std::atomic<uint64_t>* num_bytes) {
    for (bool has_flushed = true; has_flushed;) {
      PERSIA_ASSIGN_OR_RETURN(has_flushed, writer_->FlushSome());
      PERSIA_RETURN_IF_ERROR(SendPiece(kSentBytes, num_bytes));
    }
    return SendPiece(0, num_bytes);
  }
  // Returns when the piece before is there.
  Status Send(ReplicateKind kind, std::vector<std::byte> body) {
    PERSIA_RETURN_IF_ERROR(Wait());
    const auto kept = std::make_shared<const std::vector<std::byte>>(std::move(body));
    const auto answer = std::make_shared<std::promise<Status>>();
    sent_ = answer->get_future();
    ReplicateRequest message{
        options_.incarnation, incarnation_, kind, 0, PieceNumber(next_++, options_.index), *kept};
    channel_.CallAsync(
        kReplicate, std::move(message).Encode(), Clock::now() + options_.deadline,
        [kept, answer](const StatusOr<Buffer>& taken) { answer->set_value(taken.status()); });
    return Status::Ok();
  }
  Status Wait() { return sent_.valid() ? sent_.get() : Status::Ok(); }

 private:
  const Options& options_;
  const uint64_t incarnation_;
  std::vector<std::byte> piece_;
  std::optional<checkpoint::BlockWriter> writer_;
  std::future<Status> sent_;
  uint32_t next_ = 0;     // piece
  net::Channel channel_;  // destroyed first: it answers what is under way
};

StatusOr<std::unique_ptr<RowTransfer>> RowTransfer::Begin(store::EmbeddingStore& store,
                                                          const Options& options) {
  if (options.targets.empty()) return InvalidArgument("there are no servers to send rows to");
  if (options.targets.size() != options.placement.num_servers()) {
    return InvalidArgument("rows are placed on ", options.placement.num_servers(),
                           " servers, and sent to ", options.targets.size());
  }
  // The snapshot may take long, and all rows may change meanwhile.
  PERSIA_RETURN_IF_ERROR(store.TrackChanges(NumChanges(2 * store.size())));
  std::unique_ptr<RowTransfer> transfer(new RowTransfer(&store, options));
  // What changes between the two is sent twice.
  PERSIA_ASSIGN_OR_RETURN(auto rows,
                          store::StoreSnapshot::Begin(store, {.patience = kCopyPatience}));
  transfer->thread_ = std::thread([self = transfer.get(), snapshot = std::move(rows)]() mutable {
    self->Run(std::move(snapshot));
  });
  return transfer;
}

RowTransfer::RowTransfer(store::EmbeddingStore* store, const Options& options)
    : store_(*store), options_(options) {
  for (const Target& target : options_.targets) {
    lanes_.push_back(std::make_unique<Lane>(options_, target));
  }
}

RowTransfer::~RowTransfer() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    stops_.notify_all();
  }
  // First: who gives the transfer up has ended the new servers, and the thread would wait for them.
  for (const auto& lane : lanes_) lane->Close();
  if (thread_.joinable()) thread_.join();
  lanes_.clear();
  static_cast<void>(store_.TrackChanges(0));
}

void RowTransfer::Run(std::unique_ptr<store::StoreSnapshot> all_rows) {
  Status status;
  // On a thread of its own: a priority that was lowered is not raised again, and rounds that come
  // late are long ones.
  std::thread copy([&] {
    LowerPriority();
    status = SendConfig();
    if (status.ok()) status = SendRows(all_rows.get(), options_.max_processors);
    all_rows.reset();
  });
  copy.join();
  double max_processors = options_.max_processors;  // the first round has the changes of minutes
  std::unique_lock lock(mutex_);
  while (status.ok() && !is_stopping_) {
    lock.unlock();
    const auto begin = Clock::now();
    status = SendChanges(std::exchange(max_processors, 0));
    lock.lock();
    state_ = State::kFollowing;
    round_time_ = Clock::now() - begin;
    stops_.wait_for(lock, kRoundPause, [this] { return is_stopping_; });
  }
  lock.unlock();
  static_cast<void>(Note(status));
}

Status RowTransfer::Note(Status status) {
  const std::lock_guard lock(mutex_);
  if (!status.ok() && failure_.ok()) {
    failure_ = status;
    state_ = State::kFailed;
  }
  return status;
}

// The next set of changes is as large as this round lets expect: an empty one takes time to make.
Status RowTransfer::SendChanges(double max_processors) {
  store::StoreSnapshot::Options options{.patience = kCopyPatience};
  options.max_next_changes = next_max_changes_;
  PERSIA_ASSIGN_OR_RETURN(const auto changes, store::StoreSnapshot::TakeChanges(store_, options));
  if (changes->is_from_nothing()) {
    return FailedPrecondition("all rows were removed while they were being copied");
  }
  next_max_changes_ = NumChanges(8 * changes->num_rows());
  PERSIA_RETURN_IF_ERROR(SendConfig());
  PERSIA_RETURN_IF_ERROR(SendRows(changes.get(), max_processors));
  changes->Commit();
  return Status::Ok();
}

// Before the first rows; a store may be configured only after the transfer has begun.
Status RowTransfer::SendConfig() {
  const auto config = store_.config();
  if (!config.has_value() || std::exchange(has_sent_config_, true)) return Status::Ok();
  for (const auto& lane : lanes_) {
    PERSIA_RETURN_IF_ERROR(lane->Send(ReplicateKind::kCopyConfig, config->Encode()));
  }
  return Drain();
}

Status RowTransfer::SendRows(store::StoreSnapshot* rows, double max_processors) {
  if (!rows->config().has_value()) return Status::Ok();
  for (const auto& lane : lanes_) lane->Begin(*rows->config(), kGatheredBytes / lanes_.size());
  checkpoint::DumpThrottle throttle(rows, max_processors);
  checkpoint::RowFeed feed(rows, /*num_parts=*/1, checkpoint::DumpThrottle::kRowsAtATime);
  store::StoreSnapshot::Batch batch;
  for (bool has_more = true; has_more;) {
    PERSIA_ASSIGN_OR_RETURN(has_more, feed.Next(0, &batch));
    PERSIA_RETURN_IF_ERROR(Add(batch));
    throttle.Throttle();
    const std::lock_guard lock(mutex_);
    if (is_stopping_ && state_ == State::kCopying) return Unavailable("the copy was given up");
  }
  for (const auto& lane : lanes_) PERSIA_RETURN_IF_ERROR(lane->Finish(&num_bytes_));
  return Drain();
}

Status RowTransfer::Add(const store::StoreSnapshot::Batch& batch) {
  Status status;
  uint64_t num_rows = 0;
  const auto add = [&](const store::RowHead& head, const float* values) {
    if (!status.ok()) return;
    ++num_rows;
    status = lanes_[options_.placement.ServerOf(SignHash(head.sign))]->Add(head, values);
  };
  batch.read.ForEach(add);
  for (const store::RowRecords& saved : batch.saved) saved.ForEach(add);
  num_rows_ += num_rows;
  PERSIA_RETURN_IF_ERROR(status);
  for (const auto& lane : lanes_) PERSIA_RETURN_IF_ERROR(lane->SendPiece(kSentBytes, &num_bytes_));
  return Status::Ok();
}

Status RowTransfer::Drain() {
  Status status;
  for (const auto& lane : lanes_) {
    const Status sent = lane->Wait();
    if (status.ok()) status = sent;
  }
  return status;
}

Status RowTransfer::StopFollowing() {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
    if (state_ == State::kCopying) return FailedPrecondition("the rows are still being copied");
    is_stopping_ = true;
    stops_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  return failure_;
}

Status RowTransfer::SendLast(const std::vector<std::byte>& updates) {
  const auto send = [&]() -> Status {
    PERSIA_RETURN_IF_ERROR(SendChanges(0));
    const auto config = store_.config();
    for (const auto& lane : lanes_) {
      // Again: a learning rate may have changed meanwhile.
      if (config.has_value()) {
        PERSIA_RETURN_IF_ERROR(lane->Send(ReplicateKind::kCopyConfig, config->Encode()));
      }
      PERSIA_RETURN_IF_ERROR(lane->Send(ReplicateKind::kCopyUpdates, updates));
    }
    const auto moved = std::as_bytes(options_.placement.moved());
    for (const auto& lane : lanes_) {
      PERSIA_RETURN_IF_ERROR(lane->Send(ReplicateKind::kCopyEnd, {moved.begin(), moved.end()}));
    }
    return Drain();
  };
  PERSIA_RETURN_IF_ERROR(Note(send()));
  const std::lock_guard lock(mutex_);
  state_ = State::kHandedOver;
  return Status::Ok();
}

RowTransfer::Progress RowTransfer::progress() const {
  const std::lock_guard lock(mutex_);
  return {state_, num_bytes_, num_rows_, round_time_, failure_};
}

}  // namespace persia::server
