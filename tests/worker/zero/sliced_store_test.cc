#include "worker/zero/sliced_store.h"

#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shard_store/core/staging.h"
#include "tests/worker/device/guarded_device.h"
#include "worker/device/host_event.h"
#include "worker/device/host_stream.h"
#include "worker/zero/staged_store.h"

namespace zeroshard {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// GPT-2 of 96 columns, 61 rows of vocabulary: paddings everywhere.
ModelTable Model() {
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(96);
  spec.set_layers(1);
  spec.set_heads(8);
  spec.set_sequence_length(8);
  spec.set_vocab_size(61);
  return *MakeModelTable(spec);
}

// What the ranks' stores have in common: fp32 gradients staged as the stores' own books have it,
// parameters that are pulled.
struct Kept {
  std::vector<std::vector<float>> gradients, parameters;  // by unit
  std::vector<store::Coverage> covered;
  explicit Kept(const ModelTable& model) {
    for (const UnitTable& unit : model.units) {
      gradients.emplace_back(static_cast<size_t>(unit.length), -1.0f);
      parameters.emplace_back(static_cast<size_t>(unit.length), 99.0f);
      covered.emplace_back(static_cast<uint64_t>(unit.length));
    }
  }
};

class KeptStore : public StateStore {
 public:
  explicit KeptStore(Kept* kept) : kept_(*kept) {}
  v1::StateVersion base() const override {
    v1::StateVersion version;
    version.set_step(41);
    return version;
  }
  Event Push(uint64_t, int unit, int64_t begin, int64_t end, const void* data,
             const Event& after) override {
    if (absl::Status status = after.Wait(); !status.ok()) return DoneEvent(status);
    const auto u = static_cast<size_t>(unit);
    const absl::Status status =
        kept_.covered[u].Add(static_cast<uint64_t>(begin), static_cast<uint64_t>(end - begin));
    std::memcpy(kept_.gradients[u].data() + begin, data,
                static_cast<size_t>(end - begin) * sizeof(float));
    return DoneEvent(status);
  }
  Event Pull(uint64_t, int unit, int64_t begin, int64_t end, void* out,
             const Event& after) override {
    return pulls_->Enqueue([=, this]() -> absl::Status {
      if (absl::Status status = after.Wait(); !status.ok()) return status;
      std::memcpy(out, kept_.parameters[static_cast<size_t>(unit)].data() + begin,
                  static_cast<size_t>(end - begin) * sizeof(float));
      return absl::OkStatus();
    });
  }
  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next_sample,
                                          uint64_t samples) override {
    v1::StepDecision decision;
    decision.set_step(record.step() + next_sample + samples);
    return decision;
  }
  void Abort(const std::string& reason) override { aborted = reason; }
  const OffloadCounters& counters() const override { return counters_; }
  std::string aborted;

 private:
  Kept& kept_;
  OffloadCounters counters_;
  std::unique_ptr<HostStream> pulls_ = MakeHostStream("pulls");
};

std::unique_ptr<StateStore> Make(Kept* kept, int tensor, int rank) {
  return MakeSlicedStore(std::make_unique<KeptStore>(kept), MakeTensorRank(Model(), tensor, rank),
                         DType::kF32);
}

// The value of an element of a full unit, by its number.
float ValueOf(size_t unit, int64_t element) {
  return static_cast<float>(static_cast<int64_t>(unit + 1) * 100000 + element);
}

// A rank's unit where each tensor's element has its full one's value, and paddings have `else_`.
std::vector<float> LocalValues(const ModelTable& full, const TensorRank& slice, size_t u,
                               float else_) {
  std::vector<float> values(static_cast<size_t>(slice.model.units[u].length), else_);
  for (const SliceRun& run : FullRuns(slice, u, {0, slice.model.units[u].length})) {
    const int64_t offset = full.units[u].parameters[static_cast<size_t>(run.parameter)].offset;
    for (int64_t i = 0; i < run.size; ++i)
      values[static_cast<size_t>(run.local + i)] = ValueOf(u, offset + run.element + i);
  }
  return values;
}

