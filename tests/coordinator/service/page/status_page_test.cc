// The coordinator's HTTP port: every route, what is refused, and hostile paths.
#include "coordinator/service/page/status_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/common/http_client.h"
#include "tests/coordinator/service/service_fixture.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class StatusPageTest : public ServiceTest {
 protected:
  StatusPageTest() : coordinator(folder.path()) {
    HttpServer::Options options;
    options.listen = "127.0.0.1:0";
    options.what = "the test";
    auto started = HttpServer::Start(options);
    EXPECT_TRUE(started.ok()) << started.status();
    http = *std::move(started);
    page = std::make_unique<StatusPage>(coordinator.engine.get(), http.get());
  }
  HttpReply Get(const std::string& path) { return HttpGet(http->port(), path); }
  Json Api(const std::string& path, int status = 200) {
    const HttpReply reply = Get("/api/v1/" + path);
    EXPECT_EQ(reply.status, status) << path << ": " << reply.body;
    EXPECT_THAT(reply.head, HasSubstr("Content-Type: application/json\r\n"));
    return Json::parse(reply.body, nullptr, false);
  }

  Coordinator coordinator;
  std::unique_ptr<HttpServer> http;
  std::unique_ptr<StatusPage> page;
};

TEST_F(StatusPageTest, ThePageIsOnePieceUnderAPolicyWithAFreshNonce) {
  std::set<std::string> nonces;
  for (int i = 0; i < 2; ++i) {
    const HttpReply reply = Get("/");
    EXPECT_EQ(reply.status, 200);
    EXPECT_THAT(reply.head, AllOf(HasSubstr("Content-Type: text/html; charset=utf-8\r\n"),
                                  HasSubstr("Content-Security-Policy: default-src 'none'; "),
                                  HasSubstr("require-trusted-types-for 'script'"),
                                  HasSubstr("Cache-Control: no-store\r\n"),
                                  HasSubstr("X-Content-Type-Options: nosniff\r\n")));
    const size_t at = reply.head.find("script-src 'nonce-") + 18;
    const std::string nonce = reply.head.substr(at, reply.head.find('\'', at) - at);
    EXPECT_GE(nonce.size(), 32u);
    nonces.insert(nonce);
    EXPECT_THAT(reply.body, AllOf(HasSubstr("<script nonce=\"" + nonce + "\">"),
                                  HasSubstr("<style nonce=\"" + nonce + "\">")));
    // Whole, and nothing from elsewhere.
    EXPECT_THAT(reply.body, AllOf(Not(HasSubstr("@nonce@")), Not(HasSubstr("@script@")),
                                  Not(HasSubstr("@style@")), Not(HasSubstr("src=")),
                                  Not(HasSubstr("@import")), HasSubstr("</html>")));
    // No way for text to become markup or code.
    for (const char* never : {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write",
                              "DOMParser", "eval(", "new Function"}) {
      EXPECT_THAT(reply.body, Not(HasSubstr(never)));
    }
  }
  EXPECT_EQ(nonces.size(), 2u);
}

TEST_F(StatusPageTest, ShowsJobsMembersStepsAndEvents) {
  StartDemo(coordinator, 10);
  ASSERT_TRUE(w0.Steps(1, 4, &committed).ok());
  const Json jobs = Api("jobs");
  ASSERT_EQ(jobs["jobs"].size(), 1u);
  EXPECT_EQ(jobs["jobs"][0]["name"], "demo");
  EXPECT_EQ(jobs["jobs"][0]["state"], "JOB_STATE_RUNNING");
  EXPECT_EQ(jobs["jobs"][0]["committed_step"], "4");  // 64 bits: a string
  const std::string run = jobs["jobs"][0]["run_id"];
  const Json nodes = Api("nodes");
  ASSERT_EQ(nodes["nodes"].size(), 2u);
  EXPECT_EQ(nodes["nodes"][0]["hello"]["name"], "worker-0");
  EXPECT_EQ(nodes["nodes"][0]["state"], "running");
  EXPECT_GT(std::stoll(nodes["nodes"][0]["since_unix_ms"].get<std::string>()), 1600000000000);
  for (const std::string& name : {std::string("demo"), run}) {
    const Json job = Api("jobs/" + name);
    EXPECT_EQ(job["run_id"], run);
    EXPECT_EQ(job["ranks"].size(), 2u);
    EXPECT_GE(job["events"].size(), 2u);
    EXPECT_EQ(job["plan"].size(), 2u);
    const Json history = Api("jobs/" + name + "/history");
    EXPECT_EQ(history["step"], (Json{1, 2, 3, 4}));
    EXPECT_EQ(history["loss"], (Json{8.0, 4.0, 8.0 / 3, 2.0}));
    EXPECT_EQ(history["complete"], true);
  }
  EXPECT_EQ(Api("jobs/demo/shards", 409)["error"].get<std::string>(),
            "run " + run + " has no state in the shard stores");
  EXPECT_THAT(Api("jobs/demo/checkpoints", 409)["error"].get<std::string>(),
              HasSubstr("no checkpoint section"));
  EXPECT_FALSE(Api("version")["version"].get<std::string>().empty());
  // Steps that come are seen the next time.
  ASSERT_TRUE(w0.Steps(5, 6, &committed).ok());
  EXPECT_EQ(Api("jobs/demo/history")["step"].size(), 6u);
}

