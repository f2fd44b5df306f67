#include "net/message.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "net/tls.h"

namespace persia::net {

void EncodeHeader(const FrameHeader& header, std::span<std::byte, kHeaderBytes> out) {
  std::memcpy(out.data(), &header, kHeaderBytes);
}

// What fails here makes the rest of the stream meaningless. Whatever concerns one request only, an
// unknown method for instance, is refused by the caller and costs nothing but that request.
StatusOr<FrameHeader> DecodeHeader(std::span<const std::byte, kHeaderBytes> bytes,
                                   uint64_t max_body_bytes) {
  FrameHeader header;
  std::memcpy(&header, bytes.data(), kHeaderBytes);
  if (header.magic != kMagic) {
    return Corruption("frame: magic is ", header.magic, " instead of ", kMagic,
                      "; the peer does not speak this protocol");
  }
  if (header.kind != FrameKind::kRequest && header.kind != FrameKind::kReply) {
    return Corruption("frame: kind is ", static_cast<int>(header.kind), "; it must be 1 or 2");
  }
  if (header.body_bytes > max_body_bytes) {
    return Corruption("frame: a body of ", header.body_bytes, " bytes is above the limit of ",
                      max_body_bytes, "; send smaller batches");
  }
  return header;
}

FrameWriter::FrameWriter(FrameHeader header, const Segments& body)
    : body_(&body), body_bytes_(body.size_bytes()) {
  header.body_bytes = body_bytes_;
  EncodeHeader(header, header_);
}

std::span<const std::byte> FrameWriter::Piece(size_t index) const {
  if (index == 0) return header_;
  return body_->views[index - 1];
}

// Empty pieces are passed over as well.
void FrameWriter::Advance(size_t num_bytes) {
  offset_ += num_bytes;
  while (piece_ <= body_->views.size() && offset_ >= Piece(piece_).size()) {
    offset_ -= Piece(piece_).size();
    ++piece_;
  }
}

// One sendmsg for as many pieces as it takes: header and arrays leave from where they are, and a
// small frame leaves in one packet.
FrameWriter::Result FrameWriter::Write(int fd, TlsStream* tls) {
  if (tls != nullptr) return WriteTls(*tls);
  constexpr size_t kMaxPieces = 64;
  while (piece_ <= body_->views.size()) {
    iovec pieces[kMaxPieces];
    size_t num_pieces = 0;
    size_t size_bytes = 0;
    for (size_t i = piece_; i <= body_->views.size() && num_pieces < kMaxPieces; ++i) {
      const auto rest = Piece(i).subspan(i == piece_ ? offset_ : 0);
      if (rest.empty()) continue;
      pieces[num_pieces++] = {const_cast<std::byte*>(rest.data()), rest.size()};
      size_bytes += rest.size();
    }
    msghdr message = {};
    message.msg_iov = pieces;
    message.msg_iovlen = num_pieces;
    // No SIGPIPE: a peer that has gone is an error of this connection, not the end of the process.
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN ? Result::kBlocked : Result::kBroken;
    Advance(static_cast<size_t>(sent));
    if (static_cast<size_t>(sent) < size_bytes) return Result::kBlocked;  // the socket is full
  }
  return Result::kDone;
}

FrameWriter::Result FrameWriter::WriteTls(TlsStream& tls) {
  while (piece_ <= body_->views.size()) {
    const auto record = NextRecord();
    const ssize_t sent = tls.Write(record.data(), record.size());
    if (sent < 0 && errno == EAGAIN) return Result::kBlocked;
    if (sent <= 0) return Result::kBroken;
    Advance(static_cast<size_t>(sent));
  }
  if (tls.Flush() > 0) return Result::kDone;
  return errno == EAGAIN ? Result::kBlocked : Result::kBroken;
}

// At most what one record of TLS holds, from where it lies if one piece has that many bytes; else
// small pieces share a record. After a blocked write it is the same record again.
std::span<const std::byte> FrameWriter::NextRecord() {
  constexpr size_t kRecordBytes = 16384;
  const auto rest = Piece(piece_).subspan(offset_);
  if (rest.size() >= kRecordBytes) return rest.first(kRecordBytes);
  record_.clear();
  for (size_t i = piece_; i <= body_->views.size() && record_.size() < kRecordBytes; ++i) {
    const auto piece = Piece(i).subspan(i == piece_ ? offset_ : 0);
    const auto taken = piece.first(std::min(piece.size(), kRecordBytes - record_.size()));
    record_.insert(record_.end(), taken.begin(), taken.end());
  }
  return record_;
}

}  // namespace persia::net
