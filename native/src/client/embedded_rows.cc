#include "client/embedded_rows.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/incarnation.h"

namespace persia::client {
namespace {

using worker::Deadline;
using worker::ServerBlocks;
using worker::ServerRows;
using worker::ServerUpdate;
using worker::UpdateKey;
using worker::UpdateResult;

Status CheckDeadline(Deadline deadline) {
  if (std::chrono::steady_clock::now() < deadline) return Status::Ok();
  return DeadlineExceeded("embedded store: the deadline has passed before the call began");
}

// Blocks of one dim that follow one another become one, as in a parameter server.
std::vector<store::RowBlock> ToRowBlocks(const ServerBlocks& request) {
  std::vector<store::RowBlock> blocks;
  const std::span<const uint64_t> signs = request.signs;
  size_t begin = 0, end = 0;
  for (const ServerBlocks::Block& block : request.blocks) {
    if (blocks.empty() || blocks.back().dim != block.dim) {
      blocks.push_back({block.dim, {}});
      begin = end;
    }
    end += block.num_signs;
    blocks.back().signs = signs.subspan(begin, end - begin);
  }
  return blocks;
}

}  // namespace

StatusOr<std::shared_ptr<EmbeddedRows>> EmbeddedRows::Create(
    const store::EmbeddingStore::Options& options, const std::optional<store::TierOptions>& tier) {
  auto store =
      tier ? store::EmbeddingStore::Open(options, *tier) : store::EmbeddingStore::Create(options);
  if (!store.ok()) return store.status();
  return std::shared_ptr<EmbeddedRows>(new EmbeddedRows(std::move(store).value()));
}

EmbeddedRows::EmbeddedRows(std::unique_ptr<store::EmbeddingStore> store)
    : incarnation_(DrawIncarnation()), store_(std::move(store)) {}

Status EmbeddedRows::Configure(const TrainConfig& config, bool replace, Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
  return store_->Configure(config, replace);
}

StatusOr<std::vector<ServerRows>> EmbeddedRows::Lookup(std::span<const ServerBlocks> requests,
                                                       bool train, Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
  std::vector<ServerRows> answers(1);
  // As servers that are not asked: a lookup of nothing is none that staleness counts from.
  if (requests[0].signs.empty()) return answers;
  ServerRows& answer = answers[0];
  answer.incarnation = incarnation_;
  // Read before the rows are: an update that lands in between counts as staleness.
  answer.update_counter = update_counter_.load();
  const uint64_t num_floats = requests[0].num_floats();
  answer.storage = Buffer(num_floats * sizeof(float));
  auto* rows = reinterpret_cast<float*>(answer.storage.data());
  answer.rows = {rows, num_floats};
  const auto mode = train ? store::LookupMode::kTrain : store::LookupMode::kInference;
  PERSIA_RETURN_IF_ERROR(store_->Lookup(ToRowBlocks(requests[0]), mode, rows));
  return answers;
}

worker::Announced EmbeddedRows::Prefetch(std::span<const ServerBlocks> requests) {
  store_->Prefetch(requests[0].signs);  // which counts what it drops
  return {.num_signs = requests[0].signs.size()};
}

StatusOr<UpdateResult> EmbeddedRows::Update(UpdateKey, std::span<const ServerUpdate> updates,
                                            Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
  const ServerUpdate& update = updates[0];
  if (!store_->config().has_value()) {
    return FailedPrecondition("the embedded store is not configured");
  }
  if (update.blocks->signs.empty()) return UpdateResult();
  store::UpdateReport report;
  PERSIA_RETURN_IF_ERROR(
      store_->Update(ToRowBlocks(*update.blocks), update.gradients.data(), &report));
  // Counted after it is applied, so that a lookup never claims to have seen an update it has not.
  const uint64_t counter = update_counter_.fetch_add(1);
  UpdateResult sum;
  worker::AddUpdate(
      update, {counter - update.lookup_counter, report.num_updated, report.num_missing}, &sum);
  return sum;
}

Status EmbeddedRows::SetRows(std::span<const ServerBlocks> requests,
                             std::span<const std::span<const float>> rows, Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
  if (!std::all_of(rows[0].begin(), rows[0].end(), [](float x) { return std::isfinite(x); })) {
    return InvalidArgument("rows: some values are NaN or infinite; set finite ones");
  }
  return store_->SetRows(ToRowBlocks(requests[0]), rows[0].data());
}

Status EmbeddedRows::Clear(Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
  store_->Clear();
  return Status::Ok();
}

StatusOr<std::vector<uint64_t>> EmbeddedRows::Sizes(Deadline deadline) {
  PERSIA_RETURN_IF_ERROR(CheckDeadline(deadline));
  return std::vector<uint64_t>{store_->size()};
}

}  // namespace persia::client
