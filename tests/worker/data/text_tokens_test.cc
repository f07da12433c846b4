// What is kept in memory while text becomes tokens.
#include "worker/data/text_tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "common/tokenizer/tokenizer.h"

namespace zeroshard {
namespace {

// Of 200 kB each, so that a round (512 kB) is full in the midst of a document; 20 MB in all.
TEST(TextTokensTest, TextIsKeptForOneRoundAndNotForTheWholeCorpus) {
  const auto tokenizer = Tokenizer::Load("bytes");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  TextTokens::Options options;
  options.tokenizer = tokenizer->get();
  options.separator = 0;
  TokenRun run(256);
  TextTokens tokens(options, &run);
  constexpr int kDocuments = 100;
  constexpr int64_t kBytes = 200000;
  size_t most = 0;
  for (int i = 0; i < kDocuments; ++i) {
    Document document;
    document.prompt = std::string(kBytes / 4, static_cast<char>('a' + i % 26));
    document.text = std::string(kBytes * 3 / 4, static_cast<char>('A' + i % 26));
    const absl::Status added = tokens.Add(std::move(document));
    ASSERT_TRUE(added.ok()) << added;
    most = std::max(most, tokens.documents_kept());
  }
  EXPECT_LE(most, 4u);
  ASSERT_TRUE(tokens.Finish().ok());
  EXPECT_EQ(tokens.documents_kept(), 0u);
  // Dropping one that is still to be read would have changed these.
  ASSERT_EQ(run.size(), kDocuments * (kBytes + 1));
  EXPECT_EQ(run.silent(), kDocuments * kBytes / 4);
  for (int i = 0; i < kDocuments; ++i) {
    std::vector<int32_t> ids(kBytes + 1);
    ASSERT_TRUE(run.Read(i * (kBytes + 1), absl::MakeSpan(ids)).ok());
    EXPECT_EQ(std::count(ids.begin(), ids.begin() + kBytes / 4, 'a' + i % 26), kBytes / 4);
    EXPECT_EQ(std::count(ids.begin() + kBytes / 4, ids.end() - 1, 'A' + i % 26), kBytes * 3 / 4);
    EXPECT_EQ(ids.back(), 0);
  }
}

}  // namespace
}  // namespace zeroshard
