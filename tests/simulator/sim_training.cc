// A rank of a job whose state is on its ranks: load, meet, compute, save, report.
#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/simulator/sim_worker.h"

namespace zeroshard::simulator {

void SimWorker::Meet(const std::string& what, Then then) {
  Phase("communication");
  Watch(cluster_->world().Between(absl::Seconds(10), absl::Seconds(40)),
        absl::UnavailableError("a peer does not come"));
  cluster_->Collective(Key(what), rank_->assign.rank(), rank_->assign.world_size(), "",
                       [this, rank = rank_, then = std::move(then),
                        self = weak_from_this()](const std::map<uint32_t, std::string>&) {
                         const std::shared_ptr<Process> process = self.lock();
                         if (process == nullptr || !process->alive()) return;
                         After(absl::ZeroDuration(), [this, rank, then] {
                           if (rank_ == rank) then(*rank);
                         });
                       });
}

void SimWorker::Load() {
  const v1::Assign& assign = rank_->assign;
  if (assign.first_step() > 1) {
    const auto folder = cluster_->disk().folders.find(assign.resume().checkpoint());
    if (folder == cluster_->disk().folders.end()) {
      // A process that was given up woke, completed a newer one and deleted this.
      return End(absl::NotFoundError(absl::StrCat("cannot find ", assign.resume().checkpoint())));
    }
    if (!folder->second.complete || folder->second.step + 1 != assign.first_step()) {
      return cluster_->world().Violate(
          "I7",
          absl::StrCat("rank ", assign.rank(), " of ", assign.run_id(), " is to begin at step ",
                       assign.first_step(), " from ", assign.resume().checkpoint(),
                       ", which is not a complete checkpoint of the step before"));
    }
  } else if (assign.has_resume()) {
    return cluster_->world().Violate(
        "I7", absl::StrCat(assign.run_id(), " begins anew from ", assign.resume().checkpoint()));
  }
  if (assign.rank() == 0) {
    std::weak_ptr<Process>& holder = cluster_->disk_holders()[assign.run_id()];
    const auto* other = static_cast<const SimWorker*>(holder.lock().get());
    if (other != nullptr && other != this && other->HoldsFolder(assign.run_id())) {
      return End(absl::FailedPreconditionError(
          absl::StrCat("checkpoint.dir: job ", assign.job(), " (run ", assign.run_id(),
                       ", process of ", other->name(), ") writes there")));
    }
    holder = weak_from_this();
    rank_->holds_folder = true;
  }
  Barrier("start", [this](Rank& rank) {
    rank.started = true;
    Train();
  });
}

void SimWorker::Train() {
  if (rank_->step == rank_->assign.spec().steps()) return Finish();
  Phase("forward");
  After(cluster_->world().Between(absl::Milliseconds(5), absl::Seconds(1)), If([this](Rank& rank) {
          Meet(absl::StrCat("exchange ", rank.step + 1), [this](Rank& rank) {
            ++rank.step;
            if (rank.assign.rank() == 0) {
              rank.unreported.push_back(reference().Record(rank.step));
              if (cluster_->world().Chance(70)) Report();
            }
            const uint64_t interval = rank.assign.spec().checkpoint().interval_steps();
            const bool last = rank.step == rank.assign.spec().steps();
            if (last || (interval != 0 && rank.step % interval == 0)) return Save();
            Train();
          });
        }));
}

// Each writes its part; rank 0 completes it, while the others train on.
void SimWorker::Save() {
  Phase("saving");
  After(cluster_->world().Between(absl::Milliseconds(1), absl::Seconds(1)), If([this](Rank& rank) {
          Meet(absl::StrCat("saved ", rank.step), [this](Rank& rank) {
            if (rank.assign.rank() == 0) Complete();
            Train();
          });
        }));
}

void SimWorker::Complete() {
  const std::string prefix = absl::StrCat("/ckpt/", rank_->assign.job(), "/step-");
  const uint64_t step = rank_->step;
  After(cluster_->world().Between(absl::Milliseconds(1), absl::Seconds(1)),
        If([this, prefix, step](Rank& rank) {
          auto& folders = cluster_->disk().folders;
          const std::string path = absl::StrFormat("%s%08d", prefix, step);
          folders[path] = Folder{true, step, {}, {}};
          if (rank.assign.spec().checkpoint().keep_last() == 1) {
            std::erase_if(folders, [&](const auto& folder) {
              return absl::StartsWith(folder.first, prefix) && folder.second.step < step;
            });
          }
          v1::CheckpointRecord& record = rank.unsaid.emplace_back();
          record.set_step(step);
          record.set_path(path);
          record.set_complete(true);
          if (rank.finished || cluster_->world().Chance(70)) Report();
        }));
}

}  // namespace zeroshard::simulator
