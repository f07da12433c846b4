// What people see on the coordinator's HTTP port: one page, and the JSON that it shows.
//   /                                    the page
//   /api/v1/jobs                         v1.ListResponse
//   /api/v1/jobs/JOB                     v1.JobStatus; JOB: a name (its newest run) or a run id
//   /api/v1/jobs/JOB/history             its curve (curve.h)
//   /api/v1/jobs/JOB/shards?first=&rows= which store holds what (shard_view.h)
//   /api/v1/jobs/JOB/checkpoints         v1.CheckpointsResponse
//   /api/v1/nodes                        v1.NodesResponse
//   /api/v1/version                      v1.VersionResponse
// Messages are protobuf's JSON: every field, names as in the .proto files, 64-bit integers as
// strings. An error is {"error":"..."} with 400, 404 (no such job), 409 (the job has no such
// thing), 503 or 504 (the disk). Nothing can be changed here.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/http_server.h"
#include "coordinator/service/disk_work.h"
#include "coordinator/service/engine.h"
#include "coordinator/service/page/curve.h"
#include "coordinator/service/page/shard_view.h"

namespace zeroshard::coordinator {

// Thread-safe. Files are read on threads of their own, and waited for no longer than
// kPatience. Both pointers outlive this.
class StatusPage {
 public:
  StatusPage(Engine* engine, HttpServer* server);
  ~StatusPage();

  static constexpr absl::Duration kPatience = absl::Seconds(10);

 private:
  // What was asked for last, most recent first.
  template <typename T>
  using Recent = std::vector<std::pair<std::string, std::shared_ptr<T>>>;  // by run id

  void Answer(const HttpRequest& request, const HttpAnswer& answer);
  void AnswerJob(const std::string& job, const std::string& what, const HttpRequest& request,
                 const HttpAnswer& answer);
  void AnswerHistory(const v1::JobStatus& status, const HttpAnswer& answer);
  void AnswerCheckpoints(const Engine::View& view, const HttpAnswer& answer);
  HttpResponse Shards(const std::string& run_id, const HttpRequest& request);

  Engine* const engine_;
  HttpServer* const server_;
  std::mutex mutex_;
  Recent<CurveFile> curves_;
  Recent<const ShardView> shards_;
  DiskWork disk_;  // last: its work uses the rest
};

}  // namespace zeroshard::coordinator
