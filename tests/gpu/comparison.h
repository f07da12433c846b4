// One call of Ops on a GPU beside the same call on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/ops/ops.h"

namespace zeroshard {

// What a result may be off: nothing, not a bit; or |gpu - cpu| / |cpu| over the whole array.
constexpr double kSameBits = 0;

class ComparisonFixture : public GpuFixture {
 protected:
  // The arrays of one call, by number in the order in which they were declared. Each lies at a
  // multiple of 64 bytes with a guard behind it, and what is only written begins as NaNs.
  class Arrays {
   public:
    int In(const TypedValues& values) { return Add(BytesOf(values), values.type(), -1); }
    int In(const std::vector<int32_t>& values) { return Add(BytesOf(values), DType::kI32, -1); }
    int Out(int64_t count, DType type, double tolerance) {
      return Add(std::vector<char>(static_cast<size_t>(count) * SizeOf(type), '\xFF'), type,
                 tolerance);
    }
    int InOut(const TypedValues& values, double tolerance) {
      return Add(BytesOf(values), values.type(), tolerance);
    }
    // Of any type: the same bits.
    template <typename T>
    int InOut(const std::vector<T>& values) {
      return Add(BytesOf(values), DType::kU8, kSameBits);
    }

   private:
    friend class ComparisonFixture;
    struct Array {
      std::vector<char> bytes;
      DType type;
      double tolerance;  // below 0: only read
    };
    static std::vector<char> BytesOf(const TypedValues& values) {
      const char* data = static_cast<const char*>(values.data());
      return {data, data + static_cast<size_t>(values.count()) * SizeOf(values.type())};
    }
    template <typename T>
    static std::vector<char> BytesOf(const std::vector<T>& values) {
      const char* data = reinterpret_cast<const char*>(values.data());
      return {data, data + values.size() * sizeof(T)};
    }
    int Add(std::vector<char> bytes, DType type, double tolerance) {
      all_.push_back({std::move(bytes), type, tolerance});
      return static_cast<int>(all_.size()) - 1;
    }
    std::vector<Array> all_;
  };

  using Call = std::function<void(Ops*, const std::vector<void*>&)>;

  // Runs `call` on the CPU and, twice, on the GPU, whose bits must be the same both times.
  void Compare(const Arrays& arrays, const Call& call) {
    std::vector<Buffer> host;
    std::vector<void*> pointers;
    const auto cpu_device = MakeCpuDevice();
    for (const Arrays::Array& array : arrays.all_) {
      host.push_back(*cpu_device->Allocate(array.bytes.size() + kGuardBytes, MemoryKind::kBuffers));
      std::memcpy(host.back().data(), array.bytes.data(), array.bytes.size());
      pointers.push_back(host.back().data());
    }
    call(cpu_.get(), pointers);
    const std::vector<std::vector<char>> first = OnGpu(arrays, call);
    const std::vector<std::vector<char>> second = OnGpu(arrays, call);
    for (size_t i = 0; i < first.size(); ++i) {
      SCOPED_TRACE(testing::Message() << "array " << i);
      const Arrays::Array& array = arrays.all_[i];
      EXPECT_TRUE(first[i] == second[i]) << "another run has other bits";
      const size_t bytes = array.bytes.size();
      for (size_t g = bytes; g < first[i].size(); ++g)
        ASSERT_EQ(first[i][g], kGuard) << "written " << g - bytes << " bytes beyond the end";
      const char* wanted = static_cast<const char*>(host[i].data());
      if (array.tolerance < 0) {
        EXPECT_EQ(std::memcmp(first[i].data(), array.bytes.data(), bytes), 0)
            << "what is only read was written";
      } else if (array.tolerance == kSameBits) {
        ExpectSameBits(first[i].data(), wanted, bytes);
      } else {
        ExpectNear(first[i].data(), wanted, array);
      }
    }
  }

  const std::unique_ptr<Ops> cpu_ = MakeCpuOps(4);

 private:
  static constexpr size_t kGuardBytes = 256;
  static constexpr char kGuard = '\x5A';

  std::vector<std::vector<char>> OnGpu(const Arrays& arrays, const Call& call) {
    std::vector<Buffer> device;
    std::vector<void*> pointers;
    for (const Arrays::Array& array : arrays.all_) {
      std::vector<char> bytes = array.bytes;
      bytes.resize(bytes.size() + kGuardBytes, kGuard);
      device.push_back(Upload(bytes));
      pointers.push_back(device.back().data());
    }
    call(ops_.get(), pointers);
    const absl::Status status = device_->compute()->Record().Wait();
    EXPECT_TRUE(status.ok()) << status;
    std::vector<std::vector<char>> results;
    for (const Buffer& buffer : device) results.push_back(Download(buffer));
    return results;
  }

  static void ExpectSameBits(const char* got, const char* wanted, size_t bytes) {
    const auto [at, unused] = std::mismatch(got, got + bytes, wanted);
    EXPECT_EQ(at - got, static_cast<std::ptrdiff_t>(bytes))
        << "the first byte that is not the CPU's, of " << bytes;
  }

  static void ExpectNear(const char* got, const char* wanted, const Arrays::Array& array) {
    const auto count = static_cast<int64_t>(array.bytes.size() / SizeOf(array.type));
    TypedValues seen(count, array.type), expected(count, array.type);
    std::memcpy(seen.data(), got, array.bytes.size());
    std::memcpy(expected.data(), wanted, array.bytes.size());
    // A NaN on either side makes this false.
    EXPECT_LE(RelativeError(seen, expected.AsDoubles()), array.tolerance);
  }
};

}  // namespace zeroshard