TEST_F(StatusPageTest, ALostMemberIsShownWithItsReason) {
  w0.Connect(coordinator);
  w0.Disconnect();
  v1::ReportExitRequest request;
  request.set_member("worker-0");
  request.set_pid(4711);
  request.set_signal(9);
  v1::ReportExitResponse response;
  grpc::ClientContext context;
  SetDeadline(&context);
  const auto stub = v1::Cluster::NewStub(Dial(coordinator.server->address()));
  ASSERT_TRUE(stub->ReportExit(&context, request, &response).ok());
  const Json nodes = Api("nodes");
  ASSERT_EQ(nodes["nodes"].size(), 1u);
  EXPECT_EQ(nodes["nodes"][0]["state"], "lost");
  EXPECT_EQ(nodes["nodes"][0]["lost_reason"], "its process was killed by signal 9 (SIGKILL)");
}

TEST_F(StatusPageTest, ADamagedHistoryIsSaidNotHidden) {
  StartDemo(coordinator, 10);
  ASSERT_TRUE(w0.Steps(1, 2, &committed).ok());
  std::ofstream(folder.path() + "/jobs/demo/history.jsonl", std::ios::app) << "damage\n";
  EXPECT_THAT(Api("jobs/demo/history", 500)["error"].get<std::string>(),
              HasSubstr("history.jsonl at byte"));
}

TEST_F(StatusPageTest, WhatIsNotThereIsRefusedAndSaysWhatIs) {
  EXPECT_THAT(Api("jobs/none", 404)["error"].get<std::string>(), HasSubstr("none"));
  EXPECT_THAT(Api("nothing", 404)["error"].get<std::string>(), HasSubstr("wanted jobs"));
  EXPECT_EQ(Get("/index.php").status, 404);
  EXPECT_EQ(Get("/favicon.ico").status, 404);
  StartDemo(coordinator, 10);
  EXPECT_THAT(Api("jobs/demo/secrets", 404)["error"].get<std::string>(), HasSubstr("history"));
  for (const char* query : {"first=-1", "first=x", "rows=1e3", "rows=99999999999999999999"}) {
    EXPECT_THAT(Api(absl::StrCat("jobs/demo/shards?", query), 400)["error"].get<std::string>(),
                HasSubstr("wanted a number"))
        << query;
  }
}

TEST_F(StatusPageTest, HostilePathsReachNoFile) {
  std::ofstream(folder.path() + "/history.jsonl") << "{\"secret\":1}\n";
  StartDemo(coordinator, 10);
  for (const char* path : {"/../coordinator.db",
                           "/api/v1/jobs/../../etc/passwd",
                           "/api/v1/jobs/..%2f..%2fetc/history",
                           "/api/v1/jobs/../history",
                           "/api/v1/jobs/./history",
                           "/api/v1/jobs//history",
                           "/api/v1/jobs/demo%00/history",
                           "/api/v1/jobs/%64emo",
                           "/api/v1/jobs/demo/../../nodes",
                           "/api/v1/jobs/<script>alert(1)</script>",
                           "/api/v1/jobs/demo/history/",
                           "/api/v1//jobs",
                           "/api/v1/jobs/",
                           "/api/v2/jobs",
                           "/API/v1/jobs",
                           "//",
                           "/api",
                           "/coordinator.db",
                           "/jobs/demo/history.jsonl",
                           "/%2e%2e/%2e%2e/etc/passwd"}) {
    const HttpReply reply = Get(path);
    EXPECT_EQ(reply.status, 404) << path << ": " << reply.body;
    EXPECT_THAT(reply.body, AllOf(Not(HasSubstr("secret")), Not(HasSubstr("root:")))) << path;
    EXPECT_THAT(reply.head, Not(HasSubstr("text/html"))) << path;
  }
  const HttpReply longest = Get("/api/v1/jobs/" + std::string(10000, 'a'));
  EXPECT_EQ(longest.status, 404);
  EXPECT_LT(longest.body.size(), 1000u);
  EXPECT_EQ(Get("/api/v1/jobs/demo").status, 200);
}

TEST_F(StatusPageTest, NothingCanBeChanged) {
  StartDemo(coordinator, 10);
  for (const char* method : {"POST", "PUT", "DELETE", "PATCH"}) {
    EXPECT_EQ(
        HttpSend(http->port(), absl::StrCat(method, " /api/v1/jobs/demo HTTP/1.1\r\nHost: test"))
            .status,
        405);
  }
  EXPECT_EQ(coordinator.Get("demo").state(), v1::JOB_STATE_RUNNING);
}

TEST_F(StatusPageTest, ManyAsksForOneHistoryAreAnsweredOrRefusedInTime) {
  StartDemo(coordinator, 1000);
  ASSERT_TRUE(w0.Steps(1, 500, &committed).ok());
  std::vector<std::thread> clients;
  std::atomic<int> whole = 0, refused = 0;
  for (int i = 0; i < 40; ++i) {
    clients.emplace_back([&] {
      const HttpReply reply = Get("/api/v1/jobs/demo/history");
      if (reply.status == 503) ++refused;
      if (reply.status == 200 && Json::parse(reply.body)["step"].size() == 500) ++whole;
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(whole + refused, 40);
  EXPECT_GE(whole, 1);
}

TEST_F(StatusPageTest, AfterThePageItsPathsAreGone) {
  page.reset();
  EXPECT_EQ(Get("/").status, 404);
  EXPECT_EQ(Get("/api/v1/jobs").status, 404);
}

}  // namespace
}  // namespace zeroshard::coordinator
