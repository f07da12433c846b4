#include "coordinator/service/line_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/descriptor.h"
#include "common/files.h"
#include "nlohmann/json.hpp"

namespace zeroshard::coordinator {
namespace {

// `is_new` says whether a record has not been returned before; asked in the file's order.
template <typename Record, typename IsNew>
absl::StatusOr<std::vector<Record>> ParseLines(
    LineReader* lines, size_t most, absl::StatusOr<Record> (*parse)(const std::string& line),
    IsNew is_new) {
  std::vector<Record> records;
  while (records.size() < most) {
    absl::StatusOr<std::vector<LineReader::Line>> read = lines->Next(most - records.size());
    if (!read.ok()) return read.status();
    if (read->empty()) break;
    for (const LineReader::Line& line : *read) {
      absl::StatusOr<Record> record = parse(line.text);
      if (!record.ok()) {
        return absl::DataLossError(
            absl::StrCat(lines->path(), " at byte ", line.offset, ": ", record.status().message()));
      }
      if (is_new(*record)) records.push_back(*std::move(record));
    }
  }
  return records;
}

FileId IdOf(int file) {
  struct statx status;
  if (statx(file, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &status) != 0) return FileId();
  FileId id;
  id.device = (uint64_t{status.stx_dev_major} << 32) | status.stx_dev_minor;
  id.inode = status.stx_ino;
  if ((status.stx_mask & STATX_BTIME) != 0) {
    id.born_ns = status.stx_btime.tv_sec * 1'000'000'000 + status.stx_btime.tv_nsec;
  }
  return id;
}

}  // namespace

absl::StatusOr<std::string> ReadPart(const std::string& path, uint64_t offset, size_t most,
                                     FileId* id) {
  if (id != nullptr) *id = FileId();
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) {
    if (errno == ENOENT) return std::string();
    return ErrnoError(errno, "open", path);
  }
  if (id != nullptr) *id = IdOf(file.get());
  std::string text(most, '\0');
  size_t done = 0;
  while (done < most) {
    const ssize_t got =
        pread(file.get(), text.data() + done, most - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoError(errno, "read", path);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  text.resize(done);
  return text;
}

absl::StatusOr<v1::StepRecord> ParseHistoryLine(const std::string& line) {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  v1::StepRecord record;
  const auto number = [&](const char* key, double* to) {
    const auto found = json.find(key);
    if (found == json.end() || !found->is_number()) return false;
    *to = found->get<double>();
    return true;
  };
  const auto count = [&](const char* key, uint64_t* to) {
    const auto found = json.find(key);
    if (found == json.end() || !found->is_number_unsigned()) return false;
    *to = found->get<uint64_t>();
    return true;
  };
  uint64_t step = 0;
  uint64_t tokens = 0;
  uint64_t steps_lost = 0;
  double loss = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  double seconds = 0;
  double eval_loss = 0;
  double loss_scale = 0;
  // Of a skipped step neither need be finite.
  const auto skipped = json.find("skipped");
  record.set_skipped(skipped != json.end() && skipped->is_boolean() && skipped->get<bool>());
  const auto number_or_null = [&](const char* key, double* to) {
    const auto found = json.find(key);
    if (!record.skipped() || found == json.end() || !found->is_null()) return number(key, to);
    *to = std::numeric_limits<double>::quiet_NaN();
    return true;
  };
  if (!json.is_object() || !count("step", &step) || !number_or_null("loss", &loss) ||
      !number_or_null("grad_norm", &grad_norm) || !number("learning_rate", &learning_rate) ||
      !count("tokens", &tokens) || !number("seconds", &seconds)) {
    return absl::InvalidArgumentError(absl::StrCat("no step record: ", line.substr(0, 100)));
  }
  record.set_step(step);
  record.set_loss(loss);
  record.set_grad_norm(grad_norm);
  record.set_learning_rate(learning_rate);
  record.set_tokens(tokens);
  record.set_seconds(seconds);
  if (number("loss_scale", &loss_scale)) record.set_loss_scale(loss_scale);
  if (number("eval_loss", &eval_loss)) record.set_eval_loss(eval_loss);
  if (count("steps_lost", &steps_lost)) record.set_steps_lost(steps_lost);
  return record;
}

std::string FormatSampleLine(const v1::SampleRecord& record) {
  nlohmann::ordered_json json;
  json["step"] = record.step();
  json["prompt"] = record.prompt();
  json["text"] = record.text();
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

absl::StatusOr<v1::SampleRecord> ParseSampleLine(const std::string& line) {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  const auto text = [&](const char* key) -> const std::string* {
    const auto found = json.find(key);
    return found == json.end() ? nullptr : found->get_ptr<const std::string*>();
  };
  if (json.is_object()) {
    const auto step = json.find("step");
    const std::string* prompt = text("prompt");
    const std::string* sample = text("text");
    if (step != json.end() && step->is_number_unsigned() && prompt != nullptr &&
        sample != nullptr) {
      v1::SampleRecord record;
      record.set_step(step->get<uint64_t>());
      record.set_prompt(*prompt);
      record.set_text(*sample);
      return record;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat("no sample: ", line.substr(0, 100)));
}

absl::StatusOr<std::vector<LineReader::Line>> LineReader::Next(size_t most) {
  FileId id;
  absl::StatusOr<std::string> part = ReadPart(path_, offset_, chunk_, &id);
  if (part.ok() && id != id_) {
    if (id_ != FileId()) {
      ++replaced_;
      offset_ = 0;
      part = ReadPart(path_, 0, chunk_, &id);
    }
    id_ = id;
  }
  if (!part.ok()) return part.status();
  std::vector<Line> lines;
  size_t begin = 0;
  for (size_t end; lines.size() < most && (end = part->find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    lines.push_back(Line{part->substr(begin, end - begin), offset_ + begin});
  }
  offset_ += begin;
  return lines;
}

absl::StatusOr<std::vector<v1::StepRecord>> HistoryReader::Next(size_t most) {
  return ParseLines(&lines_, most, ParseHistoryLine, [this](const v1::StepRecord& record) {
    if (lines_.replaced() > 0 && record.step() <= last_) return false;
    last_ = record.step();
    return true;
  });
}

absl::StatusOr<std::vector<v1::SampleRecord>> SampleReader::Next(size_t most) {
  return ParseLines(&lines_, most, ParseSampleLine, [this](const v1::SampleRecord& record) {
    if (lines_.replaced() > 0) {
      if (record.step() < last_) return false;
      if (record.step() == last_ && prompts_.contains(record.prompt())) return false;
    }
    if (record.step() != last_) prompts_.clear();
    last_ = record.step();
    prompts_.insert(record.prompt());
    return true;
  });
}

absl::StatusOr<std::string> LogReader::Next(size_t most_bytes) {
  absl::StatusOr<std::string> part = ReadPart(path_, offset_, most_bytes);
  if (!part.ok()) return part.status();
  const size_t end = part->rfind('\n');
  if (end != std::string::npos) part->resize(end + 1);
  offset_ += part->size();
  return part;
}

}  // namespace zeroshard::coordinator
