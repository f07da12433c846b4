#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/time/clock.h"
#include "client/command.h"
#include "client/console.h"
#include "client/jobs_client.h"
#include "client/render.h"
#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/spec/history_line.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

absl::StatusOr<int> History(const CommandContext& context, const std::string& job) {
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  ZS_RETURN_IF_ERROR(client->History(job, [&](const v1::StepRecord& record) {
    *context.env->out << FormatHistoryLine(record) << "\n";
  }));
  return kExitOk;
}

struct LogOptions {
  std::string job;
  std::optional<uint32_t> rank;
  bool follow = false;
};

// Puts the rank before each whole line; chunks may end anywhere.
class LogPrinter {
 public:
  LogPrinter(std::ostream* out, bool name_ranks) : out_(out), name_ranks_(name_ranks) {}
  ~LogPrinter() {
    for (auto& [rank, rest] : rest_) {
      if (!rest.empty()) Print(rank, rest);
    }
  }

  void Add(const v1::LogChunk& chunk) {
    std::string& rest = rest_[chunk.rank()];
    rest += chunk.text();
    size_t begin = 0;
    for (size_t end = rest.find('\n'); end != std::string::npos; end = rest.find('\n', begin)) {
      Print(chunk.rank(), rest.substr(begin, end - begin));
      begin = end + 1;
    }
    rest.erase(0, begin);
    if (rest.size() > kMostLogLine) {
      Print(chunk.rank(), rest);
      rest.clear();
    }
    out_->flush();
  }

 private:
  void Print(uint32_t rank, const std::string& line) {
    if (name_ranks_) *out_ << "rank " << rank << ": ";
    *out_ << Shown(line, kMostLogLine, Layout::kKept) << "\n";
  }

  std::ostream* const out_;
  const bool name_ranks_;
  std::map<uint32_t, std::string> rest_;
};

// Of one run, from the beginning, each byte once: a stream that was cut (the coordinator ends
// connections that are old, and may be started again) is taken up where it was.
absl::Status FollowLogs(JobsClient* client, const LogOptions& options,
                        const std::function<void(const v1::LogChunk&)>& on_chunk) {
  constexpr absl::Duration kPatience = absl::Seconds(30);
  constexpr absl::Duration kPause = absl::Milliseconds(500);
  ZS_ASSIGN_OR_RETURN(const v1::JobStatus job, client->Get(options.job));
  std::map<uint32_t, size_t> told;
  const Clock& clock = SystemClock::Get();
  absl::Duration heard = clock.Now();
  while (true) {
    std::map<uint32_t, size_t> skip = told;
    const absl::Status status =
        client->Logs(job.run_id(), options.rank, /*follow=*/true, [&](const v1::LogChunk& chunk) {
          heard = clock.Now();
          size_t& left = skip[chunk.rank()];
          const size_t known = std::min(left, chunk.text().size());
          left -= known;
          if (known == chunk.text().size()) return;
          v1::LogChunk fresh = chunk;
          fresh.set_text(chunk.text().substr(known));
          told[chunk.rank()] += fresh.text().size();
          on_chunk(fresh);
        });
    if (!absl::IsUnavailable(status)) return status;
    // A long silence before the cut is no reason to give up: only what comes after it counts.
    if (absl::Status there = client->Version().status(); there.ok()) heard = clock.Now();
    if (clock.Now() - heard > kPatience) return status;
    absl::SleepFor(kPause);
  }
}

absl::StatusOr<int> Logs(const CommandContext& context, const LogOptions& options) {
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  LogPrinter printer(context.env->out, !options.rank);
  const auto print = [&](const v1::LogChunk& chunk) {
    if (context.options.json()) {
      *context.env->out << JsonLine(ToJson(chunk)) << std::endl;
    } else {
      printer.Add(chunk);
    }
  };
  ZS_RETURN_IF_ERROR(options.follow
                         ? FollowLogs(client.get(), options, print)
                         : client->Logs(options.job, options.rank, /*follow=*/false, print));
  return kExitOk;
}

}  // namespace

void AddRecordCommands(CLI::App* app, CommandContext* context) {
  const auto job = std::make_shared<std::string>();
  AddCommand(app, context, "history",
             "Prints a line of JSON for every step, as history.jsonl has it",
             [context, job] { return History(*context, *job); })
      ->add_option("job", *job, "Name or run id")
      ->required();

  const auto options = std::make_shared<LogOptions>();
  CLI::App* logs = AddCommand(app, context, "logs", "Prints what a job's ranks logged",
                              [context, options] { return Logs(*context, *options); });
  logs->add_option("job", options->job, "Name or run id")->required();
  logs->add_option("--rank", options->rank, "Of this rank only");
  logs->add_flag("--follow", options->follow, "Goes on until the job ends");
}

}  // namespace zeroshard
