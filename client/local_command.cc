#include <algorithm>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/command.h"
#include "client/folder_lock.h"
#include "client/job_file.h"
#include "client/local_cluster.h"
#include "client/mesh_view.h"
#include "client/render.h"
#include "client/resume.h"
#include "client/watch.h"
#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/files.h"
#include "common/member/host_info.h"
#include "common/plan/nvme_bytes.h"
#include "common/plan/offload.h"
#include "common/security/options.h"
#include "common/signals.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kGrace = absl::Seconds(5);
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr absl::Duration kSuperviseInterval = absl::Milliseconds(50);
constexpr int kMostWorkers = 256;
// What a shell reports for a command that a signal ended.
constexpr int kExitSignalBase = 128;

struct LocalOptions {
  std::string file;
  std::vector<std::string> overrides;
  int workers = 0;            // 0: as many as the job wants
  int stores = 0;             // an offloaded job gets at least what it needs
  uint64_t store_memory = 0;  // 0: the machine's, shared
  uint64_t store_nvme = 0;    // 0: what is free, shared
  int threads = 0;            // 0: the cores divided by the workers
  std::string workdir = "zeroshard-local";
  std::string bin_dir;
  ResumeOptions resume;
  int metrics_base_port = 0;
};

// Where the daemons may be: in the given folder or beside this program, and, in a build folder, in
// the folders that CMake builds them in.
std::vector<std::string> BinDirs(const LocalOptions& options, const std::string& program) {
  const fs::path home = fs::path(program).parent_path();
  std::vector<fs::path> roots = {home, home.parent_path()};
  if (!options.bin_dir.empty()) roots = {options.bin_dir};
  std::vector<std::string> folders;
  for (const fs::path& root : roots) {
    for (const char* sub : {"", "coordinator", "worker", "shard_store"}) {
      const std::string folder = (*sub == '\0' ? root : root / sub).lexically_normal().string();
      if (root == roots.front() || *sub != '\0') folders.push_back(folder);
    }
  }
  return folders;
}

// One run of `zeroshard local`.
class LocalRun {
 public:
  LocalRun(const CommandContext& context, const LocalOptions& options)
      : context_(context),
        options_(options),
        console_(*context.env),
        view_(&console_, &SystemClock::Get(), context.options.json()) {}

  absl::StatusOr<int> Run();

 private:
  absl::StatusOr<LoadedJob> LoadJob();
  absl::StatusOr<int> RunCluster(const v1::JobSpec& spec, LocalCluster* cluster);
  // Jobs of an earlier run that was killed would take the workers away from this one.
  absl::Status CancelLeftovers(JobsClient* client);
  absl::StatusOr<int> RunJob(const v1::SubmitRequest& request, JobsClient* client,
                             LocalCluster* cluster);
  // Asked to stop: lets the job write a checkpoint where it can, until it ended or a second signal.
  void EndJob(const v1::JobSpec& spec, const std::string& run_id, JobsClient* client,
              LocalCluster* cluster, const std::atomic<bool>& ended);
  int Complete(const absl::Status& status);
  int Summarise(const v1::JobStatus& status, const LocalCluster& cluster);
  absl::Status Pause(absl::Duration duration);
  void Notice(const std::string& text);

  const CommandContext& context_;
  const LocalOptions& options_;
  ShutdownSignal signal_;
  int signalled_ = 0;
  Console console_;
  JobView view_;
  int workers_ = 0;
  int stores_ = 0;
  int needed_stores_ = 0;
  bool nvme_ = false;  // the job's state is on the stores' disks
  std::string workdir_;
};

void LocalRun::Notice(const std::string& text) {
  if (context_.options.json()) {
    PrintError(context_.env->err, text);
  } else {
    console_.Print(Shown(text));
  }
}

absl::Status LocalRun::Pause(absl::Duration duration) {
  if (signalled_ == 0) signalled_ = signal_.Wait(duration);
  if (signalled_ == 0) return absl::OkStatus();
  return absl::CancelledError(absl::StrCat("stopped by ", strsignal(signalled_)));
}

