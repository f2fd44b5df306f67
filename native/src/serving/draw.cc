#include "serving/draw.h"

#include <openssl/sha.h>

#include <array>
#include <cstdint>
#include <random>

namespace persia::serving {
namespace {

uint64_t RandomNumber() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  return generator();
}

}  // namespace

bool Draw::Takes(std::string_view id) const {
  const double share = this->share();
  if (share <= 0 || share >= 1) return share >= 1;
  uint64_t number = 0;
  if (id.empty()) {
    number = RandomNumber();
  } else {
    std::string text = purpose_;
    text.append(1, '\0').append(id);
    std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
    SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
    for (size_t i = 0; i < sizeof(number); ++i) number = number << 8 | digest[i];
  }
  return static_cast<double>(number) < share * 0x1p64;
}

std::string RandomId() { return std::to_string(RandomNumber()); }

}  // namespace persia::serving
