#include "shard_store/state/numa.h"

#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace zeroshard::store {

std::vector<int> ParseCpuList(const std::string& text, const std::vector<bool>& allowed) {
  std::vector<int> cpus;
  const int count = static_cast<int>(allowed.size());
  for (const absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::vector<absl::string_view> ends = absl::StrSplit(part, '-');
    int first = 0, last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last)) {
      continue;
    }
    for (int cpu = std::max(first, 0); cpu <= std::min(last, count - 1); ++cpu)
      if (allowed[static_cast<size_t>(cpu)]) cpus.push_back(cpu);
  }
  return cpus;
}

NumaLayout ReadNumaLayout(const std::string& folder, const std::vector<bool>& allowed) {
  std::map<int, std::vector<int>> nodes;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    absl::string_view number = name;
    int node = 0;
    if (!absl::ConsumePrefix(&number, "node") || !absl::SimpleAtoi(number, &node)) continue;
    std::ifstream file(entry->path() / "cpulist");
    std::string text;
    std::getline(file, text);
    std::vector<int> cpus = ParseCpuList(text, allowed);
    if (!cpus.empty()) nodes[node] = std::move(cpus);
  }
  NumaLayout layout;
  if (nodes.size() < 2) return layout;
  layout.cpus.clear();
  for (auto& [node, cpus] : nodes) layout.cpus.push_back(std::move(cpus));
  return layout;
}

NumaLayout SystemNumaLayout() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return {};
  std::vector<bool> allowed(CPU_SETSIZE);
  for (size_t cpu = 0; cpu < allowed.size(); ++cpu) allowed[cpu] = CPU_ISSET(cpu, &set);
  return ReadNumaLayout("/sys/devices/system/node", allowed);
}

std::vector<int> ThreadsOfNodes(const NumaLayout& layout, int threads) {
  const int nodes = layout.nodes();
  if (nodes < 2 || threads < nodes) return {std::max(threads, 1)};
  std::vector<int> given(layout.cpus.size(), 1);
  for (int left = threads - nodes; left > 0; --left) {
    size_t most = 0;
    // Processors for each thread that the node would then have.
    const auto share = [&](size_t node) {
      const size_t cpus = std::max<size_t>(layout.cpus[node].size(), 1);
      return static_cast<double>(cpus) / (given[node] + 1);
    };
    for (size_t node = 1; node < given.size(); ++node)
      if (share(node) > share(most)) most = node;
    ++given[most];
  }
  return given;
}

std::vector<int> SpreadOverNodes(absl::Span<const uint64_t> bytes, absl::Span<const int> threads,
                                 std::vector<uint64_t> held) {
  held.resize(threads.size());
  std::vector<int> nodes;
  for (const uint64_t chunk : bytes) {
    size_t least = 0;
    const auto share = [&](size_t node) {
      return static_cast<double>(held[node] + chunk) / std::max(threads[node], 1);
    };
    for (size_t node = 1; node < held.size(); ++node)
      if (share(node) < share(least)) least = node;
    held[least] += chunk;
    nodes.push_back(static_cast<int>(least));
  }
  return nodes;
}

}  // namespace zeroshard::store