absl::StatusOr<LoadedJob> LocalRun::LoadJob() {
  std::vector<std::string> overrides;
  if (options_.workers > 0) {
    overrides.push_back(absl::StrCat("resources.workers=", options_.workers));
    overrides.push_back("resources.min_workers=0");  // as many; a --set may still change the number
  }
  overrides.insert(overrides.end(), options_.overrides.begin(), options_.overrides.end());
  std::error_code error;
  const std::string base = fs::absolute(options_.workdir, error).string();
  if (error) return absl::InternalError(absl::StrCat(options_.workdir, ": ", error.message()));
  // Without a word of the user's the job goes on from what its folder holds.
  const std::string resume =
      options_.resume.fresh || !options_.resume.from.empty() ? options_.resume.from : "latest";
  ZS_ASSIGN_OR_RETURN(LoadedJob job, LoadJobFile(options_.file, {.overrides = overrides,
                                                                 .checkpoint_base = base,
                                                                 .resume_from = resume}));
  const v1::JobSpec& spec = job.spec;
  ZS_RETURN_IF_ERROR(CheckFilesHere(spec));
  const int wanted = static_cast<int>(spec.resources().workers());
  workers_ = options_.workers > 0 ? options_.workers : wanted;
  if (wanted > workers_) {
    return absl::InvalidArgumentError(absl::StrCat("resources.workers: the job wants ", wanted,
                                                   " workers, --workers starts ", workers_));
  }
  if (workers_ > kMostWorkers) {
    return absl::InvalidArgumentError(absl::StrCat("resources.workers: seen ", workers_,
                                                   ", wanted at most ", kMostWorkers,
                                                   " on one machine; name fewer with --workers"));
  }
  // Each copy of a chunk is on another store.
  if (IsOffloaded(spec)) {
    needed_stores_ = std::max(1, static_cast<int>(spec.store().replicas()));
    nvme_ = UsesNvme(spec);
  }
  stores_ = std::max(options_.stores, needed_stores_);
  const int daemons = 1 + workers_ + stores_;
  if (options_.metrics_base_port != 0 && options_.metrics_base_port + daemons > 65536) {
    return absl::InvalidArgumentError(absl::StrCat("--metrics-base-port: seen ",
                                                   options_.metrics_base_port, ", wanted at most ",
                                                   65536 - daemons, " for ", daemons, " daemons"));
  }
  return job;
}

absl::StatusOr<int> LocalRun::Run() {
  ZS_ASSIGN_OR_RETURN(const LoadedJob job, LoadJob());
  const v1::JobSpec& spec = job.spec;
  for (const std::string& warning : job.warnings) {
    PrintError(context_.env->err, absl::StrCat("note, ", warning));
  }
  ZS_RETURN_IF_ERROR(MakeFolders(options_.workdir));
  workdir_ = fs::canonical(options_.workdir).string();
  ZS_ASSIGN_OR_RETURN(const auto lock, FolderLock::Take(workdir_));

  LocalClusterOptions cluster_options;
  cluster_options.workdir = workdir_;
  cluster_options.bin_dirs = BinDirs(options_, context_.env->program);
  cluster_options.workers = workers_;
  cluster_options.needed_workers = static_cast<int>(spec.resources().workers());
  cluster_options.stores = stores_;
  cluster_options.needed_stores = needed_stores_;
  cluster_options.nvme = nvme_;
  cluster_options.store_nvme = options_.store_nvme;
  // Stores on one machine share its memory.
  cluster_options.store_memory =
      options_.store_memory > 0 ? options_.store_memory : MemoryLimitBytes() / std::max(1, stores_);
  const int cores = std::max(1U, std::thread::hardware_concurrency());
  cluster_options.threads = options_.threads > 0 ? options_.threads : std::max(1, cores / workers_);
  cluster_options.metrics_base_port = options_.metrics_base_port;
  LocalCluster cluster(
      cluster_options, &SystemClock::Get(),
      [this](absl::Duration duration) { return Pause(duration); },
      [this](const std::string& text) { Notice(text); });

  const absl::StatusOr<int> result = RunCluster(spec, &cluster);
  cluster.Stop(kGrace);
  if (!result.ok() && signalled_ != 0) {
    PrintError(context_.env->err, result.status().message());
    return kExitSignalBase + signalled_;
  }
  return result;
}

