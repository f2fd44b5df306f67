// The port for predictions, and the queue behind it. Requests that Python submits wait in the same
// queue as those of the port.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/kept_memory.h"
#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/metrics.h"
#include "bindings/module.h"
#include "serving/front.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using namespace persia::serving;  // NOLINT: this file binds that layer
using net::Clock;

std::chrono::nanoseconds Nanoseconds(double seconds) {
  // 30 years: so that times that are added to it are still times.
  constexpr double kMax = 1e9;
  const double bounded = seconds > 0 ? std::min(seconds, kMax) : 0;  // none for what is no number
  return std::chrono::nanoseconds(static_cast<int64_t>(bounded * 1e9));
}

uint64_t ToNs(Clock::time_point time) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count());
}

py::bytes BytesOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// ---- the queue

// A request of Python. Its batch's thread answers it in Python; the queue tells it only that it has
// failed.
// Lives as long as any of its owners: the queue, a batch, and Python. The last of them may be a
// thread without the GIL, which the destructor therefore takes.
class PythonRequest : public Waiting {
 public:
  PythonRequest(Samples samples, Clock::time_point deadline, py::object on_failed)
      : Waiting(std::move(samples), deadline), on_failed_(std::move(on_failed)) {}
  ~PythonRequest() override {
    const GilAcquired gil;
    on_failed_ = py::object();
  }

  void Answer(const Prediction&, uint32_t) override {}
  void Fail(GrpcCode code, const std::string& message) override {
    const GilAcquired gil;
    try {
      on_failed_(static_cast<uint32_t>(code), message);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a request that failed");
    }
  }
  const py::object& on_failed() const { return on_failed_; }

 private:
  py::object on_failed_;
};

// The GIL is free while bytes are decoded and the queue's lock is waited for: handlers of other
// requests run meanwhile.
std::shared_ptr<Waiting> Submit(RequestQueue& queue, const py::buffer& content,
                                Clock::time_point deadline, py::object on_failed) {
  const BytesArgument bytes(content, "content");
  Samples samples = ValueOrRaise(WithoutGil([&] { return DecodeSamples(bytes.bytes()); }));
  auto request =
      std::make_shared<PythonRequest>(std::move(samples), deadline, std::move(on_failed));
  ToPython(WithoutGil([&] { return queue.Submit(request); }));
  return request;
}

// (on_failed, first sample, samples) of each request of Python
py::list Receivers(Batch& batch) {
  py::list receivers;
  uint32_t begin = 0;
  for (const auto& request : batch.requests()) {
    if (auto* own = dynamic_cast<PythonRequest*>(request.get()); own != nullptr) {
      receivers.append(py::make_tuple(own->on_failed(), begin, request->size()));
    }
    begin += request->size();
  }
  return receivers;
}

py::bytes Message(const Batch& batch) {
  const auto message = ValueOrRaise(WithoutGil([&] { return batch.Message(); }));
  return BytesOf(message);
}

// `outputs`: (the protocol's name of the dtype, C-contiguous array) each.
// The arrays are borrowed: `outputs` keeps them alive until every reply has been encoded.
void Answer(Batch& batch, const std::string& model_name, const std::string& version,
            const std::vector<std::string>& marks,
            const std::vector<std::pair<std::string, py::array>>& outputs) {
  Prediction prediction{model_name, version, marks, {}};
  for (const auto& [datatype, array] : outputs) {
    const bool is_contiguous = (array.flags() & py::array::c_style) != 0;
    if (array.ndim() == 0 || array.shape(0) != batch.num_samples() || !is_contiguous) {
      RaiseIfError(InvalidArgument("output ", prediction.outputs.size(),
                                   " has not a row for each of the ", batch.num_samples(),
                                   " samples, in C order"));
    }
    Output& output = prediction.outputs.emplace_back();
    output.datatype = datatype;
    output.shape.assign(array.shape() + 1, array.shape() + array.ndim());
    const auto num_bytes = static_cast<size_t>(array.nbytes());
    output.sample_bytes = num_bytes / batch.num_samples();
    output.values = {static_cast<const std::byte*>(array.data()), num_bytes};
  }
  WithoutGil([&] { batch.Answer(prediction); });
}

