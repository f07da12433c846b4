#include <cctype>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/byte_progress.h"
#include "client/command.h"
#include "client/console.h"
#include "client/render.h"
#include "common/checkpoint/reader.h"
#include "common/exit_codes.h"
#include "common/hf/export.h"
#include "common/signals.h"
#include "common/status_macros.h"
#include "common/tokenizer/tokenizer.h"

namespace zeroshard {
namespace {

struct ExportOptions {
  std::string checkpoint;
  std::string folder;
  std::string dtype = "bf16";
  std::string max_shard_size = "5GB";
};

// "5GB", "500MiB", "1000000": decimal units as Hugging Face's tools read them, binary with an i.
absl::StatusOr<uint64_t> ParseSize(const std::string& text) {
  struct Unit {
    const char* name;
    double bytes;
  };
  constexpr Unit kUnits[] = {{"TiB", 0x1p40}, {"GiB", 0x1p30}, {"MiB", 0x1p20}, {"KiB", 0x1p10},
                             {"TB", 1e12},    {"GB", 1e9},     {"MB", 1e6},     {"KB", 1e3},
                             {"B", 1},        {"", 1}};
  for (const Unit& unit : kUnits) {
    if (!absl::EndsWithIgnoreCase(text, unit.name)) continue;
    const std::string number = text.substr(0, text.size() - std::string(unit.name).size());
    double count = 0;
    const bool digits = !number.empty() && std::isdigit(static_cast<unsigned char>(number[0])) != 0;
    if (digits && absl::SimpleAtod(number, &count) && count * unit.bytes >= 1 &&
        count * unit.bytes < 0x1p62) {
      return static_cast<uint64_t>(count * unit.bytes);
    }
    break;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--max-shard-size: seen \"", text, "\", wanted a size such as 5GB or 500MiB"));
}

absl::Status Verify(const CheckpointReader& reader, Console* console) {
  uint64_t total = 0;
  for (const CheckpointFile& file : reader.manifest().files) total += file.bytes;
  ByteProgress progress(console, "verifying", total);
  return reader.VerifyFiles(0, 1, [&progress](uint64_t bytes) { progress.Add(bytes); });
}

// What ends a text of the model: what its training put behind each, or its tokenizer's own.
std::optional<int32_t> EndOfText(const v1::DataSpec& data, const std::string& assets,
                                 std::ostream* notes) {
  if (data.packing().has_separator()) return static_cast<int32_t>(data.packing().separator());
  std::error_code error;
  if (!std::filesystem::is_regular_file(absl::StrCat(assets, "/tokenizer.json"), error)) {
    return std::nullopt;
  }
  const auto tokenizer = Tokenizer::Load(assets);
  if (tokenizer.ok()) return (*tokenizer)->end_of_text();
  PrintError(notes, absl::StrCat("note, eos_token_id stays null: ", tokenizer.status().message()));
  return std::nullopt;
}

absl::StatusOr<int> Export(const CommandContext& context, const ExportOptions& options) {
  HfExportOptions hf;
  hf.dtype = options.dtype == "fp32"   ? DType::kF32
             : options.dtype == "fp16" ? DType::kF16
                                       : DType::kBF16;
  ZS_ASSIGN_OR_RETURN(hf.max_shard_bytes, ParseSize(options.max_shard_size));
  ZS_ASSIGN_OR_RETURN(const FoundCheckpoint found, FindCheckpoint(options.checkpoint));
  for (const std::string& skipped : found.skipped) {
    PrintError(context.env->err, absl::StrCat("note, skipped ", skipped));
  }
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointReader> reader,
                      CheckpointReader::Open(found.path));
  const v1::ModelSpec& model = reader->manifest().spec.model();
  ZS_ASSIGN_OR_RETURN(const ModelTable table, MakeModelTable(model));
  ZS_RETURN_IF_ERROR(reader->CheckModel(table, /*moments=*/false));
  Console console(*context.env);
  ZS_RETURN_IF_ERROR(Verify(*reader, &console));

  std::error_code error;
  const std::string assets = absl::StrCat(found.path, "/assets");
  if (std::filesystem::is_directory(assets, error)) hf.assets = assets;
  hf.end_of_text = EndOfText(reader->manifest().spec.data(), assets, context.env->err);
  const uint64_t total = static_cast<uint64_t>(table.ParameterCount()) * SizeOf(hf.dtype);
  ByteProgress progress(&console, "exporting", total);
  hf.progress = [&progress](uint64_t done, uint64_t) { progress.Set(done); };
  absl::Status status;
  {
    // Ctrl-C ends the export, not the process: no half of a folder stays behind.
    ShutdownSignal signal;
    hf.stopped = [&signal] { return signal.Wait(absl::ZeroDuration()) != 0; };
    status = ExportHfFolder(model, *reader->Source(StateKind::kMaster), options.folder, hf);
  }
  RestoreSignalMask();
  ZS_RETURN_IF_ERROR(status);

  const uint64_t step = reader->manifest().step;
  if (context.options.json()) {
    const nlohmann::ordered_json json = {{"folder", options.folder},
                                         {"checkpoint", found.path},
                                         {"step", step},
                                         {"dtype", options.dtype},
                                         {"bytes", total},
                                         {"parameters", table.ParameterCount()},
                                         {"assets", !hf.assets.empty()},
                                         {"seconds", progress.seconds()}};
    console.Print(JsonLine(json));
  } else {
    console.Print(absl::StrCat(options.folder, ": step ", step, " of ", found.path, ", ",
                               FormatCount(static_cast<double>(table.ParameterCount())),
                               " parameters in ", options.dtype, ", ", FormatBytes(total), " in ",
                               absl::StrFormat("%.1f s", progress.seconds())));
  }
  return kExitOk;
}

}  // namespace

void AddExportCommand(CLI::App* app, CommandContext* context) {
  const auto options = std::make_shared<ExportOptions>();
  CLI::App* command = AddCommand(
      app, context, "export", "Writes a checkpoint's model as a Hugging Face folder",
      [context, options] { return Export(*context, *options); }, /*remote=*/false);
  command
      ->add_option("checkpoint", options->checkpoint,
                   "A checkpoint, or a folder of them, of which the newest complete one is taken")
      ->required();
  command->add_option("dir", options->folder, "Where to: a new or an empty folder")->required();
  command->add_option("--dtype", options->dtype, "The type of the weights: bf16, fp16 or fp32")
      ->check(CLI::IsMember({"bf16", "fp16", "fp32"}))
      ->type_name("bf16|fp16|fp32")
      ->capture_default_str();
  command
      ->add_option("--max-shard-size", options->max_shard_size,
                   "Above it the weights are several files and an index: 5GB, 500MiB")
      ->type_name("SIZE")
      ->capture_default_str();
}

}  // namespace zeroshard
