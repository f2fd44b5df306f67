#include "worker/embeddings_message.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>

#include "base/bytes.h"

namespace persia::worker {
namespace {

constexpr uint32_t kBatchSize = 3;

// The fields of a slot as they lie on the wire, right or wrong.
struct WireSlot {
  std::string name;
  uint8_t kind = 0;
  uint32_t dim = 0;
  uint32_t num_rows = 0;
  uint32_t sample_fixed_size = 0;
  std::vector<int64_t> index = {};
  std::vector<uint32_t> sample_num_ids = {};
  std::vector<float> rows = {};
};

WireSlot Pooled() {
  return {.name = "age", .dim = 1, .num_rows = kBatchSize, .rows = {0.5f, 1.5f, 2.5f}};
}
WireSlot Raw() {
  return {.name = "items",
          .kind = 1,
          .dim = 2,
          .num_rows = 2,
          .sample_fixed_size = 2,
          .index = {1, 0, 0, 0, 1, 1},
          .sample_num_ids = {1, 0, 4},
          .rows = {0, 0, 7, 8}};
}

void Put(const WireSlot& slot, ByteWriter* writer) {
  writer->Put(static_cast<uint32_t>(slot.name.size()));
  writer->Put(slot.kind);
  writer->Put(uint8_t{0});
  writer->Put(uint16_t{0});
  writer->Put(slot.dim);
  writer->Put(slot.num_rows);
  writer->Put(slot.sample_fixed_size);
  writer->Put(uint32_t{0});
  writer->PutString(slot.name);
  writer->PutArray(std::span(slot.index));
  writer->PutArray(std::span(slot.sample_num_ids));
  writer->PutArray(std::span(slot.rows));
}

std::vector<std::byte> Message(const std::vector<WireSlot>& slots,
                               uint32_t batch_size = kBatchSize) {
  ByteWriter writer;
  writer.Put(uint64_t{11});
  writer.Put(uint64_t{22});
  writer.Put(static_cast<uint32_t>(slots.size()));
  writer.Put(batch_size);
  for (const WireSlot& slot : slots) Put(slot, &writer);
  return writer.Release();
}

StatusOr<LookupResult> Decode(std::span<const std::byte> bytes) {
  Buffer message(bytes.size());
  if (!bytes.empty()) std::memcpy(message.data(), bytes.data(), bytes.size());
  return DecodeEmbeddings(4, std::move(message));
}

TEST(EmbeddingsDecoderTest, ReadsWhatAWorkerSends) {
  auto result = Decode(Message({Pooled(), Raw()}));
  ASSERT_TRUE(result.ok()) << result.status().ToString();
  EXPECT_EQ(result->reference.worker_index, 4u);
  EXPECT_EQ(result->reference.worker_incarnation, 11u);
  EXPECT_EQ(result->reference.reference, 22u);
  EXPECT_EQ(result->batch_size, kBatchSize);
  ASSERT_EQ(result->slots.size(), 2u);
  const SlotEmbedding& pooled = result->slots[0];
  EXPECT_EQ(pooled.name, "age");
  EXPECT_FALSE(pooled.raw);
  EXPECT_EQ(pooled.index, nullptr);
  EXPECT_EQ(std::vector<float>(pooled.rows, pooled.rows + 3), Pooled().rows);
  const SlotEmbedding& raw = result->slots[1];
  EXPECT_TRUE(raw.raw);
  EXPECT_EQ(raw.num_rows, 2u);
  EXPECT_EQ(std::vector<int64_t>(raw.index, raw.index + 6), Raw().index);
  EXPECT_EQ(std::vector<uint32_t>(raw.sample_num_ids, raw.sample_num_ids + 3),
            Raw().sample_num_ids);
  EXPECT_EQ(std::vector<float>(raw.rows, raw.rows + 4), Raw().rows);
}

TEST(EmbeddingsDecoderTest, ArraysLieInTheStorage) {
  auto result = Decode(Message({Raw()}));
  ASSERT_TRUE(result.ok());
  const std::byte* begin = result->storage.data();
  const std::byte* end = begin + result->storage.size();
  const SlotEmbedding& slot = result->slots[0];
  for (const void* array :
       {static_cast<const void*>(slot.rows), static_cast<const void*>(slot.index),
        static_cast<const void*>(slot.sample_num_ids)}) {
    EXPECT_GE(array, begin);
    EXPECT_LT(array, end);
  }
}

TEST(EmbeddingsDecoderTest, EveryTruncationIsRefused) {
  const auto message = Message({Pooled(), Raw()});
  for (size_t size = 0; size < message.size(); ++size) {
    EXPECT_EQ(Decode(std::span(message).first(size)).status().code(), StatusCode::kCorruption)
        << size << " bytes";
  }
}

TEST(EmbeddingsDecoderTest, LeftOverBytesAreRefused) {
  auto message = Message({Pooled()});
  message.resize(message.size() + 8);
  EXPECT_EQ(Decode(message).status().code(), StatusCode::kCorruption);
}

// A good slot with one field changed, and what the refusal says.
struct BadSlot {
  const char* what;
  WireSlot slot;
  std::function<void(WireSlot*)> spoil;
  const char* message;
};

TEST(EmbeddingsDecoderTest, WrongFieldsAreNamed) {
  const std::vector<BadSlot> cases = {
      {"no name", Pooled(), [](WireSlot* s) { s->name.clear(); }, "has no name"},
      {"kind", Pooled(), [](WireSlot* s) { s->kind = 4; }, "'age': its kind is 4"},
      {"absent", Pooled(), [](WireSlot* s) { s->kind = 2; }, "'age': it is absent and has rows"},
      {"dim 0", Pooled(), [](WireSlot* s) { s->dim = 0; }, "'age': its dim is 0"},
      {"dim", Pooled(), [](WireSlot* s) { s->dim = 65537; }, "'age': its dim is 65537"},
      {"rows", Pooled(), [](WireSlot* s) { s->num_rows = 2; }, "'age': a pooled slot"},
      {"size", Pooled(), [](WireSlot* s) { s->sample_fixed_size = 1; }, "'age': a pooled slot"},
      {"padding", Raw(), [](WireSlot* s) { s->num_rows = 0; }, "'items': its row 0"},
      {"index", Raw(), [](WireSlot* s) { s->index[5] = 2; }, "'items': an index"},
      {"negative", Raw(), [](WireSlot* s) { s->index[0] = -1; }, "'items': an index"},
  };
  for (BadSlot bad : cases) {
    bad.spoil(&bad.slot);
    const Status status = Decode(Message({bad.slot})).status();
    EXPECT_EQ(status.code(), StatusCode::kCorruption) << bad.what;
    EXPECT_NE(status.message().find(bad.message), std::string::npos)
        << bad.what << ": " << status.message();
  }
}

TEST(EmbeddingsDecoderTest, CountsAreCheckedBeforeTheyAreFollowed) {
  EXPECT_EQ(Decode(Message({}, 65536)).status().code(), StatusCode::kCorruption);
  auto message = Message({});
  const uint32_t num_slots = 0xffffffff;
  std::memcpy(message.data() + 16, &num_slots, sizeof(num_slots));
  EXPECT_EQ(Decode(message).status().code(), StatusCode::kCorruption);
  WireSlot huge = Raw();
  huge.num_rows = 0xffffffff;
  EXPECT_EQ(Decode(Message({huge})).status().code(), StatusCode::kCorruption);
  huge = Raw();
  huge.sample_fixed_size = 0xffffffff;
  EXPECT_EQ(Decode(Message({huge})).status().code(), StatusCode::kCorruption);
}

TEST(EmbeddingsDecoderTest, ASlotTwiceIsRefused) {
  const Status status = Decode(Message({Pooled(), Pooled()})).status();
  EXPECT_EQ(status.code(), StatusCode::kCorruption);
  EXPECT_NE(status.message().find("'age': it appears twice"), std::string::npos);
}

}  // namespace
}  // namespace persia::worker