void Fail(Batch& batch, uint32_t code, const std::string& message) {
  WithoutGil([&] { batch.Fail(static_cast<GrpcCode>(code), message); });
}

void BindQueue(py::module_& module) {
  py::class_<Waiting, std::shared_ptr<Waiting>>(module, "QueuedRequest")
      .def("give_up", &Waiting::GiveUp);
  py::class_<Batch, std::unique_ptr<Batch>>(module, "QueuedBatch")
      .def_property_readonly("num_requests", &Batch::num_requests)
      .def_property_readonly("num_samples", &Batch::num_samples)
      .def("message", &Message)
      .def("receivers", &Receivers)
      .def("answer", &Answer, py::arg("model_name"), py::arg("version"), py::arg("marks"),
           py::arg("outputs"))
      .def("fail", &Fail, py::arg("code"), py::arg("message"))
      .def("split", [](Batch& self) { return WithoutGil([&] { return self.Split(); }); });
  py::class_<RequestQueue, std::shared_ptr<RequestQueue>>(module, "RequestQueue")
      .def(py::init([](uint32_t max_batch_size, double max_delay_s, uint32_t max_queued,
                       uint32_t num_threads) {
             return std::make_shared<RequestQueue>(
                 QueueOptions{max_batch_size, Nanoseconds(max_delay_s), max_queued, num_threads});
           }),
           py::arg("max_batch_size"), py::arg("max_delay_s"), py::arg("max_queued"),
           py::arg("num_threads"))
      .def("submit", &Submit, py::arg("content"), py::arg("timeout_s"), py::arg("on_failed"))
      .def(
          "next", [](RequestQueue& self) { return WithoutGil([&] { return self.Next(); }); },
          py::keep_alive<0, 1>())
      .def("close", Blocking(&RequestQueue::Close))
      .def_property_readonly("num_waiting", &RequestQueue::num_waiting)
      .def_property_readonly("num_running", &RequestQueue::num_running);
}

// ---- counts

// (requests by gRPC's code, ns of those answered with OK, ns of others, ms since 1970 of the last)
py::tuple CountsOf(const RequestCounts& counts) {
  const RequestCounts::Snapshot now = counts.snapshot();
  return py::make_tuple(py::cast(now.by_code), now.ok_ns, now.failed_ns, now.last_ms);
}

void BindCounts(py::module_& module) {
  py::class_<RequestCounts, std::shared_ptr<RequestCounts>>(module, "RequestCounts")
      .def(py::init<std::string>(), py::arg("name"))
      .def(
          "add",
          [](RequestCounts& self, uint64_t begin_ns, uint32_t code) {
            self.Add(ToTime(begin_ns), static_cast<GrpcCode>(code));
          },
          py::arg("begin_ns"), py::arg("code"))
      .def("snapshot", &CountsOf)
      .def("durations",
           [](const RequestCounts& self) { return SnapshotToTuple(self.durations().snapshot()); });
}

// ---- draws, and what is logged

