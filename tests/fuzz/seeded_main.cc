// Runs a fuzz target over its seeds, the files of the folder argv[2] (which need not exist) and
// argv[1] mutations of both, the same ones in every run. Prints the input in hex before it is run
// where ZEROSHARD_FUZZ_VERBOSE is set.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/fuzz/fuzz_target.h"

namespace {

using Random = std::mt19937_64;

size_t Below(Random* random, size_t limit) { return limit == 0 ? 0 : (*random)() % limit; }

// One change: a bit, a byte, a deletion, a repetition, a splice of another seed, another token, a
// digit.
void Mutate(const std::vector<std::string>& seeds, Random* random, std::string* input) {
  static constexpr const char* kPieces[] = {"0",
                                            "-1",
                                            "18446744073709551615",
                                            "9223372036854775808",
                                            "{}",
                                            "[]",
                                            "\"",
                                            "\\u0000",
                                            ",",
                                            ":",
                                            "1e308",
                                            "null"};
  const size_t at = Below(random, input->size() + 1);
  const size_t length = Below(random, std::min<size_t>(input->size() - at, 16) + 1);
  switch (Below(random, 8)) {
    case 0:
      if (at < input->size()) (*input)[at] ^= static_cast<char>(1 << Below(random, 8));
      break;
    case 1:
      if (at < input->size()) (*input)[at] = static_cast<char>(Below(random, 256));
      break;
    case 2:
      input->erase(at, length);
      break;
    case 3:
      input->insert(at, input->substr(at, length));
      break;
    case 4: {
      const std::string& other = seeds[Below(random, seeds.size())];
      const size_t from = Below(random, other.size() + 1);
      input->insert(at, other.substr(from, Below(random, 64)));
      break;
    }
    case 5:
      input->replace(at, length, kPieces[Below(random, std::size(kPieces))]);
      break;
    case 6:
      if (!input->empty()) (*input)[Below(random, std::min<size_t>(8, input->size()))] ^= 1;
      break;
    case 7: {
      const size_t digit = input->find_first_of("0123456789", at);
      if (digit != std::string::npos) (*input)[digit] = static_cast<char>('0' + Below(random, 10));
      break;
    }
  }
}

void Run(const std::string& input) {
  if (std::getenv("ZEROSHARD_FUZZ_VERBOSE") != nullptr) {
    for (unsigned char c : input) std::fprintf(stderr, "%02x", c);
    std::fputc('\n', stderr);
  }
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

// The contents of the folder's files, in the order of their names.
std::vector<std::string> ReadCorpus(const std::string& folder) {
  std::vector<std::filesystem::path> paths;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing)) {
    if (entry.is_regular_file()) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> contents;
  for (const std::filesystem::path& path : paths) {
    std::ifstream file(path, std::ios::binary);
    contents.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return contents;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) {
    std::fprintf(stderr, "usage: %s MUTATIONS [CORPUS]\n", argv[0]);
    return 2;
  }
  std::vector<std::string> seeds = zeroshard::FuzzSeeds();
  if (argc == 3) {
    for (std::string& input : ReadCorpus(argv[2])) seeds.push_back(std::move(input));
  }
  for (const std::string& seed : seeds) Run(seed);
  Random random(20);
  for (long i = std::atol(argv[1]); i > 0; --i) {
    std::string input = seeds[Below(&random, seeds.size())];
    for (size_t changes = 1 + Below(&random, 4); changes > 0; --changes) {
      Mutate(seeds, &random, &input);
    }
    Run(input);
  }
  return 0;
}