absl::StatusOr<int> LocalRun::RunCluster(const v1::JobSpec& spec, LocalCluster* cluster) {
  Notice(absl::StrCat("starting a coordinator, ", workers_, workers_ == 1 ? " worker" : " workers",
                      " and ", stores_, stores_ == 1 ? " shard store" : " shard stores", " in ",
                      workdir_));
  if (const std::string mesh = DescribeMesh(spec); !mesh.empty())
    Notice(absl::StrCat("mesh: ", mesh));
  ZS_RETURN_IF_ERROR(cluster->StartCoordinator());
  ZS_ASSIGN_OR_RETURN(const auto client, JobsClient::Create(cluster->coordinator_address(),
                                                            context_.options.timeout()));
  ZS_RETURN_IF_ERROR(CancelLeftovers(client.get()));
  ZS_RETURN_IF_ERROR(cluster->StartMembers(client.get()));
  std::vector<std::string> metrics;
  for (const auto& [name, address] : cluster->MetricsAddresses()) {
    metrics.push_back(absl::StrCat(name, " http://", address, "/metrics"));
  }
  Notice(absl::StrCat("coordinator at ", cluster->coordinator_address(),
                      "; metrics: ", absl::StrJoin(metrics, ", ")));
  const absl::StatusOr<v1::SubmitRequest> request =
      MakeLocalRequest(spec, options_.resume, [this](const std::string& text) { Notice(text); });
  if (absl::IsAlreadyExists(request.status())) return Complete(request.status());
  ZS_RETURN_IF_ERROR(request.status());
  return RunJob(*request, client.get(), cluster);
}

// Whoever starts the command again until it succeeds finds it done.
int LocalRun::Complete(const absl::Status& status) {
  const std::string reason(status.message());
  const nlohmann::ordered_json result = {
      {"result", {{"state", NameOf(v1::JOB_STATE_COMPLETED)}, {"reason", reason}}}};
  console_.Print(context_.options.json() ? JsonLine(result) : Shown(reason));
  return kExitOk;
}

absl::Status LocalRun::CancelLeftovers(JobsClient* client) {
  ZS_ASSIGN_OR_RETURN(const v1::ListResponse jobs, client->List());
  for (const v1::JobStatus& job : jobs.jobs()) {
    if (HasEnded(job.state())) continue;
    ZS_RETURN_IF_ERROR(client->Cancel(job.run_id()).status());
    Notice(absl::StrCat(job.run_id(), ", left over from an earlier run, is cancelled"));
  }
  return absl::OkStatus();
}

void LocalRun::EndJob(const v1::JobSpec& spec, const std::string& run_id, JobsClient* client,
                      LocalCluster* cluster, const std::atomic<bool>& ended) {
  if (spec.has_checkpoint() && client->Cancel(run_id, /*save=*/true).ok()) {
    Notice("writing a checkpoint before the job ends; a second signal ends it at once");
    while (!ended && signal_.Wait(kSuperviseInterval) == 0) {
      // Whoever dies now is not waited for.
      if (!cluster->Supervise().ok()) break;
    }
  }
  if (ended) return;
  // Best effort: the workers end anyway.
  const absl::Status ignored = client->Cancel(run_id).status();
}

absl::StatusOr<int> LocalRun::RunJob(const v1::SubmitRequest& request, JobsClient* client,
                                     LocalCluster* cluster) {
  ZS_ASSIGN_OR_RETURN(const v1::SubmitResponse submitted, client->Submit(request));
  StopToken stop;
  std::atomic<bool> ended{false};
  absl::StatusOr<v1::JobStatus> followed = absl::CancelledError("not followed");
  std::thread watcher([&] {
    followed =
        FollowJob(client, submitted.run_id(), kPatience, &SystemClock::Get(), &stop, view_.Sink());
    ended = true;
  });
  absl::Status supervised;
  while (!ended && supervised.ok()) {
    supervised = Pause(kSuperviseInterval);
    if (supervised.ok()) supervised = cluster->Supervise();
  }
  if (!supervised.ok()) {
    if (signalled_ != 0) {
      EndJob(request.spec(), submitted.run_id(), client, cluster, ended);
    }
    stop.Stop();
  }
  watcher.join();
  if (!supervised.ok() && followed.ok()) {
    // Whether the state was saved, and where.
    return absl::Status(supervised.code(),
                        absl::StrCat(supervised.message(), "; ", followed->run_id(), " ",
                                     NameOf(followed->state()), ": ", followed->reason()));
  }
  ZS_RETURN_IF_ERROR(supervised);
  ZS_RETURN_IF_ERROR(followed.status());
  return Summarise(*followed, *cluster);
}