void BindDraws(py::module_& module) {
  py::class_<Draw, std::shared_ptr<Draw>>(module, "Draw")
      .def(py::init<std::string, double>(), py::arg("purpose"), py::arg("share"))
      .def_property("share", &Draw::share, &Draw::set_share)
      .def(
          "takes",
          [](const Draw& self, const py::bytes& id) { return self.Takes(std::string_view(id)); },
          py::arg("id"));
  py::class_<AnsweredRequests, std::shared_ptr<AnsweredRequests>>(module, "AnsweredRequests")
      .def(py::init([](const std::shared_ptr<Draw>& draw) {
             return std::make_shared<AnsweredRequests>(draw);
           }),
           py::arg("draw"))
      .def(
          "offer",
          [](AnsweredRequests& self, const py::function& to_bytes) {
            if (!self.HasRoom()) return;
            const py::buffer batch = to_bytes();
            const BytesArgument bytes(batch, "to_bytes()");
            const auto content = bytes.bytes();
            self.Offer(std::vector<std::byte>(content.begin(), content.end()));
          },
          py::arg("to_bytes"))
      .def("next",
           [](AnsweredRequests& self) -> py::object {
             const auto next = WithoutGil([&] { return self.Next(); });
             if (!next.has_value()) return py::none();
             return BytesOf(ValueOrRaise(*next));
           })
      .def("close", Blocking(&AnsweredRequests::Close))
      .def_property_readonly("num_dropped", &AnsweredRequests::num_dropped);
}

// ---- the port

// It joins the network's thread.
struct DeleteWithoutGil {
  void operator()(Front* front) const {
    WithoutGil([&] { delete front; });
  }
};

std::unique_ptr<Front, DeleteWithoutGil> MakeFront(
    std::vector<FrontModel> models, std::shared_ptr<RequestCounts> counts,
    std::chrono::milliseconds timeout, uint64_t max_message_bytes, uint32_t max_calls,
    const std::optional<py::bytes>& token_digest,
    const std::optional<std::tuple<std::string, std::string, std::string>>& tls) {
  FrontOptions options;
  options.timeout = timeout;
  options.grpc.max_message_bytes = max_message_bytes;
  // A few of the largest always fit.
  options.grpc.max_held_bytes = std::max(options.grpc.max_held_bytes, 4 * max_message_bytes);
  options.grpc.max_calls = max_calls;
  if (token_digest.has_value()) {
    const std::string_view digest = *token_digest;
    options.token_digest.emplace();
    if (digest.size() != options.token_digest->size()) {
      RaiseIfError(InvalidArgument("token_digest has ", digest.size(), " bytes: give 32"));
    }
    std::memcpy(options.token_digest->data(), digest.data(), digest.size());
  }
  if (tls.has_value()) {
    const auto& [certificate, key, ca] = *tls;
    options.grpc.tls = ValueOrRaise(WithoutGil(
        [&] { return net::TlsFiles::Load(certificate, key, ca, net::TlsFiles::Use::kHttp2); }));
  }
  return std::unique_ptr<Front, DeleteWithoutGil>(
      new Front(std::move(options), std::move(models), std::move(counts)));
}

using IdsTuple = std::tuple<std::string, uint64_t>;
using DenseTuple = std::tuple<std::string, uint8_t, std::vector<int64_t>>;

// Without a signature nothing is known of names, so tensors by name are left to Python whatever
// `by_name` says.
void SetInputs(Front& front, const std::string& model_name,
               const std::optional<std::vector<IdsTuple>>& ids,
               const std::vector<DenseTuple>& dense, bool by_name, bool allow_nonfinite) {
  auto inputs = std::make_shared<ModelInputs>();
  inputs->model_name = model_name;
  inputs->has_signature = ids.has_value();
  for (const auto& [name, limit] : ids.value_or(std::vector<IdsTuple>())) {
    inputs->ids.push_back({name, limit});
  }
  for (const auto& [name, dtype, shape] : dense) {
    if (dtype >= kNumDtypes) {
      RaiseIfError(InvalidArgument("dense feature '", name, "' has the dtype number ", dtype));
    }
    inputs->dense.push_back({name, dtype, shape});
  }
  inputs->by_name = by_name && ids.has_value();
  inputs->allow_nonfinite = allow_nonfinite;
  front.SetInputs(std::move(inputs));
}

// A header field's bytes need not be UTF-8.
py::object TextOf(const std::optional<std::string>& text) {
  if (!text.has_value()) return py::none();
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeLatin1(text->data(), static_cast<Py_ssize_t>(text->size()), nullptr));
}

