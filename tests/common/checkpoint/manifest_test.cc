#include "common/checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "common/checksum.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Manifest Full() {
  Manifest manifest;
  manifest.run_id = "0123456789abcdef0123456789abcdef";
  manifest.job = "licences";
  manifest.step = 100;
  manifest.unix_ms = 1'700'000'000'123;
  manifest.world_size = 4;
  manifest.next_sample = std::numeric_limits<uint64_t>::max();
  manifest.samples = (uint64_t{1} << 53) + 1;  // no double has it
  v1::JobSpec& spec = manifest.spec;
  spec.set_name("licences \"quoted\" \xe6\x96\x87");
  spec.set_steps(18446744073709551615u);
  spec.set_gradient_clipping(0.1);
  spec.mutable_optimizer()->mutable_params()->set_lr(6.02214076e-4);
  spec.mutable_optimizer()->mutable_params()->add_betas(0.9);
  spec.mutable_optimizer()->mutable_params()->add_betas(0.999);
  spec.mutable_optimizer()->mutable_params()->set_eps(0);  // present though it is the default
  spec.mutable_model()->set_tie_embeddings(false);
  spec.mutable_data()->add_train("/text/\n");
  manifest.digests[0] = "00112233445566778899aabbccddeeff";
  manifest.files = {{"state-00000-of-00002.safetensors", 1234, 0xdeadbeef},
                    {"assets/tokenizer.json", 0, 0}};
  return manifest;
}

// The text with its checksum made right again.
std::string Resealed(std::string text) {
  const size_t body = text.size() - 11 - sizeof(",\n\"manifest_crc32c\": \"") + 1;
  const uint32_t crc = Crc32c(text.data(), body);
  text.replace(text.size() - 11, 8, absl::StrFormat("%08x", crc));
  return text;
}

std::string Changed(const std::string& from, const std::string& to) {
  const std::string text = FormatManifest(Full());
  EXPECT_NE(text.find(from), std::string::npos) << from << " is not in\n" << text;
  return Resealed(absl::StrReplaceAll(text, {{from, to}}));
}

std::string ErrorOf(const std::string& text) {
  const auto manifest = ParseManifest(text, "/a/manifest.json");
  EXPECT_FALSE(manifest.ok()) << text;
  EXPECT_THAT(std::string(manifest.status().message()), HasSubstr("/a/manifest.json"));
  return std::string(manifest.status().message());
}

TEST(Manifest, HasTheLossScaleWhereThereIsOne) {
  EXPECT_EQ(FormatManifest(Full()).find("loss_scale"), std::string::npos);
  Manifest wanted = Full();
  wanted.loss_scale.set_scale(0.1);
  wanted.loss_scale.set_good_steps(999);
  wanted.loss_scale.set_hysteresis(2);
  wanted.loss_scale.set_skipped_steps(7);
  const std::string text = FormatManifest(wanted);
  const auto seen = ParseManifest(text, "m");
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(seen->loss_scale.SerializeAsString(), wanted.loss_scale.SerializeAsString());
  EXPECT_EQ(FormatManifest(*seen), text);

  const auto error = [&](const std::string& from, const std::string& to) {
    EXPECT_NE(text.find(from), std::string::npos) << from << " is not in\n" << text;
    return ErrorOf(Resealed(absl::StrReplaceAll(text, {{from, to}})));
  };
  EXPECT_THAT(error("\"scale\": 0.1", "\"scale\": 0"),
              HasSubstr("scale is \"0\"; wanted a number"));
  EXPECT_THAT(error("\"scale\": 0.1", "\"scale\": -2.5"), HasSubstr("wanted a number above 0"));
  EXPECT_THAT(error("\"hysteresis\": 2", "\"hysteresis\": 4294967296"), HasSubstr("hysteresis is"));
  EXPECT_THAT(error("\"skipped_steps\": 7", "\"skipped_steps\": 101"),
              HasSubstr("101 skipped steps; wanted at most its step, 100"));
  EXPECT_THAT(error("\"good_steps\": 999,", ""), HasSubstr("good_steps is not there"));
  EXPECT_THAT(error("\"good_steps\"", "\"steps\": 1, \"good_steps\""), HasSubstr("unknown"));
}

TEST(Manifest, ComesBackAsItWas) {
  const Manifest wanted = Full();
  const auto seen = ParseManifest(FormatManifest(wanted), "m");
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_EQ(seen->run_id, wanted.run_id);
  EXPECT_EQ(seen->job, wanted.job);
  EXPECT_EQ(seen->step, wanted.step);
  EXPECT_EQ(seen->unix_ms, wanted.unix_ms);
  EXPECT_EQ(seen->world_size, wanted.world_size);
  EXPECT_EQ(seen->next_sample, wanted.next_sample);
  EXPECT_EQ(seen->samples, wanted.samples);
  for (int kind = 0; kind < kStateKinds; ++kind) {
    EXPECT_EQ(seen->digests[kind], wanted.digests[kind]);
  }
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(seen->spec, wanted.spec))
      << seen->spec.DebugString();
  ASSERT_EQ(seen->files.size(), wanted.files.size());
  for (size_t i = 0; i < wanted.files.size(); ++i) {
    EXPECT_EQ(seen->files[i].name, wanted.files[i].name);
    EXPECT_EQ(seen->files[i].bytes, wanted.files[i].bytes);
    EXPECT_EQ(seen->files[i].crc32c, wanted.files[i].crc32c);
  }
}

