#include <map>
#include <memory>
#include <optional>
#include <string>

#include "client/command.h"
#include "client/jobs_client.h"
#include "client/render.h"
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
    constexpr size_t kLongestLine = 1 << 20;
    std::string& rest = rest_[chunk.rank()];
    rest += chunk.text();
    size_t begin = 0;
    for (size_t end = rest.find('\n'); end != std::string::npos; end = rest.find('\n', begin)) {
      Print(chunk.rank(), rest.substr(begin, end - begin));
      begin = end + 1;
    }
    rest.erase(0, begin);
    if (rest.size() > kLongestLine) {
      Print(chunk.rank(), rest);
      rest.clear();
    }
    out_->flush();
  }

 private:
  void Print(uint32_t rank, const std::string& line) {
    if (name_ranks_) *out_ << "rank " << rank << ": ";
    *out_ << line << "\n";
  }

  std::ostream* const out_;
  const bool name_ranks_;
  std::map<uint32_t, std::string> rest_;
};

absl::StatusOr<int> Logs(const CommandContext& context, const LogOptions& options) {
  ZS_ASSIGN_OR_RETURN(const auto client, Connect(context));
  LogPrinter printer(context.env->out, !options.rank);
  ZS_RETURN_IF_ERROR(
      client->Logs(options.job, options.rank, options.follow, [&](const v1::LogChunk& chunk) {
        if (context.options.json()) {
          *context.env->out << ToJson(chunk).dump(-1, ' ', false,
                                                  nlohmann::json::error_handler_t::replace)
                            << std::endl;
        } else {
          printer.Add(chunk);
        }
      }));
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