// (call, kind, what it says): see _core.pyi.
py::object SaidBy(const CallEvent& event) {
  switch (event.kind) {
    case CallEvent::Kind::kCall: {
      py::object deadline_ns = py::none();
      if (event.head.deadline.has_value()) deadline_ns = py::int_(ToNs(*event.head.deadline));
      return py::make_tuple(TextOf(event.head.method), TextOf(event.head.authorization),
                            TextOf(event.head.encoding), event.head.peer, ToNs(event.head.arrived),
                            deadline_ns, event.head.draw_id);
    }
    case CallEvent::Kind::kMessage:
      return py::make_tuple(BytesOf(event.message.bytes), event.message.is_compressed);
    case CallEvent::Kind::kEnd:
    case CallEvent::Kind::kClosed: break;
  }
  return py::none();
}

// Texts are made after the front's lock is free: building Python objects may run the garbage
// collector.
py::list TakeEvents(Front& front) {
  constexpr std::array<const char*, 4> kKinds = {"call", "message", "end", "closed"};
  py::list events;
  for (const CallEvent& event : WithoutGil([&] { return front.TakeEvents(); })) {
    events.append(
        py::make_tuple(event.call, kKinds[static_cast<size_t>(event.kind)], SaidBy(event)));
  }
  return events;
}

void BindFront(py::module_& module) {
  py::class_<FrontModel>(module, "FrontModel")
      .def(py::init([](std::string name, std::shared_ptr<RequestQueue> queue,
                       std::shared_ptr<RequestCounts> counts, std::shared_ptr<Draw> canary,
                       std::shared_ptr<Draw> shadow, std::shared_ptr<AnsweredRequests> log) {
             return FrontModel{std::move(name),   std::move(queue),  std::move(counts),
                               std::move(canary), std::move(shadow), std::move(log)};
           }),
           py::arg("name"), py::arg("queue"), py::arg("counts"), py::arg("canary") = nullptr,
           py::arg("shadow") = nullptr, py::arg("log") = nullptr);
  py::class_<Front, std::unique_ptr<Front, DeleteWithoutGil>>(module, "ServingFront")
      .def(py::init(&MakeFront), py::arg("models"), py::arg("counts"), py::arg("timeout_s"),
           py::arg("max_message_bytes"), py::arg("max_calls"),
           py::arg("token_digest") = std::nullopt, py::arg("tls") = std::nullopt)
      .def("start", Blocking(&Front::Start), py::arg("host"), py::arg("port"))
      .def("stop", Blocking(&Front::Stop), py::arg("timeout_s"))
      .def("set_inputs", &SetInputs, py::arg("model_name"), py::arg("ids"), py::arg("dense"),
           py::arg("by_name"), py::arg("allow_nonfinite"))
      .def(
          "check_tensors",
          [](const Front& self, const py::bytes& message) {
            RaiseIfError(self.CheckTensors(std::as_bytes(std::span(std::string_view(message)))));
          },
          py::arg("message"))
      .def("fileno", &Front::events_fd)
      .def("take_events", &TakeEvents)
      .def(
          "send",
          [](Front& self, CallId call, std::string message) {
            self.Send(call, std::move(message));
          },
          py::arg("call"), py::arg("message"))
      .def(
          "finish",
          [](Front& self, CallId call, uint32_t code, std::string text) {
            self.Finish(call, static_cast<GrpcCode>(code), std::move(text));
          },
          py::arg("call"), py::arg("code"), py::arg("text"));
}

}  // namespace

void BindServing(py::module_& module) {
  BindQueue(module);
  BindCounts(module);
  BindDraws(module);
  BindFront(module);
  module.def("keep_freed_memory", &KeepFreedMemory);
  module.def("kept_memory_bytes", &KeptMemoryBytes);
}

}  // namespace persia::bindings
