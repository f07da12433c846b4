// Exceptions, where this library's threads begin. Within this library.
#pragma once

#include <exception>
#include <functional>
#include <new>
#include <system_error>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace zeroshard::store {

// What `work` says or, of an exception, RESOURCE_EXHAUSTED (memory) or INTERNAL.
template <class Work>
absl::Status Caught(const Work& work) {
  try {
    return work();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("out of memory on this host");
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("unexpected exception: ", error.what()));
  }
}

// How threads begin; null: std::thread. May throw what that does.
using ThreadStarter = std::function<std::thread(std::function<void()>)>;

// RESOURCE_EXHAUSTED: the system has no thread more.
inline absl::Status StartThread(const ThreadStarter& start, std::function<void()> run,
                                std::thread* thread) {
  return Caught([&]() -> absl::Status {
    try {
      *thread = start ? start(std::move(run)) : std::thread(std::move(run));
      return absl::OkStatus();
    } catch (const std::system_error& error) {
      return absl::ResourceExhaustedError(
          absl::StrCat("this host gives the store no thread more (", error.what(),
                       "); look at its limits of processes and at what else runs there"));
    }
  });
}

}  // namespace zeroshard::store
