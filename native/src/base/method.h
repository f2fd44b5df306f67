// Method: one RPC method as data. Its number and name, and the types of its request and reply.
//
// A plane (worker to server, client to worker) is a header with one constant per method:
//
//   inline constexpr Method<LookupRowsRequest, ServerRows> kLookupRows{{17, "LookupRows"}};
//
// net/rpc.h makes the client's stub, the server's handler, every check of a body's form and the
// text of its errors from such a constant, so a method is described in one place only.
//
// A message type is one of
//  * Empty: no body;
//  * a trivially copyable struct: its bytes, and nothing else;
//  * std::span<const T> or std::vector<T> of such a struct: the elements;
//  * Buffer: a body that the receiver decodes itself;
//  * a class with `Segments Encode() &&` and a static `Decode` of std::span<const std::byte> (its
//    views then point into the bytes) or of Buffer (it takes the bytes over).
//
// Bodies start at a multiple of 8 (a Buffer does), and a decoder refuses what does not have the
// form, with nothing left over, by kCorruption. Nothing is allocated from an unchecked length.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/role.h"
#include "base/status.h"

namespace persia {

// A message to send, in segments that one scatter/gather call writes from where they lie. `owned`
// keeps alive what the segments of a reply point to; the caller keeps those of a request alive
// until its call returns.
// Movable; a copy shares what is owned. The views may be of any number and length, empty ones
// included.
struct Segments {
  std::vector<std::span<const std::byte>> views;
  std::vector<std::shared_ptr<const void>> owned;

  // Nothing is copied: the bytes must stay until the message is sent.
  void AddView(std::span<const std::byte> view) { views.push_back(view); }
  // Take over the bytes and append a view of them.
  void AddOwned(std::vector<std::byte> bytes);
  void AddOwned(Buffer buffer);
  // Appends a view of the elements, and zeros up to the next multiple of 8.
  template <typename T>
  void AddArray(std::span<const T> values) {
    AddView(std::as_bytes(values));
    AddPadding(values.size_bytes());
  }
  // Zeros from `size_bytes` up to the next multiple of 8. The receiver's alignment depends on it:
  // every array of a body begins at a multiple of 8 of the body.
  void AddPadding(uint64_t size_bytes);
  // The body's length on the wire.
  uint64_t size_bytes() const;
};

// What a connection needs to know of a method. Constants of this type live as long as the program,
// so `name` views a literal.
struct MethodId {
  uint8_t number = 0;  // on the wire; never used again for another method
  std::string_view name;
  RoleSet callers = {};  // who may call it where processes have identities
  bool audited = false;  // each call is recorded: it changes settings or rows by hand
};

// One method of a plane. Values of this type are constants at namespace scope, and handlers keep
// copies. The types are for the compiler alone: stubs and handlers of one plane cannot be confused
// with those of another.
template <typename RequestT, typename ReplyT>
struct Method : MethodId {
  using Request = RequestT;
  using Reply = ReplyT;
};

// A message without a body. A body that has bytes all the same is refused.
struct Empty {};

// What a call gives, and what a handler returns: a Status where there is no reply body.
// A caller thus never unpacks an Empty, and a handler of such a method just returns its Status.
template <typename Reply>
using Result = std::conditional_t<std::is_same_v<Reply, Empty>, Status, StatusOr<Reply>>;

namespace internal {

// A view, whose bytes another owns, or a vector.
template <typename T>
concept HasElements = requires { typename T::value_type; };
template <typename T>
concept IsView = requires { typename T::element_type; };

// The texts are completed by net/rpc.h, which knows the method and the peer: "a CountRows request:
// it has 3 bytes instead of 0".
Status WrongSize(size_t size_bytes, size_t expected_bytes);
Status NotOfElements(size_t size_bytes, size_t element_bytes);

}  // namespace internal

// The message is consumed: what it owns, the segments own.
// A span stays a view of the caller's memory and is not copied, which is what makes sending signs
// and gradients free. A vector or a struct is copied, since it ends with this call: use them for
// small messages.
template <typename T>
Segments EncodeMessage(T message) {
  Segments segments;
  if constexpr (std::is_same_v<T, Empty>) {
    return segments;
  } else if constexpr (std::is_same_v<T, Buffer>) {
    segments.AddOwned(std::move(message));
  } else if constexpr (internal::IsView<T>) {
    segments.AddView(std::as_bytes(message));
  } else if constexpr (internal::HasElements<T>) {
    const auto bytes = std::as_bytes(std::span(message));
    segments.AddOwned(std::vector<std::byte>(bytes.begin(), bytes.end()));
  } else if constexpr (requires { std::move(message).Encode(); }) {
    return std::move(message).Encode();
  } else {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto bytes = std::as_bytes(std::span(&message, 1));
    segments.AddOwned(std::vector<std::byte>(bytes.begin(), bytes.end()));
  }
  return segments;
}

// Views of the message point into `body`, which must outlive it.
// The body begins at a multiple of 8, as that of a Buffer does: elements are used in place, so
// their type needs no larger alignment. Values are not checked here; that is left to a message's
// own Decode or to the handler.
template <typename T>
StatusOr<T> DecodeMessage(std::span<const std::byte> body) {
  if constexpr (std::is_same_v<T, Empty>) {
    if (!body.empty()) return internal::WrongSize(body.size(), 0);
    return Empty();
  } else if constexpr (internal::HasElements<T>) {
    using Element = typename T::value_type;
    if (body.size() % sizeof(Element) != 0) {
      return internal::NotOfElements(body.size(), sizeof(Element));
    }
    const auto* begin = reinterpret_cast<const Element*>(body.data());
    const std::span<const Element> elements(begin, body.size() / sizeof(Element));
    return T(elements.begin(), elements.end());
  } else if constexpr (requires { T::Decode(body); }) {
    return T::Decode(body);
  } else {
    static_assert(std::is_trivially_copyable_v<T>);
    if (body.size() != sizeof(T)) return internal::WrongSize(body.size(), sizeof(T));
    T value;
    std::memcpy(&value, body.data(), sizeof(T));
    return value;
  }
}

// Takes the body over, for a message that owns its bytes.
// Chosen for replies. A message of views is refused by the compiler, because the body would end
// with this call.
template <typename T>
StatusOr<T> DecodeMessage(Buffer body) {
  if constexpr (std::is_same_v<T, Buffer>) {
    return body;
  } else if constexpr (requires { T::Decode(std::move(body)); }) {
    return T::Decode(std::move(body));
  } else {
    static_assert(!internal::IsView<T>, "a view of a body that ends here");
    return DecodeMessage<T>(std::as_const(body).span());
  }
}

}  // namespace persia