TEST(SlicedStore, PushesOfAGroupAreTheWholeUnitsOnceAndSaidTwiceTheSame) {
  const ModelTable full = Model();
  for (const int t : {2, 4, 8}) {
    Kept kept(full);
    for (int rank = 0; rank < t; ++rank) {
      const TensorRank slice = MakeTensorRank(full, t, rank);
      const auto store = Make(&kept, t, rank);
      for (size_t u = 0; u < full.units.size(); ++u) {
        // Two data ranks' shards, in pieces of 100 elements.
        const std::vector<float> local = LocalValues(full, slice, u, 0.0f);
        const ShardLayout layout = ShardLayout::Make(static_cast<int64_t>(local.size()), 2);
        for (const int data : {0, 1, 1}) {  // one of them says everything twice
          for (int64_t at = layout.Begin(data); at < layout.End(data); at += 100) {
            const int64_t end = std::min(at + 100, layout.End(data));
            const absl::Status status =
                store->Push(42, static_cast<int>(u), at, end, local.data() + at).Wait();
            ASSERT_TRUE(status.ok()) << status;
          }
        }
      }
    }
    for (size_t u = 0; u < full.units.size(); ++u) {
      EXPECT_TRUE(kept.covered[u].complete())
          << full.units[u].name << " on " << t << ": nothing came for element "
          << kept.covered[u].FirstGap();
      std::vector<float> wanted(kept.gradients[u].size(), 0.0f);
      for (const ParameterInfo& p : full.units[u].parameters)
        for (int64_t e = p.offset; e < p.offset + p.size; ++e)
          wanted[static_cast<size_t>(e)] = ValueOf(u, e);
      EXPECT_EQ(kept.gradients[u], wanted) << full.units[u].name << " on " << t;
    }
  }
}

TEST(SlicedStore, APullBringsWhatTheRankHoldsAndZerosElsewhere) {
  const ModelTable full = Model();
  Kept kept(full);
  for (size_t u = 0; u < full.units.size(); ++u)
    for (const ParameterInfo& p : full.units[u].parameters)
      for (int64_t e = p.offset; e < p.offset + p.size; ++e)
        kept.parameters[u][static_cast<size_t>(e)] = ValueOf(u, e);
  for (int rank = 0; rank < 4; ++rank) {
    const TensorRank slice = MakeTensorRank(full, 4, rank);
    const auto store = Make(&kept, 4, rank);
    for (size_t u = 0; u < full.units.size(); ++u) {
      const std::vector<float> wanted = LocalValues(full, slice, u, 0.0f);
      std::vector<float> seen(wanted.size(), 7.0f);
      const auto n = static_cast<int64_t>(seen.size());
      for (int64_t at = 0; at < n; at += 90) {
        const int64_t end = std::min(at + 90, n);
        ASSERT_TRUE(store->Pull(41, static_cast<int>(u), at, end, seen.data() + at).Wait().ok());
      }
      EXPECT_EQ(seen, wanted) << full.units[u].name << " of rank " << rank;
    }
  }
}

