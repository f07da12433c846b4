// What a fuzz target defines, for libFuzzer (libfuzzer_seeds.cc) as for seeded_main.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// libFuzzer's entry: must neither crash nor abort on any input. Always returns 0.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace zeroshard {

// Valid inputs to mutate.
std::vector<std::string> FuzzSeeds();

}  // namespace zeroshard
