#include "common/spec/history_line.h"

#include <charconv>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

std::string Number(double value) {
  if (!std::isfinite(value)) return "null";
  char buffer[40];
  const std::to_chars_result end = std::to_chars(buffer, buffer + sizeof(buffer), value);
  return std::string(buffer, end.ptr);
}

}  // namespace

std::string FormatHistoryLine(const v1::StepRecord& record) {
  return absl::StrCat(
      "{\"step\":", record.step(), ",\"loss\":", Number(record.loss()),
      ",\"grad_norm\":", Number(record.grad_norm()),
      ",\"learning_rate\":", Number(record.learning_rate()), ",\"tokens\":", record.tokens(),
      record.has_loss_scale() ? ",\"loss_scale\":" : "",
      record.has_loss_scale() ? Number(record.loss_scale()) : "",
      record.skipped() ? ",\"skipped\":true" : "", record.has_eval_loss() ? ",\"eval_loss\":" : "",
      record.has_eval_loss() ? Number(record.eval_loss()) : "",
      record.steps_lost() != 0 ? ",\"steps_lost\":" : "",
      record.steps_lost() != 0 ? absl::StrCat(record.steps_lost()) : "",
      ",\"seconds\":", Number(record.seconds()), "}");
}

}  // namespace zeroshard
