// The limits and times that the coordinator's core goes by.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/time/time.h"
#include "common/plan/chunk_table.h"

namespace zeroshard::coordinator {

struct CoreOptions {
  absl::Duration heartbeat_interval = absl::Seconds(1);
  // A member not heard of for this long is lost.
  absl::Duration member_timeout = absl::Seconds(10);
  // Between the first sign of a failure and the verdict: peers of a dead rank often report before
  // anybody says that it died.
  absl::Duration verdict_grace = absl::Seconds(1);
  // After a start of the coordinator: how long, beyond member_timeout, members have to come back.
  absl::Duration return_grace = absl::Seconds(10);
  // A member that still runs an ended job this long after it was told to stop is fenced.
  absl::Duration stop_grace = absl::Seconds(30);
  // How long a job that could go on with fewer workers waits for all that it wants, once there are
  // too few.
  absl::Duration replacement_grace = absl::Seconds(30);
  // How long a job waits for a process of its own that was given up, and lives on, to leave its
  // folder of checkpoints.
  absl::Duration folder_patience = absl::Minutes(10);
  // How long a lost member stays in the list of nodes.
  absl::Duration lost_shown = absl::Minutes(10);

  // A store that could not keep a job's state gets none of it for this long where the job can do
  // without; twice as long each time again, up to the limit, which later also forgets it.
  absl::Duration store_rest = absl::Seconds(10);
  absl::Duration store_rest_limit = absl::Minutes(10);

  int64_t chunk_elements = kChunkElements;  // of offloaded jobs; others: tests alone

  size_t max_members = 10000;
  size_t max_live_jobs = 1000;
  size_t max_ended_jobs = 1000;  // the oldest beyond it are forgotten
  size_t max_key_bytes = 256;
  size_t max_value_bytes = 64 << 10;
  size_t max_keys_per_rank = 1024;                 // of one generation, times its world size
  size_t max_key_bytes_per_generation = 64 << 20;  // keys and values together
  size_t max_barriers = 4096;                      // names of one generation that are remembered
  size_t max_waiting_per_rank = 64;                // calls of one rank that wait
  size_t max_records_per_report = 10000;           // of steps, of checkpoints and of samples
  size_t max_sample_bytes = 64 << 10;              // of a prompt, of a text; what is longer is cut
  size_t max_sample_prompts = 10000;               // of one run, that repetitions are known of
  size_t max_checkpoint_events = 150;              // of one run's events
};

}  // namespace zeroshard::coordinator
