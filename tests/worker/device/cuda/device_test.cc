#include "tests/worker/device/cuda/device_fixture.h"
#include "worker/device/cuda/errors.h"
#include "worker/device/cuda/nvtx_range.h"

namespace zeroshard::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

TEST(CudaProbeTest, SaysThatThereIsNoDriver) {
  FakeRuntime runtime;
  runtime.driver_version = 0;
  runtime.Fail("DeviceCount", Error::kInsufficientDriver);
  const absl::Status status = ProbeDevice(&runtime, 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status),
              AllOf(HasSubstr("cuda:0: no usable GPU: "), HasSubstr("cudaErrorInsufficientDriver"),
                    HasSubstr("no NVIDIA driver is loaded"), HasSubstr("--device cpu")));
}

TEST(CudaProbeTest, SaysWhichVersionAnOldDriverIsFor) {
  FakeRuntime runtime;
  runtime.driver_version = 12040;
  runtime.Fail("DeviceCount", Error::kInsufficientDriver);
  EXPECT_THAT(Text(ProbeDevice(&runtime, 0).status()),
              HasSubstr("(the driver is for CUDA 12.4, this program for 13.0)"));
}

TEST(CudaProbeTest, SaysThatTheDriverShowsNoGpu) {
  FakeRuntime runtime;
  runtime.devices.clear();
  const absl::Status status = ProbeDevice(&runtime, 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), HasSubstr("CUDA_VISIBLE_DEVICES"));
}

TEST(CudaProbeTest, NamesTheGpusThereAre) {
  FakeRuntime runtime;
  for (const int ordinal : {1, -1}) {
    const absl::Status status = ProbeDevice(&runtime, ordinal).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Text(status), HasSubstr("sees one GPU, cuda:0;"));
  }
  runtime.devices.push_back(runtime.devices[0]);
  runtime.devices.push_back(runtime.devices[0]);
  EXPECT_THAT(Text(ProbeDevice(&runtime, 3).status()),
              AllOf(HasSubstr("cuda:3: "), HasSubstr("3 GPUs, cuda:0 to cuda:2")));
  EXPECT_TRUE(ProbeDevice(&runtime, 2).ok());
}

TEST(CudaProbeTest, RefusesGpusThatAreTooOldOrCannotAllocateInOrder) {
  FakeRuntime runtime;
  runtime.devices[0] = {.name = "Tesla V100", .major = 7, .minor = 5, .memory_pools = true};
  EXPECT_THAT(Text(CudaDevice::Create(&runtime, 0).status()),
              AllOf(HasSubstr("Tesla V100"), HasSubstr("7.5"), HasSubstr("8.0")));
  runtime.devices[0] = {.name = "GRID", .major = 9, .minor = 0, .memory_pools = false};
  EXPECT_THAT(Text(CudaDevice::Create(&runtime, 0).status()),
              AllOf(HasSubstr("GRID"), HasSubstr("stream order")));
  EXPECT_EQ(runtime.Calls("SetDevice"), 0) << "a probe touches no GPU";
}

TEST(CudaDeviceTest, IsWhatItsRuntimeSays) {
  FakeRuntime runtime;
  runtime.devices.push_back(runtime.devices[0]);
  runtime.devices[1].name = "second";
  const auto device = CudaDevice::Create(&runtime, 1);
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ((*device)->name(), "cuda:1");
  EXPECT_EQ((*device)->properties().name, "second");
  EXPECT_FALSE((*device)->is_host());
  EXPECT_EQ(AsCudaDevice(device->get()), device->get());
  EXPECT_EQ(AsCudaStream((*device)->compute()), (*device)->compute());
  const auto cpu = MakeCpuDevice();
  EXPECT_EQ(AsCudaDevice(cpu.get()), nullptr);
  EXPECT_EQ(AsCudaStream(cpu->compute()), nullptr);
}

TEST(CudaDeviceTest, FailsWhereAnyOfItsPartsCannotBeMade) {
  for (const char* const call :
       {"DeviceCount", "Properties", "SetDevice", "CreateStream", "CreatePool"}) {
    FakeRuntime runtime;
    runtime.Fail(call, Error::kDevicesUnavailable);
    const absl::Status status = CudaDevice::Create(&runtime, 0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << call;
    EXPECT_THAT(Text(status), AllOf(HasSubstr(call), HasSubstr("exclusive mode")));
  }
}

TEST(CudaDeviceTest, EventsOfWorkOnAHandleOrderOtherStreams) {
  FakeRuntime runtime;
  const auto device = *CudaDevice::Create(&runtime, 0);
  const auto side = device->NewStream("side");
  const Buffer buffer = *device->Allocate(8, MemoryKind::kBuffers);
  int64_t out = -1;
  const StreamHandle compute = *device->compute()->handle();
  ASSERT_EQ(runtime.SetAsync(buffer.data(), 1, 8, compute), Error::kOk);  // as a kernel would
  const absl::StatusOr<Event> event = RecordOn(device->context(), compute);
  ASSERT_TRUE(event.ok()) << event.status();
  EXPECT_FALSE(event->Done());
  EXPECT_TRUE(side->Copy(&out, buffer.data(), 8, *event).Wait().ok());
  EXPECT_EQ(out, 0x0101010101010101);
}

TEST(CudaErrorsTest, NameTheCallThePlaceTheErrorAndTheRemedy) {
  FakeRuntime runtime;
  EXPECT_TRUE(ErrorStatus(&runtime, Error::kOk, "f()", "x.cc", 1).ok());
  const absl::Status status =
      ErrorStatus(&runtime, Error::kIllegalAddress, "cudaMemcpyAsync(a)", "x.cc", 12);
  EXPECT_THAT(Text(status),
              HasSubstr("CUDA: cudaMemcpyAsync(a) at x.cc:12: cudaErrorIllegalAddress (an illegal "
                        "memory access was encountered); "));
  EXPECT_THAT(Text(status), HasSubstr("run the worker under compute-sanitizer"));
  EXPECT_THAT(Text(ErrorStatus(&runtime, Error::kStubLibrary, "f()", "x.cc", 1)),
              HasSubstr("LD_LIBRARY_PATH"));
  EXPECT_EQ(ErrorStatus(&runtime, Error::kEccUncorrectable, "f()", "x.cc", 1).code(),
            absl::StatusCode::kDataLoss);
  const absl::Status unknown = ErrorStatus(&runtime, static_cast<Error>(12345), "f()", "x.cc", 1);
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(Text(unknown), Not(HasSubstr(";")));
}

TEST(CudaErrorsTest, OnlyWhatTheDeviceRepeatsIsSticky) {
  for (const Error error : {Error::kIllegalAddress, Error::kLaunchFailure, Error::kAssert,
                            Error::kEccUncorrectable, Error::kMisalignedAddress}) {
    EXPECT_TRUE(IsSticky(error));
  }
  for (const Error error : {Error::kOk, Error::kOutOfMemory, Error::kNotReady, Error::kInvalidValue,
                            Error::kLaunchOutOfResources}) {
    EXPECT_FALSE(IsSticky(error));
  }
}

TEST_F(CudaDeviceFixture, RangesNestWithOrWithoutAProfiler) {
  device_->BeginRange("step 1");
  device_->BeginRange("forward blocks.0");
  device_->EndRange();
  device_->EndRange();
  EXPECT_EQ(HasNvtx(), EXPECT_NVTX);
}

}  // namespace
}  // namespace zeroshard::cuda
