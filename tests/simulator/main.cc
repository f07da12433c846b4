// simulator [--seeds N] [--from SEED] [--verbose] [--no-faults]: runs seeds one after the other and
// stops at none; exits with 1 where one failed. N = 0: without end.
#include <cstdint>
#include <iostream>
#include <string>

#include "CLI/CLI.hpp"
#include "tests/simulator/scenario.h"

int main(int argc, char** argv) {
  CLI::App app{"Seeded simulation of the coordinator's and the stores' state machines"};
  uint64_t seeds = 100, from = 1;
  zeroshard::simulator::ScenarioOptions options;
  bool no_faults = false;
  app.add_option("--seeds", seeds, "how many; 0: without end")->capture_default_str();
  app.add_option("--from", from, "the first")->capture_default_str();
  app.add_flag("--verbose", options.verbose, "print every event as it happens");
  app.add_flag("--on-ranks", options.on_ranks, "jobs whose state is on their ranks");
  app.add_flag("--no-faults", no_faults, "an undisturbed run");
  CLI11_PARSE(app, argc, argv);
  options.faults = !no_faults;
  uint64_t failed = 0, recoveries = 0, rollbacks = 0, decisions = 0, faults = 0, given_up = 0;
  uint64_t cut_copies = 0, left = 0, made_up = 0, left_out = 0, broken = 0, refused = 0;
  for (uint64_t seed = from; seeds == 0 || seed < from + seeds; ++seed) {
    const zeroshard::simulator::Outcome outcome = zeroshard::simulator::Simulate(seed, options);
    recoveries += outcome.recoveries;
    rollbacks += outcome.rollbacks;
    decisions += outcome.decisions;
    faults += outcome.faults;
    cut_copies += outcome.cut_copies;
    given_up += outcome.given_up;
    left += outcome.left;
    made_up += outcome.made_up;
    left_out += outcome.left_out;
    broken += outcome.broken;
    refused += outcome.refused;
    if (outcome.ok) continue;
    ++failed;
    std::cout << "seed " << seed << " (" << outcome.setting << "): " << outcome.violation << "\n";
    if (!options.verbose && seeds == 1) std::cout << outcome.trace;
    std::cout.flush();
  }
  std::cout << seeds << " seeds from " << from << ": " << failed << " failed; " << faults
            << " faults, " << decisions << " decisions, " << recoveries << " recoveries, "
            << rollbacks << " rollbacks (" << cut_copies << " with a copy under way, " << left
            << " to what leaving stores had saved), " << given_up << " jobs given up, " << made_up
            << " evaluations made up for, " << left_out << " left out, " << broken
            << " broken disks, " << refused << " jobs refused by all stores\n";
  return failed == 0 ? 0 : 1;
}
