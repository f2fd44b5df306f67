// Requests of the Open Inference Protocol, and a client of gRPC, for the tests of this layer.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <nghttp2/nghttp2.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "net/poller.h"
#include "serving/infer_request.h"
#include "serving/proto.h"

namespace persia::serving::testing {

inline std::span<const std::byte> BytesOf(std::string_view text) {
  return std::as_bytes(std::span(text));
}

template <typename T>
std::string Raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// One ID feature "user" of an ID a sample, and one dense feature "age", float32 [n, 1].
inline std::string BatchOf(const std::vector<uint64_t>& ids, const std::vector<float>& ages) {
  std::vector<uint32_t> offsets(ids.size() + 1);
  for (uint32_t i = 0; i <= ids.size(); ++i) offsets[i] = i;
  const auto size = static_cast<uint32_t>(ids.size());
  const auto id_section =
      EncodeIdFeatures({.batch_size = size, .features = {{"user", offsets, ids}}}).value();
  ByteWriter dense;
  for (const uint32_t field : {0x534e4450u, 1u, size, 1u, 0xffffffffu, 0u}) dense.Put(field);
  for (const uint8_t field : {0, 8, 2, 0}) dense.Put(field);
  dense.Put(uint32_t{3});
  dense.Put(uint64_t{size});
  dense.Put(uint64_t{1});
  dense.PutString("age");
  dense.PutArray(std::span(ages));
  ByteWriter batch;
  for (const uint32_t field : {0x54414250u, 1u, 0u, 0u}) batch.Put(field);
  batch.Put(uint64_t{id_section.size()});
  batch.Put(uint64_t{dense.size()});
  batch.PutBytes(id_section.data(), id_section.size());
  batch.PutBytes(dense.span().data(), dense.size());
  const auto bytes = batch.Release();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline std::string InputOf(std::string_view name, std::string_view datatype,
                           const std::vector<uint64_t>& shape, std::string_view contents = "") {
  std::string input;
  ProtoWriter writer(&input);
  writer.Bytes(1, name);
  writer.Bytes(2, datatype);
  std::string sizes;
  for (const uint64_t size : shape) ProtoWriter(&sizes).Varint(size);
  writer.Bytes(3, sizes);
  if (!contents.empty()) writer.Bytes(5, contents);
  return input;
}

// A request with the bytes of a batch.
inline std::string RequestOf(std::string_view batch, std::string_view model = "m") {
  std::string contents;
  ProtoWriter(&contents).Bytes(8, batch);
  std::string request;
  ProtoWriter writer(&request);
  writer.Bytes(1, model);
  writer.Bytes(3, "id-7");
  writer.Bytes(5, InputOf("batch", "BYTES", {1}, contents));
  return request;
}

inline ModelInputs Inputs() {
  return {.model_name = "m",
          .has_signature = true,
          .ids = {{"user"}},
          .dense = {{"age", 8, {1}}},
          .by_name = true,
          .allow_nonfinite = false};
}

// A socket that fails after a minute without bytes. `receive_buffer` 0: the system's.
inline net::UniqueFd NewSocket(int receive_buffer = 0) {
  net::UniqueFd made(::socket(AF_INET, SOCK_STREAM, 0));
  const timeval patience = {.tv_sec = 60, .tv_usec = 0};
  ::setsockopt(made.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  if (receive_buffer != 0) {
    ::setsockopt(made.get(), SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
  }
  return made;
}

inline net::UniqueFd Connected(net::UniqueFd socket, uint16_t port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  ::inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  EXPECT_EQ(::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)),
            0);
  return socket;
}
inline net::UniqueFd Connect(uint16_t port, int receive_buffer = 0) {
  return Connected(NewSocket(receive_buffer), port);
}

// Blocks. Each call is a stream of one connection.
class Client {
 public:
  struct Options {
    std::vector<nghttp2_settings_entry> settings = {};
    int32_t window = 0;      // of the connection; 0: HTTP/2's
    int receive_buffer = 0;  // of the socket; 0: the system's
  };
  struct Answer {
    bool is_closed = false;
    uint32_t error = 0;   // of HTTP/2
    std::string status;   // grpc-status, or :status of HTTP where it is not 200
    std::string message;  // grpc-message
    std::string body;     // without its prefix
  };

  explicit Client(uint16_t port) : Client(port, Options()) {}
  Client(uint16_t port, const Options& options)
      : Client(Connect(port, options.receive_buffer), options) {}
  Client(net::UniqueFd socket, const Options& options) : socket_(std::move(socket)) {
    nghttp2_session_callbacks* callbacks = nullptr;
    nghttp2_session_callbacks_new(&callbacks);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, &OnHeader);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, &OnData);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, &OnClosed);
    nghttp2_session_client_new(&session_, callbacks, this);
    nghttp2_session_callbacks_del(callbacks);
    nghttp2_submit_settings(session_, NGHTTP2_FLAG_NONE, options.settings.data(),
                            options.settings.size());
    if (options.window != 0) {
      nghttp2_session_set_local_window_size(session_, NGHTTP2_FLAG_NONE, 0, options.window);
    }
  }
  Client(const Client&) = delete;
  ~Client() { nghttp2_session_del(session_); }

  // `fields` beside those of every call.
  int32_t Begin(const std::string& path, std::string_view message,
                const std::map<std::string, std::string>& fields = {}) {
    std::string body(5, '\0');
    for (int i = 0; i < 4; ++i) body[4 - i] = static_cast<char>(message.size() >> (8 * i));
    return BeginWithBody(path, body.append(message), fields);
  }
  int32_t BeginWithBody(const std::string& path, std::string body,
                        const std::map<std::string, std::string>& fields = {}) {
    std::map<std::string, std::string> all = {{":method", "POST"},
                                              {":path", path},
                                              {":scheme", "http"},
                                              {":authority", "server"},
                                              {"content-type", "application/grpc"}};
    for (const auto& [name, value] : fields) all[name] = value;
    std::vector<nghttp2_nv> headers;
    for (const auto& [name, value] : all) {
      headers.push_back({reinterpret_cast<uint8_t*>(const_cast<char*>(name.data())),
                         reinterpret_cast<uint8_t*>(const_cast<char*>(value.data())), name.size(),
                         value.size(), NGHTTP2_NV_FLAG_NONE});
    }
    const nghttp2_data_provider provider = {.source = {.ptr = this}, .read_callback = &ReadBody};
    const int32_t id = nghttp2_submit_request(session_, nullptr, headers.data(), headers.size(),
                                              &provider, nullptr);
    bodies_[id] = std::move(body);
    if (stops_) endless_.insert(id);
    SendAll();
    return id;
  }
  // Sends `body` and no end.
  int32_t BeginAndStop(const std::string& path, std::string body) {
    stops_ = true;
    const int32_t id = BeginWithBody(path, std::move(body));
    stops_ = false;
    return id;
  }
  // More of such a body.
  void Continue(int32_t id, std::string_view bytes) {
    bodies_[id].append(bytes);
    nghttp2_session_resume_data(session_, id);
    SendAll();
  }
  void Cancel(int32_t id) {
    nghttp2_submit_rst_stream(session_, NGHTTP2_FLAG_NONE, id, NGHTTP2_CANCEL);
    SendAll();
  }
  // Waits until the call has ended; an Answer that is not closed where the server has hung up.
  Answer End(int32_t id) {
    std::array<uint8_t, 4096> bytes;
    while (!answers_[id].is_closed) {
      const ssize_t size = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
      if (size <= 0) break;
      nghttp2_session_mem_recv(session_, bytes.data(), static_cast<size_t>(size));
      SendAll();
    }
    return answers_[id];
  }
  // What of its body was not sent.
  size_t unsent(int32_t id) const { return bodies_.at(id).size(); }
  uint32_t stream_window() const {
    return nghttp2_session_get_remote_settings(session_, NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE);
  }
  uint32_t max_streams() const {
    return nghttp2_session_get_remote_settings(session_, NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS);
  }
  Answer Call(const std::string& path, std::string_view message,
              const std::map<std::string, std::string>& fields = {}) {
    return End(Begin(path, message, fields));
  }

 private:
  static int OnHeader(nghttp2_session*, const nghttp2_frame* frame, const uint8_t* name,
                      size_t name_size, const uint8_t* value, size_t value_size, uint8_t,
                      void* self) {
    Answer& answer = static_cast<Client*>(self)->answers_[frame->hd.stream_id];
    const std::string field(reinterpret_cast<const char*>(name), name_size);
    const std::string text(reinterpret_cast<const char*>(value), value_size);
    if (field == "grpc-status" || (field == ":status" && text != "200")) answer.status = text;
    if (field == "grpc-message") answer.message = text;
    return 0;
  }
  static int OnData(nghttp2_session*, uint8_t, int32_t id, const uint8_t* data, size_t size,
                    void* self) {
    static_cast<Client*>(self)->answers_[id].body.append(reinterpret_cast<const char*>(data), size);
    return 0;
  }
  static int OnClosed(nghttp2_session*, int32_t id, uint32_t error, void* self) {
    Answer& answer = static_cast<Client*>(self)->answers_[id];
    answer.is_closed = true;
    answer.error = error;
    answer.body.erase(0, 5);
    return 0;
  }
  static ssize_t ReadBody(nghttp2_session*, int32_t id, uint8_t* to, size_t size, uint32_t* flags,
                          nghttp2_data_source*, void* self) {
    auto& client = *static_cast<Client*>(self);
    std::string& body = client.bodies_[id];
    if (body.empty() && client.endless_.contains(id)) return NGHTTP2_ERR_DEFERRED;
    const size_t taken = std::min(size, body.size());
    std::memcpy(to, body.data(), taken);
    body.erase(0, taken);
    if (body.empty() && !client.endless_.contains(id)) *flags |= NGHTTP2_DATA_FLAG_EOF;
    return static_cast<ssize_t>(taken);
  }
  void SendAll() {
    const uint8_t* bytes = nullptr;
    while (true) {
      const ssize_t size = nghttp2_session_mem_send(session_, &bytes);
      if (size <= 0) return;
      ::send(socket_.get(), bytes, static_cast<size_t>(size), MSG_NOSIGNAL);
    }
  }

  net::UniqueFd socket_;
  nghttp2_session* session_ = nullptr;
  std::map<int32_t, std::string> bodies_;
  std::set<int32_t> endless_;  // whose body has no end
  bool stops_ = false;         // calls that begin now have none
  std::map<int32_t, Answer> answers_;
};

}  // namespace persia::serving::testing
