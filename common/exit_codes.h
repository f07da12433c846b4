// What a program's exit code says, the same for every binary.
#pragma once

#include "absl/status/status.h"

namespace zeroshard {

enum ExitCode : int {
  kExitOk = 0,           // done; for the client: the job completed
  kExitFailed = 1,       // the job or the run failed
  kExitUsage = 2,        // the command line, a file or a specification is wrong
  kExitUnavailable = 3,  // nobody answers at an address, or an address is taken
  kExitConflict = 4,     // it exists already, or another process holds it (data folder, name)
  kExitNotFound = 5,     // no such job, file or folder
  kExitDoesNotFit = 6,   // nothing that is there, or was named, has room for it
};

inline int ExitCodeFor(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return kExitUsage;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return kExitUnavailable;
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kFailedPrecondition:
      return kExitConflict;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kResourceExhausted:
      return kExitDoesNotFit;
    default:
      return kExitFailed;
  }
}

}  // namespace zeroshard
