// Which requests are answered without Python, and what they become.
#include "serving/infer_request.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "serving/serving_test_util.h"

namespace persia::serving {
namespace {

using namespace testing;  // NOLINT: this layer's own test helpers

StatusOr<std::optional<InferRequest>> ReadBytes(std::span<const std::byte> request,
                                                const ModelInputs& inputs = Inputs()) {
  const auto inputs_of = [&](std::string_view name) {
    return name == inputs.model_name ? &inputs : nullptr;
  };
  return ReadInferRequest(request, inputs_of, MaxTensorsOf(inputs));
}

std::optional<InferRequest> Read(const std::string& request, const ModelInputs& inputs = Inputs()) {
  return ReadBytes(BytesOf(request), inputs).value();
}

// A request with tensors by name, each with its raw bytes.
struct Named {
  std::string name, datatype;
  std::vector<uint64_t> shape;
  std::string raw;
};

std::string NamedRequest(const std::vector<Named>& tensors) {
  std::string request;
  ProtoWriter writer(&request);
  writer.Bytes(1, "m");
  for (const Named& tensor : tensors) {
    writer.Bytes(5, InputOf(tensor.name, tensor.datatype, tensor.shape));
  }
  for (const Named& tensor : tensors) writer.Bytes(7, tensor.raw);
  return request;
}

const std::vector<uint64_t> kIds = {10, 20};
const std::vector<float> kAges = {0.5f, 1.5f};
const Named kAge = {"age", "FP32", {2, 1}, Raw(kAges)};
const Named kUser = {"user", "INT64", {2}, Raw(kIds)};

template <typename T, typename Span>
std::vector<T> Listed(const Span& values) {
  return {values.begin(), values.end()};
}

TEST(InferRequestTest, BytesOfABatch) {
  const auto request = Read(RequestOf(BatchOf(kIds, kAges)));
  ASSERT_TRUE(request.has_value());
  EXPECT_EQ(request->id, "id-7");
  const Samples& samples = request->samples;
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(Listed<uint64_t>(samples.ids.features[0].ids), kIds);
  EXPECT_EQ(samples.dense[0].name, "age");
  EXPECT_EQ(samples.dense[0].values.size(), sizeof(float) * 2);
}

TEST(InferRequestTest, TensorsByNameInAnyOrder) {
  for (const auto& tensors : {std::vector{kAge, kUser}, std::vector{kUser, kAge}}) {
    const auto request = Read(NamedRequest(tensors));
    ASSERT_TRUE(request.has_value());
    const std::vector<const Samples*> parts = {&request->samples};
    EXPECT_EQ(Raw(Merge(parts).value()), BatchOf(kIds, kAges));
  }
}

TEST(InferRequestTest, LengthsAndWeights) {
  const std::vector<Named> tensors = {
      kAge,
      {"user", "UINT64", {3}, Raw(std::vector<uint64_t>{7, 8, 9})},
      {"user.lengths", "INT32", {2}, Raw(std::vector<int32_t>{0, 3})},
      {"user.weights", "FP32", {3}, Raw(std::vector<float>{1, 2, 3})}};
  const auto request = Read(NamedRequest(tensors));
  ASSERT_TRUE(request.has_value());
  const IdFeature& user = request->samples.ids.features[0];
  EXPECT_EQ(Listed<uint32_t>(user.offsets), (std::vector<uint32_t>{0, 0, 3}));
  EXPECT_EQ(user.weights.size(), 3u);
  // Each of these is for Python, which explains it.
  for (const auto& lengths : {std::vector<int32_t>{1, 1}, {-1, 4}, {4, -1}, {2147483647, 4}}) {
    auto wrong = tensors;
    wrong[2].raw = Raw(lengths);
    EXPECT_FALSE(Read(NamedRequest(wrong)).has_value());
  }
}

TEST(InferRequestTest, WhatIsNotPlainIsLeftToPython) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(Read(RequestOf(BatchOf(kIds, {nan, 1}))).has_value());
  EXPECT_FALSE(Read(RequestOf(BatchOf(kIds, kAges), "other")).has_value());
  EXPECT_FALSE(Read(RequestOf("no batch")).has_value());
  std::string versioned = RequestOf(BatchOf(kIds, kAges));
  ProtoWriter(&versioned).Bytes(2, "7");
  EXPECT_FALSE(Read(versioned).has_value());
  for (const Named& wrong :
       std::vector<Named>{{"user", "INT32", {2}, Raw(std::vector<int32_t>{1, 2})},
                          {"user", "INT64", {3}, Raw(kIds)},
                          {"user", "INT64", {~uint64_t{0}, 2}, Raw(kIds)},
                          {"user", "INT64", {}, Raw(kIds)},
                          {"shop", "INT64", {2}, Raw(kIds)},
                          {"user", "INT64", {1}, Raw(std::vector<uint64_t>{1})}}) {
    EXPECT_FALSE(Read(NamedRequest({kAge, wrong})).has_value());
  }
  EXPECT_FALSE(Read(NamedRequest({kAge, kUser, kUser})).has_value());
  EXPECT_FALSE(Read(NamedRequest({kUser})).has_value());
  ModelInputs other = Inputs();
  other.dense[0].shape = {2};
  EXPECT_FALSE(Read(RequestOf(BatchOf(kIds, kAges)), other).has_value());
  // IDs of a slot in the dense model.
  for (const uint64_t beyond : {0, 1}) {
    ModelInputs bounded = Inputs();
    bounded.ids[0].limit = *std::max_element(kIds.begin(), kIds.end()) + 1 - beyond;
    EXPECT_EQ(Read(RequestOf(BatchOf(kIds, kAges)), bounded).has_value(), beyond == 0);
    EXPECT_EQ(Read(NamedRequest({kAge, kUser}), bounded).has_value(), beyond == 0);
  }
  ModelInputs any;
  any.model_name = "m";
  EXPECT_TRUE(Read(RequestOf(BatchOf(kIds, kAges)), any).has_value());
}

TEST(InferRequestTest, OutputsByTheirNames) {
  const auto asked = [](std::string_view name) {
    std::string request = RequestOf(BatchOf(kIds, kAges));
    std::string output;
    ProtoWriter(&output).Bytes(1, name);
    ProtoWriter(&request).Bytes(6, output);
    return Read(request);
  };
  EXPECT_EQ(asked("output_3")->output_positions, std::vector<uint32_t>{3});
  for (const auto* name : {"output_", "output_03", "output_-1", "output_9999", "score"}) {
    EXPECT_FALSE(asked(name).has_value()) << name;
  }
}

TEST(InferRequestTest, CutOffAnywhereOrDamaged) {
  for (const std::string& whole : {RequestOf(BatchOf(kIds, kAges)), NamedRequest({kAge, kUser})}) {
    for (size_t size = 0; size < whole.size(); ++size) {
      // A copy of that size: a sanitizer sees what is read behind it.
      const std::vector<char> cut(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size));
      EXPECT_FALSE(ReadBytes(std::as_bytes(std::span(cut))).value().has_value()) << size;
    }
    for (size_t at = 0; at < whole.size(); ++at) {
      for (const char flipped : {'\x01', '\x80', '\xff'}) {
        std::vector<char> damaged(whole.begin(), whole.end());
        damaged[at] = static_cast<char>(damaged[at] ^ flipped);
        const auto request = ReadBytes(std::as_bytes(std::span(damaged))).value();
        if (!request.has_value()) continue;
        const std::vector<const Samples*> parts = {&request->samples};
        EXPECT_TRUE(Merge(parts).ok());
      }
    }
  }
}

