#include "net/security.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "bindings/errors.h"
#include "bindings/module.h"
#include "net/audit.h"

namespace persia::bindings {
namespace {

namespace py = pybind11;
using py::literals::operator""_a;
using net::Identity;
using net::RoleKey;
using net::Security;

// Names, not numbers, cross to Python: the numbers belong to the wire.
Role ToRole(const std::string& name) {
  const auto role = ParseRole(name);
  if (!role.has_value()) {
    RaiseIfError(InvalidArgument("role is '", name,
                                 "'; it must be trainer, loader, worker, server, inference, "
                                 "monitor or admin"));
  }
  return *role;
}

// The message does not show the key.
RoleKey ToKey(const std::string& role, const py::bytes& bytes) {
  const std::string_view view = bytes;
  RoleKey key;
  if (view.size() != key.size()) {
    RaiseIfError(InvalidArgument("the key of role '", role, "' has ", view.size(),
                                 " bytes; it must have ", key.size()));
  }
  std::memcpy(key.data(), view.data(), key.size());
  return key;
}

// Before any server or channel is made: each takes the identity that it finds then
// (net/security.h).
void SetIdentity(const std::string& role, const py::bytes& key,
                 const std::map<std::string, py::bytes>& accepted) {
  Identity identity{.role = ToRole(role), .key = ToKey(role, key)};
  for (const auto& [name, of_role] : accepted) {
    identity.accepted[ToRole(name)] = ToKey(name, of_role);
  }
  Security::SetIdentity(std::move(identity));
}

void SetTls(const std::string& certificate, const std::string& key, const std::string& ca) {
  Security::SetTls(
      ValueOrRaise(WithoutGil([&] { return net::TlsFiles::Load(certificate, key, ca); })));
}

// With the GIL: there are at most kMaxAuditEvents, and the ring's lock is held for a move of the
// list.
py::list TakeAuditEvents() {
  py::list list;
  for (const net::AuditEvent& event : net::TakeAuditEvents()) {
    list.append(py::dict("time"_a = event.time_s, "peer"_a = event.peer,
                         "role"_a = RoleName(event.role), "method"_a = event.method,
                         "outcome"_a = event.outcome));
  }
  return list;
}

}  // namespace

void BindSecurity(py::module_& module) {
  module.def("set_identity", &SetIdentity, py::arg("role"), py::arg("key"), py::arg("accepted"));
  module.def("set_tls", &SetTls, py::arg("certificate"), py::arg("key"), py::arg("ca"));
  module.def("clear_security", &Security::Clear);
  module.def("take_audit_events", &TakeAuditEvents);
}

}  // namespace persia::bindings