TEST(Manifest, IsJsonWithTheSchemasNames) {
  const auto json = nlohmann::json::parse(FormatManifest(Full()));
  EXPECT_EQ(json["format"], "zeroshard checkpoint");
  EXPECT_EQ(json["version"], 1);
  EXPECT_EQ(json["spec"]["gradient_clipping"], 0.1);
  EXPECT_EQ(json["spec"]["optimizer"]["params"]["eps"], 0);
  EXPECT_EQ(json["spec"]["model"]["tie_embeddings"], false);
  EXPECT_EQ(json["files"][0]["crc32c"], "deadbeef");
  EXPECT_EQ(json["manifest_crc32c"].get<std::string>().size(), 8u);
}

TEST(Manifest, AnyByteFlippedIsFound) {
  const std::string text = FormatManifest(Full());
  for (size_t i = 0; i < text.size(); ++i) {
    for (const int bit : {0, 5}) {
      std::string damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      const auto manifest = ParseManifest(damaged, "m");
      ASSERT_EQ(manifest.status().code(), absl::StatusCode::kDataLoss) << i;
    }
  }
}

TEST(Manifest, AnyCutIsFound) {
  const std::string text = FormatManifest(Full());
  for (size_t size = 0; size < text.size(); ++size) {
    ASSERT_EQ(ParseManifest(text.substr(0, size), "m").status().code(), absl::StatusCode::kDataLoss)
        << size;
  }
  EXPECT_FALSE(ParseManifest(text + "x", "m").ok());
}

TEST(Manifest, DamageIsToldWithTheChecksums) {
  std::string text = FormatManifest(Full());
  text[text.find("licences")] = 'L';
  EXPECT_THAT(ErrorOf(text),
              AllOf(HasSubstr("damaged"), HasSubstr("CRC-32C"), HasSubstr("manifest_crc32c")));
}

TEST(Manifest, NamesThatLeaveTheFolderAreRefused) {
  for (const char* name : {"../x", "/etc/passwd", "a/../../x", "a//b", "./a", "", "..", "a/",
                           "a\\nb", "manifest.json"}) {
    SCOPED_TRACE(name);
    EXPECT_THAT(ErrorOf(Changed("assets/tokenizer.json", name)),
                AllOf(HasSubstr("files[1]"), HasSubstr("stays in the checkpoint's folder")));
  }
}

TEST(Manifest, WhatDoesNotBelongIsRefusedByName) {
  EXPECT_THAT(ErrorOf(Changed("\"version\": 1", "\"version\": 2")),
              AllOf(HasSubstr("version is 2"), HasSubstr("wanted 1")));
  EXPECT_THAT(ErrorOf(Changed("zeroshard checkpoint", "other")), HasSubstr("\"other\""));
  EXPECT_THAT(ErrorOf(Changed("\"step\": 100", "\"step\": -1")), HasSubstr("step is \"-1\""));
  EXPECT_THAT(ErrorOf(Changed("\"step\": 100", "\"step\": 1e2")), HasSubstr("step is"));
  EXPECT_THAT(ErrorOf(Changed("\"step\": 100", "\"step\": 18446744073709551616")),
              HasSubstr("step is"));
  EXPECT_THAT(ErrorOf(Changed("\"step\": 100", "\"step\": \"100\"")), HasSubstr("step is"));
  EXPECT_THAT(ErrorOf(Changed("\"step\": 100", "\"step\": 100, \"step\": 101")),
              AllOf(HasSubstr("\"step\""), HasSubstr("twice")));
  const std::string deep(1'000'000, '[');
  EXPECT_THAT(ErrorOf(Changed("\"step\": 100", "\"step\": " + deep)), HasSubstr("nested deeper"));
  EXPECT_THAT(ErrorOf(Changed("\"step\": 100", "\"step\": " + deep + std::string(1'000'000, ']'))),
              HasSubstr("nested deeper"));
  EXPECT_THAT(ErrorOf(Changed("\"step\": 100", "\"stepp\": 100")), HasSubstr("step is not there"));
  EXPECT_THAT(ErrorOf(Changed("\"step\": 100", "\"step\": 100, \"more\": 1")),
              AllOf(HasSubstr("\"more\""), HasSubstr("unknown")));
  EXPECT_THAT(ErrorOf(Changed("\"world_size\": 4", "\"world_size\": 0")),
              HasSubstr("world_size is 0"));
  EXPECT_THAT(ErrorOf(Changed("deadbeef", "deadbee")), HasSubstr("8 lower-case hex digits"));
  EXPECT_THAT(ErrorOf(Changed("00112233445566778899aabbccddeeff", "xyz")), HasSubstr("master"));
  EXPECT_THAT(ErrorOf(Changed("\"bytes\": 1234", "\"bytes\": 1152921504606846976")),
              AllOf(HasSubstr("files[0]"), HasSubstr("bytes")));
  EXPECT_THAT(ErrorOf(Changed("assets/tokenizer.json", "state-00000-of-00002.safetensors")),
              HasSubstr("a second time"));
  EXPECT_THAT(ErrorOf(Changed("\"gradient_clipping\"", "\"gradient_clip\"")),
              AllOf(HasSubstr("spec"), HasSubstr("gradient_clip")));
  EXPECT_THAT(ErrorOf(Changed("\"gradient_clipping\": 0.1", "\"gradient_clipping\": []")),
              HasSubstr("spec"));
  EXPECT_THAT(ErrorOf(Resealed(std::string(100'000, '[') + FormatManifest(Full()))),
              HasSubstr("nested deeper"));
}

}  // namespace
}  // namespace zeroshard
