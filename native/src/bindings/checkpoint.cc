#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/errors.h"
#include "bindings/module.h"
#include "checkpoint/block.h"
#include "checkpoint/file_format.h"
#include "checkpoint/loader.h"
#include "checkpoint/snapshot.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;
using checkpoint::BlockEntry;
using checkpoint::BlockRows;
using checkpoint::Loader;
using checkpoint::Snapshot;
using checkpoint::SnapshotPart;

// Keys are those that persia/checkpoint reads. The GIL is kept: a header is a few hundred bytes.
py::dict ParseHeader(const py::buffer& head) {
  const BytesArgument bytes(head, "head");
  const auto header = ValueOrRaise(checkpoint::DecodeHeader(bytes.bytes()));
  return py::dict(
      "step"_a = header.step, "num_rows"_a = header.num_rows, "part"_a = header.part,
      "num_parts"_a = header.num_parts, "replica_index"_a = header.replica_index,
      "replica_size"_a = header.replica_size, "train_config"_a = header.config,
      "is_delta"_a = header.kind == checkpoint::FileKind::kRows ? 0 : 1,
      "is_from_nothing"_a = header.kind == checkpoint::FileKind::kChangesFromNothing ? 1 : 0,
      "header_bytes"_a = header.header_bytes);
}

std::pair<uint64_t, uint64_t> ParseTrailer(const py::buffer& trailer) {
  const BytesArgument bytes(trailer, "trailer");
  const auto footer = ValueOrRaise(checkpoint::DecodeTrailer(bytes.bytes()));
  return {footer.offset, footer.length};
}

// A structured array, one entry for each block: numpy selects the blocks that a reader wants.
py::array ParseFooter(const py::buffer& footer) {
  const BytesArgument bytes(footer, "footer");
  const auto blocks =
      ValueOrRaise(WithoutGil([&] { return checkpoint::DecodeFooter(bytes.bytes()); }));
  return py::array_t<BlockEntry>(static_cast<py::ssize_t>(blocks.size()), blocks.data());
}

// For tools and tests, which want rows in Python. Loading goes through CheckpointLoader, and shows
// Python no row.
std::vector<BlockRows> DecodeBlocks(const py::buffer& chunk) {
  const BytesArgument bytes(chunk, "chunk");
  return ValueOrRaise(WithoutGil([&]() -> StatusOr<std::vector<BlockRows>> {
    std::vector<BlockRows> all;
    for (checkpoint::BlockDecoder blocks(bytes.bytes()); !blocks.AtEnd();) {
      PERSIA_RETURN_IF_ERROR(blocks.Next(&all.emplace_back()));
    }
    return all;
  }));
}

// The bytes object is made when their number is known, and filled without the GIL.
py::bytes Read(SnapshotPart& self, size_t max_bytes) {
  if (max_bytes == 0) RaiseIfError(InvalidArgument("max_bytes is 0; give at least 1"));
  PyObject* result = nullptr;
  RaiseIfError(WithoutGil([&] {
    return self.Read(max_bytes, [&](size_t count) {
      const GilAcquired gil;
      result = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count));
      if (result == nullptr) throw py::error_already_set();
      return reinterpret_cast<std::byte*>(PyBytes_AS_STRING(result));
    });
  }));
  return result == nullptr ? py::bytes() : py::reinterpret_steal<py::bytes>(result);
}

// A method of the loader that is given the bytes of whole blocks.
// The bytes are Python's and stay where they are: BytesArgument holds them while the GIL is free.
template <StatusOr<uint64_t> (Loader::*method)(std::span<const std::byte>)>
uint64_t OfChunk(Loader& self, const py::buffer& chunk) {
  const BytesArgument bytes(chunk, "chunk");
  return ValueOrRaise(WithoutGil([&] { return (self.*method)(bytes.bytes()); }));
}

// The array keeps the BlockRows alive, whose memory it shows.
template <typename T>
py::array_t<T> Column(const py::object& self, const T* data, size_t num_rows, size_t width) {
  return ViewOf(data, {static_cast<py::ssize_t>(num_rows), static_cast<py::ssize_t>(width)}, self);
}

template <typename T>
py::array_t<T> Column(const py::object& self, const std::vector<T>& values) {
  return ViewOf(values.data(), {static_cast<py::ssize_t>(values.size())}, self);
}

