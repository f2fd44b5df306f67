#include "bench/simple_tiers.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace persia::bench {
namespace {

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "simple_tiers: %s\n", status.ToString().c_str());
  std::exit(1);
}

}  // namespace

SimpleTier::SimpleTier(pool::RowPool& pool, const store::RowPolicy& rules, uint32_t dim)
    : pool_(pool), rules_(rules), dim_(dim), state_floats_(rules.ShapeFor(dim).state_floats) {}

void SimpleTier::Read(uint64_t sign, uint64_t address, float* values) const {
  pool::RowHead head;
  Check(pool_.Read(address, sign, &head, {values, row_floats()}));
}

uint64_t SimpleTier::Write(uint64_t sign, uint64_t replaces, const float* values) {
  const pool::RowWrite row = {{sign, 1, dim_, state_floats_, 0, 0}, values, replaces};
  uint64_t address = pool::kNoAddress;
  Check(pool_.Write({&row, 1}, {&address, 1}));
  return address;
}

void SimpleTier::Initialize(uint64_t sign, float* values) const {
  rules_.Initialize(sign, {values, values + dim_, nullptr, dim_});
}

void SimpleTier::Step(float* values, const float* gradient) const {
  simd::RowStep step = {.w = values,
                        .state = values + dim_,
                        .g = gradient,
                        .scalar = nullptr,
                        .step_size = 0,
                        .second_scale = 0};
  rules_.ApplyGradients({&step, 1}, dim_);
}

StraightToTier::StraightToTier(pool::RowPool& pool, const store::RowPolicy& rules, uint32_t dim,
                               uint64_t num_rows)
    : SimpleTier(pool, rules, dim), addresses_(num_rows) {}

void StraightToTier::Lookup(std::span<const uint64_t> signs, float* rows) {
  std::vector<float> values(row_floats());
  for (const uint64_t sign : signs) {
    auto& stripe = addresses_.Of(sign);
    const std::lock_guard lock(stripe.mutex);
    const auto [place, is_new] = stripe.rows.try_emplace(sign, pool::kNoAddress);
    if (is_new) {
      Initialize(sign, values.data());
      place->second = Write(sign, pool::kNoAddress, values.data());
    } else {
      Read(sign, place->second, values.data());
    }
    rows = std::copy_n(values.data(), dim(), rows);
  }
}

void StraightToTier::Update(std::span<const uint64_t> signs, const float* gradients) {
  std::vector<float> values(row_floats());
  for (const uint64_t sign : signs) {
    auto& stripe = addresses_.Of(sign);
    const std::lock_guard lock(stripe.mutex);
    uint64_t& address = stripe.rows.at(sign);
    Read(sign, address, values.data());
    Step(values.data(), gradients);
    address = Write(sign, address, values.data());
    gradients += dim();
  }
}

TextbookCache::TextbookCache(pool::RowPool& pool, const store::RowPolicy& rules, uint32_t dim,
                             uint64_t num_rows, uint64_t cache_rows)
    : SimpleTier(pool, rules, dim), cache_rows_(cache_rows), rows_(num_rows) {}

TextbookCache::Row* TextbookCache::Use(Row& row, uint64_t sign) {
  if (row.values == nullptr) {
    row.values = std::make_unique_for_overwrite<float[]>(row_floats());
    if (row.address == pool::kNoAddress) {
      row.sign = sign;
      Initialize(sign, row.values.get());
      row.has_changed = true;
    } else {
      Read(sign, row.address, row.values.get());
    }
  }
  const std::lock_guard lock(order_mutex_);
  if (row.is_listed) {
    order_.splice(order_.begin(), order_, row.place);
    return nullptr;
  }
  order_.push_front(&row);
  row.place = order_.begin();
  row.is_listed = true;
  if (order_.size() <= cache_rows_) return nullptr;
  Row* const victim = order_.back();
  order_.pop_back();
  victim->is_listed = false;
  return victim;
}

// Without any lock. The row may have been used again meanwhile.
void TextbookCache::Evict(Row* victim) {
  if (victim == nullptr) return;
  const std::lock_guard lock(rows_.Of(victim->sign).mutex);
  {
    const std::lock_guard order_lock(order_mutex_);
    if (victim->is_listed) return;
  }
  if (victim->values == nullptr) return;  // somebody else's victim, too
  if (victim->has_changed) {
    victim->address = Write(victim->sign, victim->address, victim->values.get());
    victim->has_changed = false;
  }
  victim->values.reset();
}

void TextbookCache::Lookup(std::span<const uint64_t> signs, float* rows) {
  for (const uint64_t sign : signs) {
    Row* victim;
    {
      auto& stripe = rows_.Of(sign);
      const std::lock_guard lock(stripe.mutex);
      Row& row = stripe.rows[sign];
      victim = Use(row, sign);
      rows = std::copy_n(row.values.get(), dim(), rows);
    }
    Evict(victim);
  }
}

void TextbookCache::Update(std::span<const uint64_t> signs, const float* gradients) {
  for (const uint64_t sign : signs) {
    Row* victim;
    {
      auto& stripe = rows_.Of(sign);
      const std::lock_guard lock(stripe.mutex);
      Row& row = stripe.rows.at(sign);
      victim = Use(row, sign);
      Step(row.values.get(), gradients);
      row.has_changed = true;
    }
    Evict(victim);
    gradients += dim();
  }
}

}  // namespace persia::bench
