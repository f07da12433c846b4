// The program `zeroshard-worker generate`: continues a prompt with a model from files. The client's
// `zeroshard generate` runs it.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "common/types.h"
#include "worker/generate/sampler.h"

namespace zeroshard {

struct GenerateOptions {
  std::string model = {}, prompt = {};
  std::string tokenizer = {};  // empty: the model's own
  int64_t max_tokens = 128;
  SamplingOptions sampling = {};
  int threads = 1;
  DType dtype = DType::kF32;
  bool json = false;
  bool terminal = false;  // `out` is one
};

// Text: the prompt and what follows go to `out` as they come, byte for byte, or on a terminal Shown
// (common/text/shown.h); remarks and a closing line to `err`. JSON: one object in ASCII at the end.
// Errors as of the files, the tokenizer and the generator; ABORTED where `out` cannot be written.
absl::Status Generate(const GenerateOptions& options, std::ostream* out, std::ostream* err);

// argv[0] is the subcommand's name. Returns the process's exit code (common/exit_codes.h).
int GenerateMain(int argc, char** argv);

}  // namespace zeroshard