int LocalRun::Summarise(const v1::JobStatus& status, const LocalCluster& cluster) {
  const int code = view_.Finish(status, context_.env->err);
  const std::string history = absl::StrCat(workdir_, "/jobs/", status.name(), "/history.jsonl");
  if (context_.options.json()) {
    nlohmann::ordered_json metrics = nlohmann::ordered_json::object();
    for (const auto& [name, address] : cluster.MetricsAddresses()) metrics[name] = address;
    const nlohmann::ordered_json result = {
        {"state", NameOf(status.state())},
        {"reason", status.reason()},
        {"first_loss",
         status.has_first() ? nlohmann::ordered_json(status.first().loss()) : nullptr},
        {"last_loss", status.has_last() ? nlohmann::ordered_json(status.last().loss()) : nullptr},
        {"tokens_per_second", view_.meter().TokensPerSecond()},
        {"weights_digest", status.weights_digest()},
        {"steps_lost", status.steps_lost()},
        {"history", history},
        {"logs", cluster.log_folder()},
        {"metrics", metrics}};
    console_.Print(JsonLine(nlohmann::ordered_json{{"result", result}}));
    return code;
  }
  console_.Print(absl::StrCat("history  ", history));
  console_.Print(absl::StrCat("logs     ", cluster.log_folder()));
  std::vector<std::string> metrics;
  for (const auto& [name, address] : cluster.MetricsAddresses()) {
    metrics.push_back(absl::StrCat(name, " ", address));
  }
  console_.Print(absl::StrCat("metrics  (while it ran) ", absl::StrJoin(metrics, ", ")));
  return code;
}

}  // namespace

void AddLocalCommand(CLI::App* app, CommandContext* context) {
  const auto options = std::make_shared<LocalOptions>();
  CLI::App* local = AddCommand(
      app, context, "local",
      "Runs a job on a whole cluster of its own on this machine; exit code 0 only if it completed",
      [context, options] {
        // All of it is on loopback; the certificates of another cluster's client are not for these
        // daemons, which would find them in their environment.
        for (const char* variable : security::kVariables) unsetenv(variable);
        return LocalRun(*context, *options).Run();
      },
      /*remote=*/false);
  local->add_option("job", options->file, "The specification, YAML or JSON; - reads standard input")
      ->type_name("JOB.yaml")
      ->required();
  local
      ->add_option("--workers", options->workers,
                   "Worker processes; also the job's resources.workers unless --set names them")
      ->check(CLI::Range(1, kMostWorkers));
  local
      ->add_option("--stores", options->stores,
                   "Shard store processes; a job with offload_optimizer gets at least "
                   "store.replicas of them by itself")
      ->check(CLI::Range(0, kMostWorkers))
      ->capture_default_str();
  local
      ->add_option("--store-nvme", options->store_nvme,
                   "Most bytes that each store writes into its folder for a job with device: nvme "
                   "(WORKDIR/nvme). Default: what is free there")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::PositiveNumber);
  local
      ->add_option(
          "--store-memory", options->store_memory,
          "Most bytes of memory that each store process takes, of which about 60 MiB are "
          "its own, for example 4GiB. Default: this machine's memory divided by the stores")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::PositiveNumber)
      ->type_name("SIZE");
  local
      ->add_option("--threads", options->threads,
                   "Threads of each worker; else the cores divided by the workers")
      ->check(CLI::Range(1, 1024));
  local->add_option("--workdir", options->workdir, "Where state, history and logs go")
      ->type_name("DIR")
      ->capture_default_str();
  local
      ->add_option("--bin-dir", options->bin_dir,
                   "Where the daemons are, if not beside this program")
      ->type_name("DIR");
  AddResumeOptions(local, &options->resume);
  local->add_flag("--fresh", options->resume.fresh,
                  "Starts anew where checkpoint.dir holds checkpoints of the job: they go to a "
                  "folder old-N in it. Without it the job goes on from the newest");
  local
      ->add_option("--metrics-base-port", options->metrics_base_port,
                   "Metrics ports in a row from this one: coordinator, workers, stores")
      ->check(CLI::Range(1, 65535));
  local->add_option("--set", options->overrides, "Overrides a key: --set steps=20")
      ->type_name("KEY.PATH=VALUE")
      ->allow_extra_args(false);
}

}  // namespace zeroshard
