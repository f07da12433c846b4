#include "common/process_metrics.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace zeroshard {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::optional<double> Number(absl::string_view text) {
  double value = 0;
  if (!absl::SimpleAtod(text, &value)) return std::nullopt;
  return value;
}

// Fields of /proc/self/stat as proc(5) numbers them, from 3 on. The second, the program's name in
// parentheses, may hold anything.
class Stat {
 public:
  explicit Stat(const std::string& text) {
    const size_t name_end = text.rfind(')');
    if (name_end == std::string::npos) return;
    fields_ = absl::StrSplit(text.substr(name_end + 1), absl::ByAnyChar(" \n"), absl::SkipEmpty());
  }
  std::optional<double> Field(size_t number) const {
    if (number - 3 >= fields_.size()) return std::nullopt;
    return Number(fields_[number - 3]);
  }

 private:
  std::vector<std::string> fields_;
};

// The soft limit of "Max open files" in /proc/self/limits; none where it is "unlimited".
std::optional<double> MaxFiles(const std::string& limits) {
  for (const absl::string_view line : absl::StrSplit(limits, '\n')) {
    if (!absl::StartsWith(line, "Max open files")) continue;
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.size() > 3) return Number(words[3]);
  }
  return std::nullopt;
}

// Seconds since 1970 at which the machine started.
std::optional<double> BootTime(const std::string& stat) {
  for (const absl::string_view line : absl::StrSplit(stat, '\n')) {
    if (absl::StartsWith(line, "btime ")) return Number(line.substr(6));
  }
  return std::nullopt;
}

// The one that lists them counts too.
std::optional<double> OpenFiles(const std::string& folder) {
  std::error_code error;
  std::filesystem::directory_iterator at(folder, error);
  if (error) return std::nullopt;
  size_t count = 0;
  for (; at != std::filesystem::directory_iterator() && !error; at.increment(error)) ++count;
  if (error) return std::nullopt;
  return static_cast<double>(count);
}

void Add(std::vector<MetricFamily>* families, const char* name, const char* help, MetricType type,
         std::optional<double> value) {
  if (!value.has_value()) return;
  MetricFamily& family = families->emplace_back();
  family.name = name;
  family.help = help;
  family.type = type;
  prometheus::ClientMetric& metric = family.metric.emplace_back();
  (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = *value;
}

}  // namespace

std::vector<MetricFamily> ProcessMetrics::Collect() const {
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const double page = static_cast<double>(sysconf(_SC_PAGESIZE));
  const std::string self = absl::StrCat(root_, "/self/");
  const Stat stat(Contents(self + "stat"));
  std::optional<double> cpu, resident, start;
  if (const auto user = stat.Field(14), system = stat.Field(15); user && system)
    cpu = (*user + *system) / ticks;
  if (const auto pages = stat.Field(24)) resident = *pages * page;
  if (const auto since_boot = stat.Field(22)) {
    if (const auto boot = BootTime(Contents(root_ + "/stat"))) start = *boot + *since_boot / ticks;
  }
  std::vector<MetricFamily> families;
  Add(&families, "process_cpu_seconds_total", "Total user and system CPU time spent in seconds.",
      MetricType::Counter, cpu);
  Add(&families, "process_open_fds", "Number of open file descriptors.", MetricType::Gauge,
      OpenFiles(self + "fd"));
  Add(&families, "process_max_fds", "Maximum number of open file descriptors.", MetricType::Gauge,
      MaxFiles(Contents(self + "limits")));
  Add(&families, "process_virtual_memory_bytes", "Virtual memory size in bytes.", MetricType::Gauge,
      stat.Field(23));
  Add(&families, "process_resident_memory_bytes", "Resident memory size in bytes.",
      MetricType::Gauge, resident);
  Add(&families, "process_start_time_seconds",
      "Start time of the process since unix epoch in seconds.", MetricType::Gauge, start);
  return families;
}

}  // namespace zeroshard
