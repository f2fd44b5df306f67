// The table on its own: what it tells features, and that it needs none.
#include "store/row_table.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace persia::store {
namespace {

// The table needs none.
struct NoFeatures {
  void BeforeTouch(const SignIndex::Entry&, const RowSlabs&) {}
  Status BeforeRemove(const SignIndex::Entry&, const RowSlabs&) { return Status::Ok(); }
  void Inserted(uint64_t, uint32_t, const RowSlabs&) {}
  void BeforeClear(SignIndex*, RowSlabs*) {}
  void StampsFell() {}
  uint32_t tail_floats() const { return 0; }
};

// Counts what it is told, and refuses to let one key go.
struct Recorder {
  void BeforeTouch(const SignIndex::Entry& entry, const RowSlabs&) { touched.push_back(entry.key); }
  Status BeforeRemove(const SignIndex::Entry& entry, const RowSlabs&) {
    if (entry.key == kept) return ResourceExhausted("kept");
    removed.push_back(entry.key);
    return Status::Ok();
  }
  void Inserted(uint64_t key, uint32_t, const RowSlabs&) { inserted.push_back(key); }
  void BeforeClear(SignIndex* index, RowSlabs*) { num_cleared += index->size(); }
  void StampsFell() {}
  uint32_t tail_floats() const { return 0; }

  uint64_t kept = 0;
  std::vector<uint64_t> touched, removed, inserted;
  uint64_t num_cleared = 0;
};

template <typename Features>
struct Table {
  explicit Table(uint64_t capacity) : rows(capacity, &memory, &memory, 0, &features) {
    rows.SetPolicies(std::make_shared<const RowPolicies>(TrainConfig()));
  }
  uint32_t Insert(uint64_t sign, uint32_t dim = 4) {
    return rows.Insert(SignKey(sign), dim, &num_evicted);
  }
  bool MakeRoomForOne() {
    auto has_room = rows.MakeRoom(1, /*keep_batch=*/true, &num_evicted);
    return has_room.ok() && *has_room;
  }
  bool Has(uint64_t sign) const { return rows.index().Find(SignKey(sign)) != nullptr; }

  SlabMemory memory;
  Features features;
  RowTable<Features> rows;
  uint64_t num_evicted = 0;
};

TEST(RowTableTest, EvictsTheRowsThatWereTouchedTheLongestAgo) {
  Table<NoFeatures> table(3);
  for (uint64_t sign = 1; sign <= 3; ++sign) {
    table.rows.BeginBatch();
    ASSERT_NE(table.Insert(sign), RowTable<NoFeatures>::kNoCell);
  }
  table.rows.BeginBatch();
  table.rows.Touch(table.rows.index().Find(SignKey(1)), table.rows.now());
  ASSERT_NE(table.Insert(4), RowTable<NoFeatures>::kNoCell);
  EXPECT_EQ(table.num_evicted, 1u);
  EXPECT_TRUE(table.Has(1) && !table.Has(2) && table.Has(3) && table.Has(4));
  EXPECT_EQ(table.rows.num_removals(), 1u);
}

TEST(RowTableTest, KeepsTheRowsOfTheBatchWhereItIsAskedTo) {
  Table<NoFeatures> table(2);
  table.rows.BeginBatch();
  table.Insert(1);
  table.rows.BeginBatch();
  table.Insert(2);
  EXPECT_TRUE(table.MakeRoomForOne());
  table.Insert(3);
  EXPECT_FALSE(table.MakeRoomForOne());
  EXPECT_TRUE(!table.Has(1) && table.Has(2) && table.Has(3));
}

TEST(RowTableTest, TellsFeaturesWhatBecomesOfRows) {
  Table<Recorder> table(10);
  table.rows.BeginBatch();
  table.Insert(1);
  table.Insert(2);
  table.rows.Touch(table.rows.index().Find(SignKey(1)), 7);
  Status status;
  EXPECT_EQ(RemoveOfAnotherDim(&table.rows, SignKey(2), 8, &status), nullptr);
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(table.features.inserted, (std::vector<uint64_t>{SignKey(1), SignKey(2)}));
  EXPECT_EQ(table.features.touched, std::vector<uint64_t>{SignKey(1)});
  EXPECT_EQ(table.features.removed, std::vector<uint64_t>{SignKey(2)});
  table.rows.Clear();
  EXPECT_EQ(table.features.num_cleared, 1u);
  EXPECT_EQ(table.rows.index().size(), 0u);
}

TEST(RowTableTest, ARowThatAFeatureKeepsStaysAndIsTheOldestAgain) {
  Table<Recorder> table(2);
  table.features.kept = SignKey(1);
  for (uint64_t sign = 1; sign <= 2; ++sign) {
    table.rows.BeginBatch();
    table.Insert(sign);
  }
  table.rows.BeginBatch();
  EXPECT_EQ(table.rows.MakeRoom(1, false, &table.num_evicted).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(table.Insert(3), RowTable<Recorder>::kNoCell);
  EXPECT_TRUE(table.Has(1) && table.Has(2));
  table.features.kept = 0;
  table.Insert(3);
  EXPECT_TRUE(!table.Has(1) && table.Has(2) && table.Has(3));
}

}  // namespace
}  // namespace persia::store
