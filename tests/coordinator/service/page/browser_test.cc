// The status page in a browser: what it shows, that it fits a phone, goes on without a coordinator,
// can be used by keyboard, and that no name of anything becomes markup or breaks the layout.
#include "tests/coordinator/service/page/browser.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "coordinator/service/page/status_page.h"
#include "tests/coordinator/service/page/page_checks.h"
#include "tests/coordinator/service/service_fixture.h"

namespace zeroshard::coordinator {
namespace {

using Json = nlohmann::json;

// Each would run something, leave its place, or be wider than any screen.
const char* const kHostile[] = {
    "<img src=x onerror=\"document.title='broken'; alert(1)\">",
    "</script><script>alert(2)</script>",
    "\"><svg onload=alert(3)><iframe src=javascript:alert(4)>",
    "javascript:alert(6)//__proto__",
};

// Another direction, a mark that turns the line and signs that join; members may not say it of
// themselves.
const char kOtherScript[] =
    "\xd9\x85\xd8\xb1\xd8\xad\xd8\xa8\xd8\xa7 \xe2\x80\xae gnp.evil "
    "\xf0\x9f\x94\xa5\xf0\x9f\x91\xa9"
    "\xe2\x80\x8d\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7 {{7*7}} ${alert(5)} %3Cb%3E "
    "&lt;b&gt;";

std::string Hostile(int which) { return kHostile[which % std::size(kHostile)]; }

#define ASSERT_OK(expression)                    \
  do {                                           \
    const absl::Status zs_status = (expression); \
    ASSERT_TRUE(zs_status.ok()) << zs_status;    \
  } while (false)

class BrowserTest : public ServiceTest {
 protected:
  void SetUp() override {
    if (!Browser::Installed()) {
      GTEST_SKIP() << "no chromium; 'deploy/install_deps.sh --tests' installs it";
    }
    coordinator = std::make_unique<Coordinator>(folder.path());
    Serve("127.0.0.1:0");
    auto started = Browser::Start();
    ASSERT_TRUE(started.ok()) << started.status();
    browser = *std::move(started);
    ASSERT_OK(browser->Resize(1280, 900));
  }
  void Serve(const std::string& listen) {
    HttpServer::Options options;
    options.listen = listen;
    options.what = "the test";
    auto started = HttpServer::Start(options);
    ASSERT_TRUE(started.ok()) << started.status();
    http = *std::move(started);
    page = std::make_unique<StatusPage>(coordinator->engine.get(), http.get());
  }
  void Open(const std::string& hash = "") {
    ASSERT_OK(browser->Open("http://" + http->address() + "/" + hash));
    ASSERT_OK(browser->WaitFor("document.body.dataset.ready === 'yes'"));
  }
  // At both widths, light and dark.
  void ExpectWell() {
    for (const int width : {1280, 360}) {
      for (const bool dark : {false, true}) {
        ASSERT_OK(browser->Resize(width, 800));
        ASSERT_OK(browser->SetDark(dark));
        // The curve follows the width in a frame of its own.
        ASSERT_OK(
            browser->WaitFor("new Promise((done) => requestAnimationFrame(() => "
                             "requestAnimationFrame(() => done(true))))"));
        for (const std::string& wrong : CheckPage(browser.get())) {
          ADD_FAILURE() << width << (dark ? " dark: " : " light: ") << wrong;
        }
      }
    }
    ASSERT_OK(browser->Resize(1280, 900));
  }
  // The workers of the job go on saying that they live.
  void BeatOn() {
    beating = std::thread([this] {
      v1::MemberMessage messages[2];
      *messages[0].mutable_heartbeat()->mutable_running() = w0.fence();
      *messages[1].mutable_heartbeat()->mutable_running() = w1.fence();
      while (!stop.WaitForNotificationWithTimeout(absl::Seconds(1))) {
        w0.Say(messages[0]);
        w1.Say(messages[1]);
      }
    });
  }
  void TearDown() override {
    stop.Notify();
    if (beating.joinable()) beating.join();
  }
  // Answers the page's questions from made-up JSON.
  void Fake(const std::map<std::string, Json>& answers) {
    http->Handle("/api/v1/", [answers](const HttpRequest& request, const HttpAnswer& answer) {
      const auto found = answers.find(request.path.substr(8));
      if (found == answers.end()) return answer(HttpError(404, "{\"error\":\"not faked\"}"));
      HttpResponse response;
      response.content_type = "application/json";
      response.body = found->second.dump();
      answer(std::move(response));
    });
  }