TEST(SlicedStore, NothingIsTouchedBeforeTheEventOrAfterOneThatFailed) {
  const ModelTable full = Model();
  Kept kept(full);
  const auto store = Make(&kept, 8, 7);
  const int64_t n = MakeTensorRank(full, 8, 7).model.units[0].length;
  std::vector<float> out(static_cast<size_t>(n), 7.0f);
  auto gate = std::make_shared<HostEvent>();
  const Event pulled = store->Pull(41, 0, 0, n, out.data(), Event(gate));
  EXPECT_FALSE(pulled.Done());
  EXPECT_THAT(out, Each(7.0f));
  gate->Finish(absl::DataLossError("the device"));
  EXPECT_EQ(pulled.Wait().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(out, Each(7.0f));
  // Late, and well.
  gate = std::make_shared<HostEvent>();
  const Event late = store->Pull(41, 0, 0, n, out.data(), Event(gate));
  gate->Finish(absl::OkStatus());
  EXPECT_TRUE(late.Wait().ok());
  EXPECT_EQ(out[0], 99.0f);
  EXPECT_EQ(out[5 * 96], 0.0f) << "row 61 of 61";
  // Of a push that sends nothing the event is its caller's.
  gate = std::make_shared<HostEvent>();
  const TensorRank slice = MakeTensorRank(full, 8, 7);
  const ParameterInfo& norm = slice.model.units[1].parameters[0];  // its home is rank 0
  const Event pushed =
      store->Push(42, 1, norm.offset, norm.offset + norm.size, out.data(), Event(gate));
  EXPECT_FALSE(pushed.Done());
  gate->Finish(absl::DataLossError("the device"));
  EXPECT_EQ(pushed.Wait().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(kept.covered[1].covered(), 0u);
}

TEST(SlicedStore, RefusesWhatIsNotTheSlicesAndPassesTheRestOn) {
  const ModelTable full = Model();
  Kept kept(full);
  auto inner = std::make_unique<KeptStore>(&kept);
  KeptStore* const seen = inner.get();
  const auto store = MakeSlicedStore(std::move(inner), MakeTensorRank(full, 2, 1), DType::kF32);
  const int64_t n = MakeTensorRank(full, 2, 1).model.units[1].length;
  float value = 0;
  using Range = std::tuple<int, int64_t, int64_t>;
  for (const auto& [unit, begin, end] :
       {Range{-1, 0, 1}, {3, 0, 1}, {1, -1, 1}, {1, 2, 1}, {1, 0, n + 1}}) {
    for (const Event& event :
         {store->Push(42, unit, begin, end, &value), store->Pull(41, unit, begin, end, &value)}) {
      const absl::Status status = event.Wait();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()), HasSubstr("tensor rank 1 of 2"));
    }
  }
  EXPECT_EQ(store->base().step(), 41u);
  v1::StepRecord record;
  record.set_step(1);
  EXPECT_EQ(store->Commit(record, 2, 3)->step(), 6u);
  store->Abort("over");
  EXPECT_EQ(seen->aborted, "over");
  EXPECT_EQ(&store->counters(), &seen->counters());
}

TEST(SlicedStore, OfOneRankIsTheStoreItself) {
  Kept kept(Model());
  auto inner = std::make_unique<KeptStore>(&kept);
  StateStore* const seen = inner.get();
  EXPECT_EQ(MakeSlicedStore(std::move(inner), MakeTensorRank(Model(), 1, 0), DType::kF32).get(),
            seen);
}

// From memory that the host cannot reach: staged around it.
TEST(SlicedStore, BehindAStagedStoreServesADevice) {
  const ModelTable full = Model();
  GuardedDevice device(1);
  Kept kept(full);
  for (size_t u = 0; u < full.units.size(); ++u)
    for (size_t e = 0; e < kept.parameters[u].size(); ++e)
      kept.parameters[u][e] = ValueOf(u, static_cast<int64_t>(e));
  const TensorRank slice = MakeTensorRank(full, 4, 3);
  const auto staged = MakeStagedStore(Make(&kept, 4, 3), &device, DType::kF32, size_t{1} << 20);
  const size_t u = 0;
  const std::vector<float> wanted = LocalValues(full, slice, u, 0.0f);
  const auto n = static_cast<int64_t>(wanted.size());
  auto buffer = device.Allocate(wanted.size() * sizeof(float), MemoryKind::kParameters);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  ASSERT_TRUE(staged->Pull(41, 0, 0, n, buffer->data()).Wait().ok());
  std::vector<float> seen(wanted.size());
  const auto stream = device.NewStream("read");
  ASSERT_TRUE(stream->Copy(seen.data(), buffer->data(), seen.size() * sizeof(float)).Wait().ok());
  EXPECT_EQ(seen, wanted);
  ASSERT_TRUE(staged->Push(42, 0, 0, n, buffer->data()).Wait().ok());
  for (const SliceRun& run : FullRuns(slice, u, {0, n})) {
    for (int64_t i = 0; i < run.size; ++i)
      ASSERT_EQ(kept.gradients[u][static_cast<size_t>(run.flat + i)],
                run.home ? ValueOf(u, run.flat + i) : -1.0f);
  }
}

}  // namespace
}  // namespace zeroshard
