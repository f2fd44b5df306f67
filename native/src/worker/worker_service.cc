#include "worker/worker_service.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "net/rpc.h"
#include "worker/embeddings_message.h"
#include "worker/exact_protocol.h"
#include "worker/worker_protocol.h"

namespace persia::worker {
namespace {

// Else caller and worker would give up at the same moment, and the caller would hear of a silent
// worker instead of the silent server behind it.
Deadline ShortenDeadline(Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - net::Clock::now());
  const auto tenth = std::clamp(left / 10, milliseconds(20), milliseconds(1000));
  return deadline - std::min(tenth, left / 2);
}

// Runs `lookup` with a checked requires_grad and form, and narrows what it returns where the
// options ask for 16 bits a float. Rows are not sent with 16 bits: pooled from those, embeddings
// would be rounded otherwise than those that are pooled first.
template <typename Lookup>
StatusOr<Buffer> LookupAs(const LookupOptions& options, Lookup lookup) {
  if (options.requires_grad > 1) {
    return InvalidArgument("requires_grad is ", options.requires_grad, "; it must be 0 or 1");
  }
  PERSIA_ASSIGN_OR_RETURN(const WireDtype dtype, ToWireDtype(options.wire_dtype));
  if (options.form > static_cast<uint32_t>(EmbeddingsForm::kFewestBytes)) {
    return InvalidArgument("form is ", options.form, "; it must be 0 (pooled) or 1 (fewest bytes)");
  }
  const auto form = dtype == WireDtype::kFloat32 ? static_cast<EmbeddingsForm>(options.form)
                                                 : EmbeddingsForm::kPooled;
  StatusOr<Buffer> embeddings = lookup(options.requires_grad == 1, form);
  if (!embeddings.ok() || dtype == WireDtype::kFloat32) return embeddings;
  return NarrowEmbeddings(std::move(*embeddings), dtype);
}

}  // namespace

template <typename Request, typename Reply, typename Function>
void WorkerService::Register(const Method<Request, Reply>& method, Function handle) {
  rpc_.Handle(method,
              net::MakeHandler(
                  method,
                  [handle = std::move(handle)](const Request& request,
                                               const net::CallContext& context) -> Result<Reply> {
                    const Deadline deadline = ShortenDeadline(context.deadline);
                    if constexpr (std::is_invocable_v<Function, const Request&, Deadline, Role>) {
                      return handle(request, deadline, context.caller);
                    } else {
                      return handle(request, deadline);
                    }
                  }));
}

WorkerService::WorkerService(std::shared_ptr<EmbeddingWorker> worker, net::ServerOptions options)
    : worker_(std::move(worker)), rpc_(std::move(options)) {
  Register(kConfigureWorker, [this](const ConfigureRequest& request, Deadline deadline) {
    return worker_->Configure(request.config, request.replace, deadline);
  });
  Register(kLookupReference, [this](const LookupReferenceRequest& request, Deadline deadline) {
    return LookupAs(request.options, [&](bool requires_grad, EmbeddingsForm form) {
      return worker_->Lookup(request.key, requires_grad, deadline, request.options.slots, form);
    });
  });
  Register(
      kLookupDirect,
      [this](const LookupDirectRequest& request, Deadline deadline,
             Role caller) -> StatusOr<Buffer> {
        if (caller == Role::kInference && request.options.requires_grad != 0) {
          return PermissionDenied(
              "role 'inference' may not look up with requires_grad, which inserts rows; it needs "
              "trainer");
        }
        return LookupAs(request.options, [&](bool requires_grad, EmbeddingsForm form) {
          return worker_->LookupDirect(request.id_features, requires_grad, deadline,
                                       request.options.slots, form, request.original);
        });
      });
  Register(kLookupWhole, [this](const LookupWholeRequest& request, Deadline deadline) {
    return worker_->LookupWhole(request, deadline);
  });
  Register(kReturnInOrder, [this](const OrderedGradientsRequest& request, Deadline deadline) {
    const GradientsRequest& update = request.gradients;
    return worker_->ReturnGradients(update.key, update.scale, update.gradients, deadline,
                                    request.after);
  });
  Register(kReturnGradients, [this](const GradientsRequest& request, Deadline deadline) {
    return worker_->ReturnGradients(request.key, request.scale, request.gradients, deadline);
  });
  // Without the caller's deadline: the worker bounds this wait itself.
  Register(kReleaseReference,
           [this](const BatchKey& key, Deadline) { return worker_->Release(key); });
  Register(kCountEmbeddings,
           [this](const Empty&, Deadline deadline) { return worker_->Sizes(deadline); });
  Register(kClearEmbeddings,
           [this](const Empty&, Deadline deadline) { return worker_->Clear(deadline); });
  Register(kSetEmbeddings, [this](const SetRowsRequest& request, Deadline deadline) {
    return worker_->SetEmbeddings(request.blocks, request.rows, deadline);
  });
}

}  // namespace persia::worker
