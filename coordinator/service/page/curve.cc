#include "coordinator/service/page/curve.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace zeroshard::coordinator {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kLinesAtOnce = 1000;

Json NumberOrNull(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

CurvePoint PointOf(const v1::StepRecord& record) {
  CurvePoint point;
  point.first = point.last = record.step();
  point.steps = 1;
  if (std::isfinite(record.loss())) {
    point.finite = 1;
    point.loss_sum = point.least = point.most = record.loss();
  }
  point.skipped = record.skipped() ? 1 : 0;
  point.grad_norm = record.grad_norm();
  point.learning_rate = record.learning_rate();
  point.tokens = record.tokens();
  point.seconds = record.seconds();
  if (record.has_eval_loss()) {
    point.eval_step = record.step();
    point.eval_loss = record.eval_loss();
  }
  point.lost = record.steps_lost();
  return point;
}

// `next` comes behind.
void Join(const CurvePoint& next, CurvePoint* point) {
  point->last = next.last;
  point->steps += next.steps;
  if (next.finite > 0) {
    point->least = point->finite == 0 ? next.least : std::min(point->least, next.least);
    point->most = point->finite == 0 ? next.most : std::max(point->most, next.most);
    point->finite += next.finite;
    point->loss_sum += next.loss_sum;
  }
  point->skipped += next.skipped;
  point->grad_norm = next.grad_norm;
  point->learning_rate = next.learning_rate;
  point->tokens += next.tokens;
  point->seconds += next.seconds;
  if (next.eval_step != 0) {
    point->eval_step = next.eval_step;
    point->eval_loss = next.eval_loss;
  }
  point->lost += next.lost;
}

}  // namespace

void Curve::Add(const v1::StepRecord& record) {
  const CurvePoint point = PointOf(record);
  if (!points_.empty() && points_.back().steps < width_) {
    Join(point, &points_.back());
    return;
  }
  if (points_.size() == kMostPoints) Halve();
  points_.push_back(point);
}

// Of full points alone: their number is even, and one more is about to begin.
void Curve::Halve() {
  for (size_t i = 0; i < points_.size() / 2; ++i) {
    CurvePoint joined = points_[2 * i];
    Join(points_[2 * i + 1], &joined);
    points_[i] = joined;
  }
  points_.resize(points_.size() / 2);
  width_ *= 2;
}

Json Curve::ToJson() const {
  Json json = {{"width", width_}};
  for (const char* key : {"step", "loss", "least", "most", "grad_norm", "learning_rate", "tokens",
                          "seconds", "eval", "lost", "skipped"}) {
    json[key] = Json::array();
  }
  for (const CurvePoint& point : points_) {
    const bool any = point.finite > 0;
    json["step"].push_back(point.last);
    json["loss"].push_back(any ? Json(point.loss_sum / static_cast<double>(point.finite))
                               : Json(nullptr));
    json["least"].push_back(any ? Json(point.least) : Json(nullptr));
    json["most"].push_back(any ? Json(point.most) : Json(nullptr));
    json["grad_norm"].push_back(NumberOrNull(point.grad_norm));
    json["learning_rate"].push_back(NumberOrNull(point.learning_rate));
    json["tokens"].push_back(point.tokens);
    json["seconds"].push_back(point.seconds);
    if (point.eval_step != 0) {
      json["eval"].push_back({point.eval_step, NumberOrNull(point.eval_loss)});
    }
    if (point.lost != 0) json["lost"].push_back({point.last, point.lost});
    if (point.skipped != 0) json["skipped"].push_back({point.last, point.skipped});
  }
  return json;
}

absl::Status CurveFile::Update(absl::Duration most) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto end = std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(most);
  complete_ = false;
  do {
    absl::StatusOr<std::vector<LineReader::Line>> lines = lines_->Next(kLinesAtOnce);
    if (!lines.ok()) return lines.status();
    if (lines_->replaced() != replaced_) {
      replaced_ = lines_->replaced();
      curve_ = Curve();
    }
    for (const LineReader::Line& line : *lines) {
      const absl::StatusOr<v1::StepRecord> record = ParseHistoryLine(line.text);
      if (!record.ok()) {
        // Read from the beginning next time, as it may have been mended.
        lines_ = std::make_unique<LineReader>(path_, HistoryReader::kChunk);
        replaced_ = 0;
        curve_ = Curve();
        return absl::DataLossError(
            absl::StrCat(path_, " at byte ", line.offset, ": ", record.status().message()));
      }
      curve_.Add(*record);
    }
    complete_ = lines->empty();
  } while (!complete_ && std::chrono::steady_clock::now() < end);
  return absl::OkStatus();
}

Json CurveFile::ToJson() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Json json = curve_.ToJson();
  json["complete"] = complete_;
  return json;
}

}  // namespace zeroshard::coordinator