// A message of 16 MiB has room for 8 million of them.
TEST(InferRequestTest, TooManyTensorsAreRefused) {
  for (const uint32_t field : {5u, 6u, 7u}) {
    std::string request = RequestOf(BatchOf(kIds, kAges));
    for (int i = 0; i < 4097; ++i) ProtoWriter(&request).Bytes(field, "");
    const auto read = ReadBytes(BytesOf(request));
    EXPECT_EQ(read.status().code(), StatusCode::kInvalidArgument) << field;
  }
  // Python's reader skips groups, so tensors behind one count.
  std::string grouped = "\x7b\x7b\x08\x01\x7c\x7c";  // 15: {15: {1: 1}}
  for (int i = 0; i < 4097; ++i) ProtoWriter(&grouped).Bytes(5, "");
  EXPECT_EQ(ReadBytes(BytesOf(grouped)).status().code(), StatusCode::kInvalidArgument);
  ModelInputs large = Inputs();
  large.ids.resize(2000);
  std::string request = RequestOf(BatchOf(kIds, kAges));
  for (int i = 0; i < 5000; ++i) ProtoWriter(&request).Bytes(5, "");
  EXPECT_FALSE(Read(request, large).has_value());
  EXPECT_FALSE(Read(NamedRequest({kAge, {"user", "INT64", std::vector<uint64_t>(1000, 1), ""}}))
                   .has_value());
}

TEST(SamplesTest, PartsOfOneLayoutBecomeOneBatch) {
  const auto first = DecodeSamples(BytesOf(BatchOf({1}, {0.5f})));
  const auto second = DecodeSamples(BytesOf(BatchOf({2, 3}, {1.5f, 2.5f})));
  EXPECT_TRUE(HaveOneLayout(first.value(), second.value()));
  const std::vector<const Samples*> parts = {&first.value(), &second.value()};
  EXPECT_EQ(Raw(Merge(parts).value()), BatchOf({1, 2, 3}, {0.5f, 1.5f, 2.5f}));
}

}  // namespace
}  // namespace persia::serving
