// A shared library that is loaded when it is needed, not when the program starts.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard::cuda {

// Thread-safe. Copies are the same library, which stays loaded until the process ends: its threads
// and what it registered with the driver may outlive any owner.
class DynamicLibrary {
 public:
  // The first of `names` that the dynamic loader finds, with all its symbols resolved; they are
  // seen by nobody else. `what` is the library as a user knows it, `remedy` what to do where it is
  // missing. FAILED_PRECONDITION with what the loader says of each name.
  static absl::StatusOr<DynamicLibrary> Open(std::string what,
                                             const std::vector<std::string>& names,
                                             std::string remedy);

  // Sets *function, whose type is the caller's to get right. FAILED_PRECONDITION where the library
  // has no such symbol.
  template <typename Function>
  absl::Status Find(const char* symbol, Function* function) const {
    absl::StatusOr<void*> found = Symbol(symbol);
    if (found.ok()) *function = reinterpret_cast<Function>(*found);
    return found.status();
  }

  // The name that was found.
  const std::string& name() const { return name_; }

 private:
  DynamicLibrary(std::string what, std::string name, std::string remedy, void* handle)
      : what_(std::move(what)),
        name_(std::move(name)),
        remedy_(std::move(remedy)),
        handle_(handle) {}
  absl::StatusOr<void*> Symbol(const char* symbol) const;

  std::string what_, name_, remedy_;
  void* handle_;
};

}  // namespace zeroshard::cuda
