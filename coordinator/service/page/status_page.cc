#include "coordinator/service/page/status_page.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "common/random_id.h"
#include "common/version.h"
#include "coordinator/service/checkpoints.h"
#include "coordinator/service/page/page_html.h"
#include "google/protobuf/util/json_util.h"

namespace zeroshard::coordinator {
namespace {

constexpr char kApi[] = "/api/v1/";
constexpr size_t kMostDiskWork = 8;
constexpr size_t kMostRecent = 16;
constexpr size_t kMostJobName = 512;
constexpr uint64_t kDefaultRows = 50;
constexpr absl::Duration kReading = absl::Seconds(1);  // of a long history, by one request

// Scripts and styles of the page alone run, by the answer's nonce; text cannot become markup
// (trusted types); nothing is loaded or sent elsewhere.
std::string ContentPolicy(const std::string& nonce) {
  return absl::StrCat("default-src 'none'; script-src 'nonce-", nonce, "'; style-src 'nonce-",
                      nonce,
                      "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                      "frame-ancestors 'none'; require-trusted-types-for 'script'; "
                      "trusted-types 'none'");
}

HttpResponse Page() {
  const std::string nonce = RandomId();
  HttpResponse response;
  response.content_type = "text/html; charset=utf-8";
  response.headers.emplace_back("Content-Security-Policy", ContentPolicy(nonce));
  response.body = absl::StrReplaceAll(kPageHtml, {{"@nonce@", nonce}});
  return response;
}

HttpResponse JsonResponse(int status, std::string body) {
  HttpResponse response;
  response.status = status;
  response.content_type = "application/json";
  response.headers.emplace_back("Content-Security-Policy", "default-src 'none'");
  response.body = std::move(body);
  return response;
}

std::string Dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

int HttpStatusOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
      return 400;
    case absl::StatusCode::kNotFound:
      return 404;
    case absl::StatusCode::kFailedPrecondition:
      return 409;
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnavailable:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

HttpResponse ErrorResponse(const absl::Status& status) {
  return JsonResponse(HttpStatusOf(status.code()),
                      Dump({{"error", std::string(status.message())}}));
}

HttpResponse MessageResponse(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string json;
  const auto printed = google::protobuf::util::MessageToJsonString(message, &json, options);
  if (!printed.ok()) {
    return ErrorResponse(absl::InternalError(
        absl::StrCat("cannot print ", message.GetTypeName(), ": ", printed.ToString())));
  }
  return JsonResponse(200, std::move(json));
}

// An optional number of the query.
absl::StatusOr<uint64_t> Number(const HttpRequest& request, const std::string& key,
                                uint64_t otherwise) {
  const auto found = request.query.find(key);
  if (found == request.query.end()) return otherwise;
  uint64_t value = 0;
  if (absl::SimpleAtoi(found->second, &value)) return value;
  return absl::InvalidArgumentError(absl::StrCat(
      "query \"", key, "\" is \"", found->second.substr(0, 40), "\"; wanted a number from 0 on"));
}

// `make` is asked for what is not there, or of which `fits` says that it is of the past.
template <typename T, typename Fits, typename Make>
std::shared_ptr<T> Find(std::vector<std::pair<std::string, std::shared_ptr<T>>>* recent,
                        const std::string& run_id, const Fits& fits, const Make& make) {
  std::shared_ptr<T> value;
  const auto found = std::find_if(recent->begin(), recent->end(),
                                  [&](const auto& entry) { return entry.first == run_id; });
  if (found != recent->end()) {
    if (fits(*found->second)) value = found->second;
    recent->erase(found);
  }
  if (value == nullptr) value = make();
  if (value == nullptr) return nullptr;
  recent->insert(recent->begin(), {run_id, value});
  if (recent->size() > kMostRecent) recent->pop_back();
  return value;
}

}  // namespace

StatusPage::StatusPage(Engine* engine, HttpServer* server)
    : engine_(engine), server_(server), disk_(kMostDiskWork) {
  server_->Handle("/", [this](const HttpRequest& request, const HttpAnswer& answer) {
    Answer(request, answer);
  });
}

StatusPage::~StatusPage() { server_->StopHandling("/"); }

void StatusPage::Answer(const HttpRequest& request, const HttpAnswer& answer) {
  if (request.path == "/") return answer(Page());
  absl::string_view path = request.path;
  if (!absl::ConsumePrefix(&path, kApi)) {
    return answer(HttpError(404, "there is nothing here; the page is at /, metrics at /metrics"));
  }
  if (path == "jobs") {
    v1::ListResponse response;
    for (v1::JobStatus& job : engine_->List()) *response.add_jobs() = std::move(job);
    return answer(MessageResponse(response));
  }
  if (path == "nodes") return answer(MessageResponse(engine_->Nodes()));
  if (path == "version") {
    v1::VersionResponse response;
    response.set_version(kVersion);
    return answer(MessageResponse(response));
  }
  if (absl::ConsumePrefix(&path, "jobs/")) {
    const size_t slash = std::min(path.find('/'), path.size());
    const std::string job(path.substr(0, slash));
    path.remove_prefix(slash);
    if (!job.empty() && job.size() <= kMostJobName) {
      return AnswerJob(job, std::string(path), request, answer);
    }
  }
  answer(ErrorResponse(absl::NotFoundError(
      "there is no such thing; wanted jobs, jobs/JOB, jobs/JOB/{history,shards,checkpoints}, nodes "
      "or version")));
}

void StatusPage::AnswerJob(const std::string& job, const std::string& what,
                           const HttpRequest& request, const HttpAnswer& answer) {
  const absl::StatusOr<Engine::View> view = engine_->Look(job);
  if (!view.ok()) return answer(ErrorResponse(view.status()));
  if (what.empty()) return answer(MessageResponse(view->status));
  if (what == "/history") return AnswerHistory(view->status, answer);
  if (what == "/shards") return answer(Shards(view->status.run_id(), request));
  if (what == "/checkpoints") return AnswerCheckpoints(*view, answer);
  answer(ErrorResponse(absl::NotFoundError(
      "of a job there is no such thing; wanted history, shards or checkpoints")));
}

void StatusPage::AnswerHistory(const v1::JobStatus& status, const HttpAnswer& answer) {
  const std::string path = absl::StrCat(status.directory(), "/history.jsonl");
  std::shared_ptr<CurveFile> curve;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A run's folder gets another name when the job is submitted again.
    curve = Find(
        &curves_, status.run_id(), [&](const CurveFile& file) { return file.path() == path; },
        [&] { return std::make_shared<CurveFile>(path); });
  }
  disk_.Run(
      path, kPatience, [curve] { return curve->Update(kReading); },
      [curve, answer](const absl::Status& read) {
        answer(read.ok() ? JsonResponse(200, Dump(curve->ToJson())) : ErrorResponse(read));
      });
}