// Columns are properties that view the decoded rows; reading one copies nothing.
void BindBlockRows(py::module_& module) {
  const auto rows = [](const py::object& self) -> const BlockRows& {
    return self.cast<const BlockRows&>();
  };
  py::class_<BlockRows>(module, "BlockRows")
      .def_property_readonly("virtual_shard",
                             [](const BlockRows& self) { return self.shape.virtual_shard; })
      .def_property_readonly(
          "is_removal",
          [](const BlockRows& self) { return self.shape.kind == checkpoint::BlockKind::kRemovals; })
      .def_property_readonly("dim", [](const BlockRows& self) { return self.shape.dim; })
      .def_property_readonly(
          "signs", [rows](const py::object& self) { return Column(self, rows(self).signs); })
      .def_property_readonly(
          "ages", [rows](const py::object& self) { return Column(self, rows(self).ages); })
      .def_property_readonly(
          "scalars", [rows](const py::object& self) { return Column(self, rows(self).scalars); })
      .def_property_readonly("embeddings",
                             [rows](const py::object& self) {
                               const BlockRows& r = rows(self);
                               return Column(self, r.embeddings(), r.signs.size(), r.shape.dim);
                             })
      .def_property_readonly("state", [rows](const py::object& self) {
        const BlockRows& r = rows(self);
        return Column(self, r.state(), r.signs.size(), r.shape.state_floats);
      });
}

// Parts are objects of the snapshot's own, so each keeps its snapshot alive.
void BindSnapshot(py::module_& module) {
  py::class_<SnapshotPart>(module, "SnapshotPart")
      .def("read", &Read, py::arg("max_bytes"))
      .def_property_readonly("num_rows", &SnapshotPart::num_rows)
      .def_property_readonly("num_bytes", &SnapshotPart::num_bytes);
  py::class_<Snapshot>(module, "Snapshot", py::release_gil_before_calling_cpp_dtor())
      .def_property_readonly("step", &Snapshot::step)
      .def_property_readonly("num_rows", &Snapshot::num_rows)
      .def_property_readonly("num_parts", &Snapshot::num_parts)
      .def_property_readonly("train_config", &Snapshot::config)
      .def(
          "part", [](Snapshot& self, uint32_t index) { return ValueOrRaise(self.part(index)); },
          py::arg("index"), py::return_value_policy::reference_internal)
      .def_property_readonly("is_from_nothing",
                             [](const Snapshot& self) {
                               return self.kind() == checkpoint::FileKind::kChangesFromNothing;
                             })
      .def("commit", Blocking(&Snapshot::Commit))
      .def("close", Blocking(&Snapshot::Close));
}

void BindLoader(py::module_& module) {
  py::class_<Loader>(module, "CheckpointLoader", py::release_gil_before_calling_cpp_dtor())
      .def("verify", &OfChunk<&Loader::Verify>, py::arg("chunk"))
      .def("replace", Blocking(&Loader::Replace))
      .def("add", &OfChunk<&Loader::Add>, py::arg("chunk"))
      .def("prepare", &OfChunk<&Loader::Prepare>, py::arg("chunk"))
      .def("apply", Blocking(&Loader::Apply))
      .def("commit", Blocking(&Loader::Commit))
      .def_property_readonly("num_rows", &Loader::num_rows)
      .def_property_readonly("num_foreign", &Loader::num_foreign)
      .def_property_readonly("num_evicted", &Loader::num_evicted);
}

}  // namespace

void BindCheckpoint(py::module_& module) {
  // Before the first array of it is made.
  PYBIND11_NUMPY_DTYPE(BlockEntry, virtual_shard, num_rows, offset, length, checksum);
  module.attr("CHECKPOINT_TRAILER_BYTES") = checkpoint::kTrailerBytes;
  BindBlockRows(module);
  BindSnapshot(module);
  BindLoader(module);
  module.def("parse_checkpoint_header", &ParseHeader, py::arg("head"));
  module.def("parse_checkpoint_trailer", &ParseTrailer, py::arg("trailer"));
  module.def("parse_checkpoint_footer", &ParseFooter, py::arg("footer"));
  module.def("decode_checkpoint_blocks", &DecodeBlocks, py::arg("chunk"));
}

}  // namespace persia::bindings