  std::unique_ptr<Coordinator> coordinator;
  std::unique_ptr<HttpServer> http;
  std::unique_ptr<StatusPage> page;
  std::unique_ptr<Browser> browser;
  absl::Notification stop;
  std::thread beating;
};

TEST_F(BrowserTest, ShowsJobsCurveMembersAndEventsAndFollowsThem) {
  StartDemo(*coordinator, 100);
  BeatOn();
  ASSERT_TRUE(w0.Steps(1, 20, &committed).ok());
  Open();
  ASSERT_OK(browser->WaitFor("document.querySelectorAll('#jobs tbody tr').length === 1"));
  ASSERT_OK(browser->WaitFor("/demo running/.test(document.title)"));
  ASSERT_OK(
      browser->WaitFor("document.querySelector('path.line').getAttribute('d')"
                       ".split(/[ML]/).length === 21"));
  ASSERT_OK(browser->WaitFor("/20 . 100/.test(document.querySelector('#job').textContent)"));
  ASSERT_OK(browser->WaitFor("document.querySelectorAll('#members tbody tr').length === 2"));
  ASSERT_OK(browser->WaitFor("document.querySelectorAll('.events li').length >= 2"));
  ASSERT_TRUE(w0.Steps(21, 30, &committed).ok());
  ASSERT_OK(
      browser->WaitFor("document.querySelector('path.line').getAttribute('d')"
                       ".split(/[ML]/).length === 31"));
  ExpectWell();
}

TEST_F(BrowserTest, WhatHostileMembersSayStaysText) {
  StartDemo(*coordinator, 100);
  ASSERT_TRUE(w0.Steps(1, 3, &committed).ok());
  std::vector<std::unique_ptr<v1::Cluster::Stub>> stubs;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::MemberMessage, v1::CoordinatorMessage>>>
      streams;
  int welcomed = 0;
  for (int i = 0; i < 5; ++i) {
    stubs.push_back(v1::Cluster::NewStub(Dial(coordinator->server->address())));
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    SetDeadline(contexts.back().get());
    streams.push_back(stubs.back()->Session(contexts.back().get()));
    v1::MemberMessage message;
    v1::Hello& hello = *message.mutable_hello();
    hello.set_kind(i % 2 == 0 ? v1::MEMBER_KIND_WORKER : v1::MEMBER_KIND_STORE);
    hello.set_name(absl::StrCat("member-", i));
    hello.set_incarnation(RandomId());
    const bool other_script = i == 4;
    std::string host = other_script ? kOtherScript : Hostile(i);
    host.append(256 - host.size(), 'w');  // longer ones are refused
    hello.set_host(host);
    hello.set_device(Hostile(i + 1));
    hello.set_version(Hostile(i + 2));
    hello.set_address("127.0.0.1:1");
    ASSERT_TRUE(streams.back()->Write(message));
    v1::CoordinatorMessage answer;
    ASSERT_TRUE(streams.back()->Read(&answer));
    EXPECT_EQ(answer.has_welcome(), !other_script) << answer.DebugString();
    if (answer.has_welcome()) ++welcomed;
  }
  // Why the job failed is the worker's own words.
  ASSERT_TRUE(w0.End(false, Hostile(0) + kOtherScript + std::string(3000, 'r')).ok());
  ASSERT_TRUE(w1.End(false, Hostile(1)).ok());
  Open();
  ASSERT_OK(browser->WaitFor(
      absl::StrCat("document.querySelectorAll('#members tbody tr').length === ", welcomed + 2)));
  ASSERT_OK(
      browser->WaitFor("/demo failed/.test(document.querySelector('#problems').textContent)"));
  ASSERT_OK(browser->WaitFor("document.querySelector('#job').textContent.includes('onerror')"));
  ExpectWell();
  const auto title = browser->Evaluate("document.title");
  ASSERT_TRUE(title.ok());
  EXPECT_EQ(*title, "demo failed – ZeroShard");
}

Json FakeJob(const std::string& run, const std::string& text) {
  Json job = {{"name", text},
              {"run_id", run},
              {"state", "JOB_STATE_RUNNING"},
              {"reason", text},
              {"generation", "18446744073709551615"},
              {"committed_step", "7"},
              {"steps", "9"},
              {"steps_lost", "3"},
              {"stage", 3},
              {"workers", 2},
              {"submitted_unix_ms", "1"},
              {"ended_unix_ms", "0"},
              {"version", {{"epoch", "1"}, {"step", "7"}}}};
  job["last"] = {{"step", "7"},    {"loss", "NaN"},  {"grad_norm", "Infinity"},
                 {"tokens", "64"}, {"seconds", 0.5}, {"learning_rate", 1e-3}};
  job["resume"] = {{"checkpoint", text}};
  job["events"] = Json::array();
  for (int i = 0; i < 200; ++i) {
    job["events"].push_back(
        {{"unix_ms", std::to_string(i)}, {"state", "JOB_STATE_RUNNING"}, {"reason", text}});
  }
  for (int i = 0; i < 3; ++i) {
    job["ranks"].push_back({{"rank", i},
                            {"member", text},
                            {"host", text},
                            {"progress", {{"step", "7"}, {"phase", text}}},
                            {"heartbeat_age_ms", "-1"},
                            {"usage", {{"parameter_bytes", text}, {"step", "6"}}}});
    job["plan"].push_back({{"rank", i}, {"parameter_bytes", "9007199254740993"}});
    job["stores"].push_back({{"member", text},
                             {"host", text},
                             {"phase", "STORE_PHASE_FAILED"},
                             {"problem", text},
                             {"version", {{"epoch", "1"}, {"step", "7"}}},
                             {"usage", {{"chunks", "2"}, {"master_bytes", "8"}}}});
  }
  job["store_plan"] = {
      {"chunks", "400"}, {"state_bytes", "14"}, {"staging_bytes", "2"}, {"replicas", 2}};
  return job;
}

std::map<std::string, Json> FakeCluster(const std::vector<std::string>& names) {
  std::map<std::string, Json> answers;
  answers["version"] = {{"version", names[0]}};
  Json jobs = Json::array(), nodes = Json::array();
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string run = absl::StrCat("run-", i);
    Json job = FakeJob(run, names[i]);
    answers["jobs/" + run] = job;
    jobs.push_back(job);
    nodes.push_back({{"hello",
                      {{"kind", names[i]},
                       {"name", names[i]},
                       {"host", names[i]},
                       {"incarnation", run},
                       {"version", names[i]},
                       {"device", names[i]}}},
                     {"state", i % 2 == 0 ? "lost" : names[i].substr(0, 60)},
                     {"job", names[i]},
                     {"heartbeat_age_ms", "100000"},
                     {"lost_reason", names[i]},
                     {"since_unix_ms", "1"}});
    Json history = {{"width", 1},
                    {"complete", true},
                    {"eval", Json::array({{3, 2.5}})},
                    {"lost", Json::array({{4, 2}})},
                    {"skipped", Json::array({{5, 1}})}};
    for (int step = 1; step <= 7; ++step) {
      history["step"].push_back(step);
      for (const char* key : {"loss", "least", "most"}) {
        history[key].push_back(step == 5 ? Json() : Json(8.0 / step));
      }
      for (const char* key : {"grad_norm", "learning_rate", "tokens", "seconds"}) {
        history[key].push_back(step);
      }
    }
    answers["jobs/" + run + "/history"] = history;
    Json shards = {{"version", 3}, {"replicas", 2}, {"chunks", 400},
                   {"cells", 256}, {"first", 0},    {"chunk_elements", 1048576}};
    for (int store = 0; store < 3; ++store) {
      shards["stores"].push_back({{"member", names[i]},
                                  {"host", names[i]},
                                  {"chunks", 200},
                                  {"bytes", 1e12},
                                  {"held", std::vector<int>(256, store % 2)}});
    }
    for (int row = 0; row < 50; ++row) {
      shards["rows"].push_back({{"chunk", row},
                                {"unit", names[i]},
                                {"begin", 0},
                                {"end", 1048576},
                                {"bytes", 14680064},
                                {"trained", false},
                                {"stores", {0, 2}}});
    }
    answers["jobs/" + run + "/shards"] = shards;
    answers["jobs/" + run + "/checkpoints"] = {
        {"dir", names[i]},
        {"checkpoints",
         Json::array(
             {{{"step", "5"}, {"path", names[i]}, {"complete", true}, {"bytes", "5"}},
              {{"step", "7"}, {"path", "x"}, {"complete", false}, {"problem", names[i]}}})}};
  }
  answers["jobs"] = {{"jobs", jobs}};
  answers["nodes"] = {{"term", "3"}, {"cluster_id", names[0]}, {"nodes", nodes}};
  return answers;
}

TEST_F(BrowserTest, NoNameOfAnythingBecomesMarkupOrBreaksTheLayout) {
  std::vector<std::string> names(std::begin(kHostile), std::end(kHostile));
  names.push_back(kOtherScript);
  names.push_back(std::string(20000, 'M'));
  Fake(FakeCluster(names));
  for (size_t i = 0; i < names.size(); ++i) {
    Open(absl::StrCat("?", i, "#job=run-", i));
    ASSERT_OK(browser->WaitFor("document.querySelectorAll('.strip').length === 3"));
    ASSERT_OK(
        browser->Evaluate("document.querySelector('details:not(.long)').open = true").status());
    ASSERT_OK(
        browser->WaitFor("document.querySelectorAll('details:not(.long) tbody tr').length === 50"));
    const auto shown = browser->Evaluate("document.querySelector('#job h2').textContent");
    ASSERT_TRUE(shown.ok()) << shown.status();
    if (names[i].size() < 1000) {
      EXPECT_EQ(*shown, names[i]);
    }
    ExpectWell();
  }
  EXPECT_TRUE(browser->complaints().empty());
}

// What a job died of may be pages of words of its library.
TEST_F(BrowserTest, ALongReasonTakesFewLinesUntilItIsOpened) {
  std::string reason = "rank 0: ";
  while (reason.size() < 3900) reason += "no route to host ";
  auto answers = FakeCluster({"one"});
  for (Json* job : {&answers["jobs/run-0"], &answers["jobs"]["jobs"][0]}) {
    (*job)["state"] = "JOB_STATE_FAILED";
    (*job)["reason"] = reason;
    (*job)["ended_unix_ms"] = std::to_string(absl::ToUnixMillis(absl::Now()));
  }
  answers["jobs/run-0"]["events"][0]["reason"] = reason;
  Fake(answers);
  Open("#job=run-0");
  const char* const places[] = {"#problems", "#job .card", ".events"};
  const auto element = [](const char* where) {
    return absl::StrCat("document.querySelector('", where, " details.long')");
  };
  const auto height = [&](const char* where) {
    const auto value = browser->Evaluate(element(where) + ".getBoundingClientRect().height");
    EXPECT_TRUE(value.ok()) << value.status();
    return value.ok() ? value->get<double>() : 0;
  };
  for (const int width : {1280, 360}) {
    ASSERT_OK(browser->Resize(width, 800));
    for (const char* where : places) {
      ASSERT_OK(browser->WaitFor(element(where) + " !== null"));
      // Three lines of 15 px text at 1.45 and the word that opens it.
      EXPECT_GT(height(where), 60) << where << width;
      EXPECT_LT(height(where), 100) << where << width;
      ASSERT_OK(browser->Evaluate(element(where) + ".querySelector('summary').click()").status());
    }
    // They stay open while the page follows the job.
    ASSERT_OK(browser->WaitFor("new Promise((done) => setTimeout(() => done(true), 2500))"));
    for (const char* where : places) {
      EXPECT_GT(height(where), 300) << where << width;
      const auto text = browser->Evaluate(element(where) + ".textContent");
      ASSERT_TRUE(text.ok()) << text.status();
      EXPECT_EQ(*text, reason) << where << width;
      ASSERT_OK(browser->Evaluate(element(where) + ".open = false").status());
    }
  }
  ExpectWell();
}

TEST_F(BrowserTest, DurationsAreRoundedBeforeTheyAreSplit) {
  Fake(FakeCluster({"one"}));
  Open();
  const std::pair<const char*, const char*> wanted[] = {
      {"0.4", "<1 s"},         {"59.4", "59 s"},        {"59.6", "1 min 0 s"},
      {"119.4", "1 min 59 s"}, {"119.7", "2 min 0 s"},  {"3599.6", "1 h 0 min"},
      {"7199", "1 h 59 min"},  {"7199.5", "2 h 0 min"}, {"86399.7", "1 d 0 h"},
      {"NaN", "\xe2\x80\x93"}, {"-1", "\xe2\x80\x93"}};
  for (const auto& [seconds, text] : wanted) {
    const auto shown = browser->Evaluate(absl::StrCat("span(", seconds, ")"));
    ASSERT_TRUE(shown.ok()) << shown.status();
    EXPECT_EQ(*shown, text) << seconds;
  }
}

TEST_F(BrowserTest, WhatIsMissingIsLeftOut) {
  Fake({{"version", Json::object()},
        {"nodes", {{"nodes", Json::array({{{"hello", Json::object()}, {"state", "idle"}}})}}},
        {"jobs", {{"jobs", Json::array({{{"name", "bare"}, {"run_id", "bare-1"}}})}}},
        {"jobs/bare-1", {{"name", "bare"}, {"run_id", "bare-1"}, {"state", "JOB_STATE_QUEUED"}}}});
  Open();
  ASSERT_OK(browser->WaitFor("/bare queued/.test(document.title)"));
  ExpectWell();
  Fake({{"version", Json::object()}, {"nodes", Json::object()}, {"jobs", Json::object()}});
  ASSERT_OK(browser->WaitFor("/None yet/.test(document.querySelector('#jobs').textContent)"));
  ExpectWell();
}

TEST_F(BrowserTest, AJobThatIsNotThereIsSaid) {
  auto answers = FakeCluster({"one"});
  Fake(answers);
  Open("#job=another");
  ASSERT_OK(browser->WaitFor("/not faked/.test(document.querySelector('#job').textContent)"));
  ASSERT_OK(browser->WaitFor("document.querySelectorAll('#jobs tbody tr').length === 1"));
  ExpectWell();
}

TEST_F(BrowserTest, AsksNothingWhileItIsHidden) {
  // The browser may ask for as long as the server is there, which is longer than this function.
  const auto asks = std::make_shared<std::atomic<int>>(0);
  const std::atomic<int>& asked = *asks;
  http->Handle("/api/v1/", [asks](const HttpRequest&, const HttpAnswer& answer) {
    ++*asks;
    HttpResponse response;
    response.body = "{}";
    answer(std::move(response));
  });
  Open();
  ASSERT_OK(browser
                ->Evaluate("Object.defineProperty(document, 'hidden', {value: true,"
                           "configurable: true})")
                .status());
  // What is under way ends; then two refreshes would be due.
  int before = -1;
  for (int i = 0; i < 20 && before != asked; ++i) {
    before = asked;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  EXPECT_GT(before, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(4500));
  EXPECT_EQ(asked, before);
  ASSERT_OK(browser
                ->Evaluate("delete document.hidden;"
                           "document.dispatchEvent(new Event('visibilitychange'))")
                .status());
  ASSERT_OK(browser->WaitFor("/^Live/.test(document.querySelector('#live').textContent)"));
  for (int i = 0; i < 100 && asked == before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_GT(asked, before);
}

TEST_F(BrowserTest, SaysSinceWhenTheCoordinatorIsSilentAndGoesOn) {
  StartDemo(*coordinator, 100);
  BeatOn();
  ASSERT_TRUE(w0.Steps(1, 5, &committed).ok());
  Open();
  ASSERT_OK(browser->WaitFor("/demo running/.test(document.title)"));
  const std::string address = http->address();
  page.reset();
  http.reset();
  ASSERT_OK(
      browser->WaitFor("/does not answer since "
                       "\\d\\d:\\d\\d:\\d\\d/.test(document.querySelector('#live').textContent)"));
  // What was known stays to be read.
  ASSERT_OK(browser->WaitFor("document.querySelectorAll('#members tbody tr').length === 2"));
  ExpectWell();
  Serve(address);
  ASSERT_OK(browser->WaitFor("/^Live/.test(document.querySelector('#live').textContent)"));
}

TEST_F(BrowserTest, RefreshingKeepsChoiceScrollFocusAndWhatIsOpen) {
  auto answers = FakeCluster({"one", "two"});
  Fake(answers);
  Open();
  // Without a choice the newest job that lives.
  ASSERT_OK(browser->WaitFor("document.querySelector('#job h2').textContent === 'two'"));
  ASSERT_OK(
      browser->Evaluate("document.querySelector('#jobs a[href=\"#job=run-0\"]').click()").status());
  ASSERT_OK(browser->WaitFor("document.querySelector('#job h2').textContent === 'one'"));
  ASSERT_OK(browser->WaitFor("document.querySelectorAll('.strip').length === 3"));
  ASSERT_OK(browser
                ->Evaluate("document.querySelector('details:not(.long)').open = true;"
                           "scrollTo(0, 400);"
                           "document.querySelector('.events').scrollTop = 50;"
                           "[...document.querySelectorAll('button')].find((b) => b.textContent "
                           "=== 'log').click();"
                           "document.querySelector('#curve').focus({preventScroll: true});"
                           "window.curveBefore = document.querySelector('#curve')")
                .status());
  ASSERT_OK(browser->Press("Home"));
  ASSERT_OK(
      browser->WaitFor("/^step 1: loss 8/.test(document.querySelector('.readout').textContent)"));
  ASSERT_OK(browser->Press("ArrowRight"));
  ASSERT_OK(
      browser->WaitFor("/^step 2: loss 4/.test(document.querySelector('.readout').textContent)"));
  answers["jobs/run-0"]["reason"] = "another reason";
  Fake(answers);
  ASSERT_OK(browser->WaitFor("/another reason/.test(document.querySelector('#job').textContent)"));
  for (const char* kept :
       {"document.querySelector('#job h2').textContent === 'one'", "scrollY === 400",
        "document.querySelector('.events').scrollTop === 50",
        "document.querySelector('details:not(.long)').open",
        "document.activeElement === window.curveBefore",
        "document.querySelector('button[aria-pressed=true]').textContent === 'log'",
        "location.hash === '#job=run-0'"}) {
    const auto value = browser->Evaluate(kept);
    ASSERT_TRUE(value.ok()) << value.status();
    EXPECT_EQ(*value, true) << kept;
  }
}

}  // namespace
}  // namespace zeroshard::coordinator