void StatusPage::AnswerCheckpoints(const Engine::View& view, const HttpAnswer& answer) {
  const std::string dir = view.checkpoint_dir;
  if (dir.empty()) {
    return answer(ErrorResponse(absl::FailedPreconditionError(
        absl::StrCat("job ", view.status.name(), " (run ", view.status.run_id(),
                     ") has no checkpoint section: it saves nothing"))));
  }
  const auto found = std::make_shared<v1::CheckpointsResponse>();
  disk_.Run(
      dir, kPatience,
      [dir, found] {
        absl::StatusOr<v1::CheckpointsResponse> described = DescribeCheckpoints(dir);
        if (described.ok()) *found = *std::move(described);
        return described.status();
      },
      [found, answer](const absl::Status& read) {
        answer(read.ok() ? MessageResponse(*found) : ErrorResponse(read));
      });
}

HttpResponse StatusPage::Shards(const std::string& run_id, const HttpRequest& request) {
  const absl::StatusOr<uint64_t> first = Number(request, "first", 0);
  const absl::StatusOr<uint64_t> rows = Number(request, "rows", kDefaultRows);
  if (!first.ok() || !rows.ok()) return ErrorResponse(first.ok() ? rows.status() : first.status());
  std::lock_guard<std::mutex> lock(mutex_);
  absl::Status status;
  const auto view = Find(
      &shards_, run_id,
      [&](const ShardView& known) {
        const absl::StatusOr<Engine::ShardMap> now = engine_->Shards(run_id, known.version());
        return now.ok() && now->version == known.version();
      },
      [&]() -> std::shared_ptr<const ShardView> {
        const absl::StatusOr<Engine::ShardMap> now = engine_->Shards(run_id, 0);
        status = now.status();
        if (status.ok() && now->version == 0) {
          status = absl::FailedPreconditionError(
              absl::StrCat("run ", run_id, " is not placed on the shard stores yet"));
        }
        if (!status.ok()) return nullptr;
        absl::StatusOr<ShardView> made = ShardView::Make(*now);
        status = made.status();
        return status.ok() ? std::make_shared<const ShardView>(*std::move(made)) : nullptr;
      });
  if (view == nullptr) return ErrorResponse(status);
  return JsonResponse(200, Dump(view->ToJson(*first, *rows)));
}

}  // namespace zeroshard::coordinator
