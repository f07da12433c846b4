#include "worker/device/cuda/dynamic_library.h"

#include <cmath>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// glibc's, which a program has anyway.
constexpr char kThere[] = "libm.so.6";

TEST(DynamicLibraryTest, FindsFunctionsInTheFirstNameThatIsThere) {
  const auto library = DynamicLibrary::Open("maths", {"libzeroshard-none.so.1", kThere}, "");
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_EQ(library->name(), kThere);
  double (*ldexp)(double, int) = nullptr;
  ASSERT_TRUE(library->Find("ldexp", &ldexp).ok());
  EXPECT_EQ(ldexp(3, 4), 48);
}

TEST(DynamicLibraryTest, SaysOfEveryNameWhyItIsNotThereAndWhatToDo) {
  const absl::Status missing =
      DynamicLibrary::Open("maths", {"libzeroshard-none.so.1", "libzeroshard-none.so"},
                           "install libzeroshard-none")
          .status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(missing.message(),
            "maths cannot be loaded (libzeroshard-none.so.1: cannot open shared object file: No "
            "such file or directory; libzeroshard-none.so: cannot open shared object file: No such "
            "file or directory); install libzeroshard-none");
}

TEST(DynamicLibraryTest, NamesTheFunctionThatALibraryLacks) {
  const auto library = DynamicLibrary::Open("maths", {kThere}, "install a newer libm");
  ASSERT_TRUE(library.ok()) << library.status();
  void (*function)() = nullptr;
  const absl::Status missing = library->Find("zeroshard_none", &function);
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(missing.message()),
              AllOf(HasSubstr("maths, loaded as libm.so.6, has no zeroshard_none ("),
                    HasSubstr("undefined symbol"), HasSubstr("install a newer libm")));
  EXPECT_EQ(function, nullptr);
}

}  // namespace
}  // namespace zeroshard::cuda
