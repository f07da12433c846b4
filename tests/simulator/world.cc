#include "tests/simulator/world.h"

#include <algorithm>
#include <iostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace zeroshard::simulator {
namespace {

constexpr size_t kTraceLines = 400;

}  // namespace

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

uint64_t HashOf(const std::string& text) {
  uint64_t hash = text.size();
  for (const char c : text) hash = Mix(hash, static_cast<unsigned char>(c));
  return hash;
}

void World::After(absl::Duration delay, std::function<void()> what) {
  queue_.push(Entry{now_ + std::max(delay, absl::ZeroDuration()), ++order_, std::move(what)});
}

bool World::Step() {
  if (queue_.empty()) return false;
  // The queue gives no way to move its top out.
  std::function<void()> what = std::move(const_cast<Entry&>(queue_.top()).what);
  now_ = queue_.top().when;
  queue_.pop();
  ++steps_;
  what();
  return true;
}

absl::Duration World::Between(absl::Duration from, absl::Duration to) {
  const double share = static_cast<double>(Random() >> 11) * 0x1p-53;
  return absl::Trunc(from + (to - from) * share * share * share, absl::Microseconds(1));
}

absl::Duration World::Latency() { return Between(absl::Microseconds(100), absl::Milliseconds(80)); }

void World::Trace(std::string line) {
  line = absl::StrFormat("%10.4f %s", absl::ToDoubleSeconds(now_), line);
  if (verbose) std::cerr << line << "\n";
  trace_.push_back(std::move(line));
  if (trace_.size() > kTraceLines) trace_.pop_front();
}

std::string World::TraceText() const {
  std::string text;
  for (const std::string& line : trace_) absl::StrAppend(&text, "    ", line, "\n");
  return text;
}

void World::Violate(const std::string& invariant, const std::string& what) {
  if (violated()) return;
  violation_ = absl::StrCat(invariant, ": ", what);
  Trace(absl::StrCat("VIOLATED ", violation_));
}

}  // namespace zeroshard::simulator
