#include "worker/device/cuda/dynamic_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace zeroshard::cuda {
namespace {

std::string LoaderError() {
  const char* const text = dlerror();
  return text == nullptr ? "the loader gives no reason" : text;
}

}  // namespace

absl::StatusOr<DynamicLibrary> DynamicLibrary::Open(std::string what,
                                                    const std::vector<std::string>& names,
                                                    std::string remedy) {
  std::vector<std::string> reasons;
  for (const std::string& name : names) {
    void* const handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle != nullptr) return DynamicLibrary(std::move(what), name, std::move(remedy), handle);
    reasons.push_back(LoaderError());
  }
  return absl::FailedPreconditionError(
      absl::StrCat(what, " cannot be loaded (", absl::StrJoin(reasons, "; "), "); ", remedy));
}

absl::StatusOr<void*> DynamicLibrary::Symbol(const char* symbol) const {
  if (void* const found = dlsym(handle_, symbol)) return found;
  return absl::FailedPreconditionError(
      absl::StrCat(what_, ", loaded as ", name_, ", has no ", symbol, " (", LoaderError(),
                   "): another version than this program's; ", remedy_));
}

}  // namespace zeroshard::cuda
