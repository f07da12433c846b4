// Where threads and chunks go on a host with several NUMA nodes. Pure, but for ReadNumaLayout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace zeroshard::store {

// Of each node that has any, the processors that may be used. One node without a list: threads run
// anywhere.
struct NumaLayout {
  std::vector<std::vector<int>> cpus = {{}};
  int nodes() const { return static_cast<int>(cpus.size()); }
};

// "0-3,8-11", as Linux lists processors; those of `allowed` among them. What is no such list is
// left out.
std::vector<int> ParseCpuList(const std::string& text, const std::vector<bool>& allowed);

// From folders node0, node1, ... of `folder`, whose numbers may have gaps; nodes without a
// processor of `allowed` (by number) are left out. One node without a list where there are not two.
NumaLayout ReadNumaLayout(const std::string& folder, const std::vector<bool>& allowed);
// Of this host, for this process.
NumaLayout SystemNumaLayout();

// How many of `threads` (at least 1) each node gets: at least one, otherwise in proportion to its
// processors. Fewer threads than nodes: one entry, for all nodes.
std::vector<int> ThreadsOfNodes(const NumaLayout& layout, int threads);

// The node of each new chunk, of `bytes` each, where the nodes hold `held` already: the one that
// then has the least for each of its threads, as these are what an update takes its time from.
std::vector<int> SpreadOverNodes(absl::Span<const uint64_t> bytes, absl::Span<const int> threads,
                                 std::vector<uint64_t> held);

}  // namespace zeroshard::store
