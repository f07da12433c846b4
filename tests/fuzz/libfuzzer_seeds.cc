// Gives libFuzzer the target's own seeds: run with ZEROSHARD_FUZZ_SEEDS=FOLDER, it writes them
// there before it reads the folders on its command line.
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  const char* folder = std::getenv("ZEROSHARD_FUZZ_SEEDS");
  if (folder == nullptr) return 0;
  int number = 0;
  for (const std::string& seed : zeroshard::FuzzSeeds()) {
    const std::string path = std::string(folder) + "/seed-" + std::to_string(number++);
    std::ofstream file(path, std::ios::binary);
    file << seed;
    if (file.close(), !file) {
      std::fprintf(stderr, "cannot write %s\n", path.c_str());
      std::exit(2);
    }
  }
  return 0;
}
