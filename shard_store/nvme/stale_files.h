// Names of chunk files in an NVMe folder, and the removal of those whose store has ended.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shard_store/nvme/direct_file.h"

namespace zeroshard::nvme {

// Makes `dir`/zeroshard-<run id>-<random>.chunks, locked (flock) for as long as it is open, and
// removes the folder's other chunk files that nobody holds locked: a store that was killed left
// them. What is in those is logged, never used. Stores that share a folder take turns here, by a
// lock on the folder. Errors: INVALID_ARGUMENT for a run id with other characters than letters,
// digits, '.', '_' and '-'; DEADLINE_EXCEEDED; those of the file system, with the path.
absl::StatusOr<std::shared_ptr<DirectFile>> CreateChunkFile(const std::string& dir,
                                                            const std::string& run_id,
                                                            DiskHook* hook, absl::Duration timeout);

// Removes what nobody holds in `dir`, as CreateChunkFile does: for a store at its start.
absl::Status RemoveStaleFiles(const std::string& dir, absl::Duration timeout);

}  // namespace zeroshard::nvme
