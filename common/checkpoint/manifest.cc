#include "common/checkpoint/manifest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/checkpoint/names.h"
#include "common/checksum.h"
#include "common/status_macros.h"
#include "common/strict_json.h"
#include "google/protobuf/util/json_util.h"

namespace zeroshard {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "zeroshard checkpoint";
constexpr uint64_t kVersion = 1;
constexpr size_t kMaxText = size_t{64} << 20;
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 50;
constexpr uint64_t kMaxWorld = 1 << 16;

// The file's end, the only part that the checksum does not cover.
constexpr char kSealBegin[] = ",\n\"manifest_crc32c\": \"";
constexpr char kSealEnd[] = "\"}\n";
std::string Seal(absl::string_view body) {
  return absl::StrCat(kSealBegin, absl::StrFormat("%08x", Crc32c(body.data(), body.size())),
                      kSealEnd);
}

// What is quoted from a file in a message.
std::string Quoted(absl::string_view text) {
  constexpr size_t kMost = 120;
  std::string quoted(text.substr(0, kMost));
  for (char& c : quoted) {
    if (absl::ascii_iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return absl::StrCat("\"", quoted, text.size() > kMost ? "..." : "", "\"");
}

// A JSON value as messages show it.
std::string Shown(const Json& value) {
  return Quoted(value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

bool IsHex(absl::string_view text, size_t digits) {
  return text.size() == digits && std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isdigit(static_cast<unsigned char>(c)) || (c >= 'a' && c <= 'f');
         });
}

// The members of one object, each asked for once.
class Fields {
 public:
  Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  absl::Status Error(const char* key, absl::string_view seen, absl::string_view wanted) const {
    return absl::InvalidArgumentError(
        absl::StrCat(where_, ": ", key, " is ", seen, "; wanted ", wanted));
  }

  // Null where it is not there.
  const Json* Find(const char* key) {
    asked_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }
  absl::StatusOr<const Json*> Get(const char* key) {
    const Json* found = Find(key);
    if (found == nullptr) return Error(key, "not there", "a value");
    return found;
  }

  absl::Status Text(const char* key, std::string* to) {
    ZS_ASSIGN_OR_RETURN(const Json* value, Get(key));
    if (!value->is_string()) return Error(key, Shown(*value), "text");
    *to = value->get<std::string>();
    return absl::OkStatus();
  }

  absl::Status Number(const char* key, uint64_t most, uint64_t* to) {
    ZS_ASSIGN_OR_RETURN(const Json* value, Get(key));
    if (!value->is_number_unsigned() || value->get<uint64_t>() > most) {
      return Error(key, Shown(*value), absl::StrCat("an integer from 0 to ", most));
    }
    *to = value->get<uint64_t>();
    return absl::OkStatus();
  }

  absl::Status Checksum(const char* key, uint32_t* to) {
    std::string text;
    ZS_RETURN_IF_ERROR(Text(key, &text));
    if (!IsHex(text, 8)) return Error(key, Quoted(text), "8 lower-case hex digits");
    *to = static_cast<uint32_t>(std::stoul(text, nullptr, 16));
    return absl::OkStatus();
  }

  // Nothing else is there.
  absl::Status NoMore() const {
    for (const auto& [key, value] : object_.items()) {
      if (!asked_.contains(key)) {
        return absl::InvalidArgumentError(absl::StrCat(where_, ": the key ", Quoted(key),
                                                       " is unknown; wanted only ",
                                                       absl::StrJoin(asked_, ", ")));
      }
    }
    return absl::OkStatus();
  }

 private:
  const Json& object_;
  const std::string where_;
  std::set<std::string> asked_;
};

absl::StatusOr<Json> ReadJson(absl::string_view text, const std::string& where) {
  absl::StatusOr<Json> json = ParseStrictJson<Json>(text);
  if (!json.ok()) {
    return absl::Status(json.status().code(), absl::StrCat(where, ": ", json.status().message()));
  }
  if (json->is_object()) return json;
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", Shown(*json), "; wanted an object"));
}

absl::Status ReadFiles(const Json& list, const std::string& where, Manifest* manifest) {
  std::set<std::string> names;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string at = absl::StrCat(where, ": files[", i, "]");
    if (!list[i].is_object()) {
      return absl::InvalidArgumentError(
          absl::StrCat(at, " is ", Shown(list[i]), "; wanted an object"));
    }
    Fields fields(list[i], at);
    CheckpointFile file;
    ZS_RETURN_IF_ERROR(fields.Text("name", &file.name));
    if (!StaysInside(file.name) || file.name == kManifestName) {
      return fields.Error("name", Quoted(file.name),
                          "a relative path that stays in the checkpoint's folder");
    }
    if (!names.insert(file.name).second) {
      return fields.Error("name", absl::StrCat(Quoted(file.name), " a second time"),
                          "every file once");
    }
    ZS_RETURN_IF_ERROR(fields.Number("bytes", kMaxFileBytes, &file.bytes));
    ZS_RETURN_IF_ERROR(fields.Checksum("crc32c", &file.crc32c));
    ZS_RETURN_IF_ERROR(fields.NoMore());
    manifest->files.push_back(std::move(file));
  }
  return absl::OkStatus();
}

absl::Status ReadDigests(const Json& object, const std::string& where, Manifest* manifest) {
  Fields fields(object, where);
  for (int kind = 0; kind < kStateKinds; ++kind) {
    const char* name = NameOf(static_cast<StateKind>(kind));
    ZS_RETURN_IF_ERROR(fields.Text(name, &manifest->digests[kind]));
    if (!manifest->digests[kind].empty() && !IsHex(manifest->digests[kind], 32)) {
      return fields.Error(name, Quoted(manifest->digests[kind]),
                          "32 lower-case hex digits or nothing");
    }
  }
  return fields.NoMore();
}

absl::Status ReadLossScale(const Json& object, const std::string& where, v1::LossScale* scale) {
  Fields fields(object, where);
  ZS_ASSIGN_OR_RETURN(const Json* value, fields.Get("scale"));
  if (!value->is_number() || !(value->get<double>() > 0) || !std::isfinite(value->get<double>())) {
    return fields.Error("scale", Shown(*value), "a number above 0");
  }
  scale->set_scale(value->get<double>());
  constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();
  uint64_t number = 0;
  ZS_RETURN_IF_ERROR(fields.Number("good_steps", kMost, &number));
  scale->set_good_steps(number);
  ZS_RETURN_IF_ERROR(fields.Number("hysteresis", std::numeric_limits<uint32_t>::max(), &number));
  scale->set_hysteresis(static_cast<uint32_t>(number));
  ZS_RETURN_IF_ERROR(fields.Number("skipped_steps", kMost, &number));
  scale->set_skipped_steps(number);
  return fields.NoMore();
}

absl::Status ReadSpec(const Json& object, const std::string& where, v1::JobSpec* spec) {
  const google::protobuf::util::Status read = google::protobuf::util::JsonStringToMessage(
      object.dump(-1, ' ', false, Json::error_handler_t::replace), spec);
  if (read.ok()) return absl::OkStatus();
  const auto message = read.message();
  return absl::InvalidArgumentError(
      absl::StrCat(where, ": spec is no job specification of this version: ",
                   Quoted(absl::string_view(message.data(), message.size()))));
}

absl::StatusOr<Manifest> Read(const Json& json, const std::string& where) {
  Fields fields(json, where);
  Manifest manifest;
  std::string format;
  ZS_RETURN_IF_ERROR(fields.Text("format", &format));
  if (format != kFormat) return fields.Error("format", Quoted(format), Quoted(kFormat));
  uint64_t version = 0;
  ZS_RETURN_IF_ERROR(fields.Number("version", std::numeric_limits<uint64_t>::max(), &version));
  if (version != kVersion) {
    return fields.Error("version", absl::StrCat(version),
                        absl::StrCat(kVersion, ", the one that this program reads"));
  }
  ZS_RETURN_IF_ERROR(fields.Text("run_id", &manifest.run_id));
  ZS_RETURN_IF_ERROR(fields.Text("job", &manifest.job));
  ZS_RETURN_IF_ERROR(fields.Number("step", std::numeric_limits<int64_t>::max(), &manifest.step));
  uint64_t number = 0;
  ZS_RETURN_IF_ERROR(fields.Number("unix_ms", std::numeric_limits<int64_t>::max(), &number));
  manifest.unix_ms = static_cast<int64_t>(number);
  ZS_RETURN_IF_ERROR(fields.Number("world_size", kMaxWorld, &number));
  if (number == 0) return fields.Error("world_size", "0", "at least 1");
  manifest.world_size = static_cast<uint32_t>(number);
  constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
  ZS_RETURN_IF_ERROR(fields.Number("next_sample", kAny, &manifest.next_sample));
  ZS_RETURN_IF_ERROR(fields.Number("samples", kAny, &manifest.samples));
  if (const Json* scale = fields.Find("loss_scale")) {
    if (!scale->is_object()) return fields.Error("loss_scale", Shown(*scale), "an object");
    ZS_RETURN_IF_ERROR(
        ReadLossScale(*scale, absl::StrCat(where, ": loss_scale"), &manifest.loss_scale));
    if (manifest.loss_scale.skipped_steps() > manifest.step) {
      return fields.Error("loss_scale",
                          absl::StrCat(manifest.loss_scale.skipped_steps(), " skipped steps"),
                          absl::StrCat("at most its step, ", manifest.step));
    }
  }
  ZS_ASSIGN_OR_RETURN(const Json* digests, fields.Get("digests"));
  if (!digests->is_object()) return fields.Error("digests", Shown(*digests), "an object");
  ZS_RETURN_IF_ERROR(ReadDigests(*digests, absl::StrCat(where, ": digests"), &manifest));
  ZS_ASSIGN_OR_RETURN(const Json* spec, fields.Get("spec"));
  if (!spec->is_object()) return fields.Error("spec", Shown(*spec), "an object");
  ZS_RETURN_IF_ERROR(ReadSpec(*spec, where, &manifest.spec));
  ZS_ASSIGN_OR_RETURN(const Json* files, fields.Get("files"));
  if (!files->is_array()) return fields.Error("files", Shown(*files), "a list");
  ZS_RETURN_IF_ERROR(ReadFiles(*files, where, &manifest));
  ZS_RETURN_IF_ERROR(fields.NoMore());
  return manifest;
}

}  // namespace

const char* NameOf(StateKind kind) {
  switch (kind) {
    case StateKind::kMaster:
      return "master";
    case StateKind::kExpAvg:
      return "exp_avg";
    case StateKind::kExpAvgSq:
      return "exp_avg_sq";
  }
  return "?";
}

std::string FormatManifest(const Manifest& manifest) {
  Json json = {{"format", kFormat},
               {"version", kVersion},
               {"run_id", manifest.run_id},
               {"job", manifest.job},
               {"step", manifest.step},
               {"unix_ms", manifest.unix_ms},
               {"world_size", manifest.world_size},
               {"next_sample", manifest.next_sample},
               {"samples", manifest.samples}};
  if (const v1::LossScale& scale = manifest.loss_scale; scale.scale() != 0) {
    json["loss_scale"] = {{"scale", scale.scale()},
                          {"good_steps", scale.good_steps()},
                          {"hysteresis", scale.hysteresis()},
                          {"skipped_steps", scale.skipped_steps()}};
  }
  Json& digests = json["digests"] = Json::object();
  for (int kind = 0; kind < kStateKinds; ++kind) {
    digests[NameOf(static_cast<StateKind>(kind))] = manifest.digests[kind];
  }
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string spec;
  if (!google::protobuf::util::MessageToJsonString(manifest.spec, &spec, options).ok())
    spec.clear();
  json["spec"] = Json::parse(spec, nullptr, /*allow_exceptions=*/false);
  Json& files = json["files"] = Json::array();
  for (const CheckpointFile& file : manifest.files) {
    files.push_back({{"name", file.name},
                     {"bytes", file.bytes},
                     {"crc32c", absl::StrFormat("%08x", file.crc32c)}});
  }
  std::string body = json.dump(1, ' ', false, Json::error_handler_t::replace);
  body.pop_back();  // the closing brace, which the seal has
  while (absl::ascii_isspace(static_cast<unsigned char>(body.back()))) body.pop_back();
  return absl::StrCat(body, Seal(body));
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view json, const std::string& where) {
  const size_t seal_size = sizeof(kSealBegin) - 1 + 8 + sizeof(kSealEnd) - 1;
  if (json.size() > kMaxText) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " has ", json.size(), " bytes; wanted at most ", kMaxText));
  }
  if (json.size() < seal_size) {
    return absl::DataLossError(
        absl::StrCat(where, " has ", json.size(), " bytes; it is cut off, or no manifest"));
  }
  const absl::string_view body = json.substr(0, json.size() - seal_size);
  const absl::string_view seal = json.substr(body.size());
  if (const std::string wanted = Seal(body); seal != wanted) {
    return absl::DataLossError(
        absl::StrCat(where, " is damaged: it ends in ", Quoted(seal),
                     ", and what is before that has the CRC-32C ",
                     absl::StrFormat("%08x", Crc32c(body.data(), body.size())),
                     "; restore the file or use another checkpoint"));
  }
  ZS_ASSIGN_OR_RETURN(const Json tree, ReadJson(absl::StrCat(body, "}"), where));
  return Read(tree, where);
}

}  // namespace zeroshard
