// Fills the chunks of a job as its directive says: from a checkpoint, a Hugging Face folder or the
// seed, or from other stores. Within this library.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shard_store/state/job_state.h"
#include "shard_store/state/store_host.h"

namespace zeroshard::store {

struct LoadRequest {
  v1::StoreJob job;
  std::map<uint32_t, Chunk> chunks;  // to fill; those of job.copies among them are copied
  bool momentum_only = false;        // there is no exp_avg_sq
};

struct LoadHooks {
  std::function<void()> progress;  // something was read; from any thread
  // To a store of the job's map, by its index; with the generation that is open here now.
  std::function<absl::StatusOr<std::unique_ptr<PeerReader>>(uint32_t store)> connect;
  const std::atomic<bool>* stop = nullptr;
  absl::Duration peer_timeout;  // nothing came from a peer
  // How far it is, for people; `waits`: and that another store has said nothing for a while. From
  // any thread, in order, no oftener than a chunk is done or 100 times a second. May be null.
  std::function<void(const std::string& what, bool waits)> doing;
  // A read of this folder begins, or has ended: whoever ends the process can say what does not
  // answer. From any thread, as often the one as the other. May be null.
  std::function<void(const std::string& folder, bool begins)> reading;
  ThreadStarter start_thread;  // of those that copy; others: tests alone
};

// How long a store that is copied from may give nothing: it is said well before the coordinator
// loses patience with the store that copies, after start_seconds or step_seconds.
absl::Duration PeerTimeout(const v1::JobSpec& spec);

// On the calling thread, the state's pool and threads of its own. CANCELLED soon after `stop` is
// true, also where another store answers nothing; errors name file and tensor, or store and chunk.
// Every checksum of a checkpoint's files is verified beside reading them; nothing may be used
// before this is OK. RESOURCE_EXHAUSTED: the system has no thread more.
absl::Status LoadState(const LoadRequest& request, const ModelTable& model, const LoadHooks& hooks,
                       JobState* state);

}  // namespace zeroshard::store
