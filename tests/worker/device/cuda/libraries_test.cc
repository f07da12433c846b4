// The libraries that a worker loads when it is told to use a GPU. None is needed for that.
#include <dlfcn.h>
#include <pthread.h>

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/nccl/cuda/make_nccl_communicator.h"
#include "worker/comm/nccl/cuda/nccl_library.h"
#include "worker/comm/nccl/nccl_connect.h"
#include "worker/ops/cuda/cublas_lt.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

const std::string kCublasLt = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);

// Whether a thread with `bytes` of stack starts and can use 64 KiB of it.
bool ThreadRuns(size_t bytes) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, bytes);
  const auto use_it = [](void* seen) -> void* {
    volatile char stack[64 << 10] = {};
    *static_cast<bool*>(seen) = stack[sizeof(stack) - 1] == 0;
    return nullptr;
  };
  bool seen = false;
  pthread_t thread;
  if (pthread_create(&thread, &attributes, use_it, &seen) == 0) pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
  return seen;
}

TEST(CudaLibrariesTest, AreNotLoadedBeforeTheyAreAskedFor) {
  for (const std::string& name : {kCublasLt, std::string("libnccl.so.2")}) {
    EXPECT_EQ(dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD), nullptr) << name;
  }
}

TEST(CudaLibrariesTest, CublasLtAnswers) {
  const auto lt = cuda::LoadCublasLt();
  ASSERT_TRUE(lt.ok()) << lt.status();
  EXPECT_EQ((*lt)->cublasLtGetVersion() / 10000, CUBLAS_VER_MAJOR);
  EXPECT_STREQ((*lt)->cublasLtGetStatusName(CUBLAS_STATUS_NOT_INITIALIZED),
               "CUBLAS_STATUS_NOT_INITIALIZED");
  EXPECT_EQ(*cuda::LoadCublasLt(), *lt) << "loaded once";
}

TEST(CudaLibrariesTest, NcclAnswers) {
  ASSERT_TRUE(CheckNccl().ok()) << CheckNccl();
  int version = 0;
  EXPECT_EQ((*LoadNccl())->ncclGetVersion(&version), ncclSuccess);
  EXPECT_GE(version, kLeastNcclVersion);
  EXPECT_EQ(*LoadNccl(), *LoadNccl()) << "loaded once";
}

TEST(CudaLibrariesTest, AThreadWithASmallStackStartsBesideBoth) {
  ASSERT_TRUE(cuda::LoadCublasLt().ok());
  ASSERT_TRUE(LoadNccl().ok());
  EXPECT_TRUE(ThreadRuns(100 << 10)) << "what the server of /metrics asks for";
}

TEST(CudaLibrariesTest, OneThatIsMissingIsNamedWithWhatToDo) {
  const absl::Status no_lt = cuda::LoadCublasLt({"libcublasLt.so.1"}).status();
  EXPECT_EQ(no_lt.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(no_lt.message()),
              AllOf(HasSubstr("cuBLASLt cannot be loaded (libcublasLt.so.1: cannot open"),
                    HasSubstr("LD_LIBRARY_PATH"), HasSubstr("package libcublas-")));
  const absl::Status no_nccl = LoadNccl({"libnccl.so.1"}).status();
  EXPECT_EQ(no_nccl.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(no_nccl.message()),
              AllOf(HasSubstr("NCCL cannot be loaded (libnccl.so.1: cannot open"),
                    HasSubstr("LD_LIBRARY_PATH"), HasSubstr("--collectives gloo")));
}

TEST(CudaLibrariesTest, AnotherLibraryOfTheNameIsRefusedForTheFunctionThatItLacks) {
  EXPECT_THAT(std::string(cuda::LoadCublasLt({"libm.so.6"}).status().message()),
              HasSubstr("cuBLASLt, loaded as libm.so.6, has no cublasLtCreate"));
  EXPECT_THAT(std::string(LoadNccl({"libm.so.6"}).status().message()),
              HasSubstr("NCCL, loaded as libm.so.6, has no ncclAllGather"));
}

TEST(CudaLibrariesTest, AnotherMajorVersionOfCublasLtIsRefused) {
  const absl::Status old = cuda::LoadCublasLt({OLD_CUBLASLT}).status();
  EXPECT_EQ(old.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(old.message()),
              AllOf(HasSubstr(OLD_CUBLASLT),
                    HasSubstr("version code " + std::to_string(CUBLAS_VER_MAJOR - 1) +
                              "0000, wanted " + std::to_string(CUBLAS_VER_MAJOR) + "xxxx"),
                    HasSubstr("LD_LIBRARY_PATH")));
}

}  // namespace
}  // namespace zeroshard
