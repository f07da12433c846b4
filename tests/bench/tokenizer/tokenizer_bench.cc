// How fast text becomes tokens on one thread: tokenizer_bench TOKENIZER FILE... encodes each file
// as one document, three times, and prints MB/s of the first pass (words are new) and of the best.
// With --dump OUT FILE it writes the ids as int32 instead, to compare them with another
// tokenizer's.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "common/files.h"
#include "common/tokenizer/tokenizer.h"

namespace {

// Of this thread: what else the machine does does not count.
double ProcessorSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}

int Dump(const zeroshard::Tokenizer& tokenizer, const char* out, const char* path) {
  const auto text = zeroshard::ReadFile(path, size_t{4} << 30);
  if (!text.ok()) return Fail(text.status());
  std::vector<int32_t> ids;
  tokenizer.Encode(*text, &ids);
  std::FILE* file = std::fopen(out, "wb");
  if (file == nullptr) return Fail(zeroshard::ErrnoError(errno, "open", out));
  const size_t written = std::fwrite(ids.data(), sizeof(int32_t), ids.size(), file);
  return std::fclose(file) == 0 && written == ids.size() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s TOKENIZER FILE...\n       %s TOKENIZER --dump OUT FILE\n",
                 argv[0], argv[0]);
    return 2;
  }
  const double start = ProcessorSeconds();
  const auto tokenizer = zeroshard::Tokenizer::Load(argv[1]);
  if (!tokenizer.ok()) return Fail(tokenizer.status());
  const double loading = ProcessorSeconds() - start;
  if (argc == 5 && std::strcmp(argv[2], "--dump") == 0) return Dump(**tokenizer, argv[3], argv[4]);

  std::vector<std::string> texts;
  size_t bytes = 0;
  for (int i = 2; i < argc; ++i) {
    auto text = zeroshard::ReadFile(argv[i], size_t{4} << 30);
    if (!text.ok()) return Fail(text.status());
    bytes += text->size();
    texts.push_back(*std::move(text));
  }
  double first = 0;
  double best = 0;
  size_t tokens = 0;
  std::vector<int32_t> ids;
  for (int pass = 0; pass < 3; ++pass) {
    const double begin = ProcessorSeconds();
    tokens = 0;
    for (const std::string& text : texts) {
      ids.clear();
      (*tokenizer)->Encode(text, &ids);
      tokens += ids.size();
    }
    const double seconds = ProcessorSeconds() - begin;
    const double speed = static_cast<double>(bytes) / seconds / 1e6;
    if (pass == 0) first = speed;
    best = std::max(best, speed);
  }
  std::printf("%s: loaded in %.3f s; %zu bytes, %zu tokens, %.1f MB/s at first, %.1f MB/s best\n",
              argv[1], loading, bytes, tokens, first, best);
  return 0;
}
