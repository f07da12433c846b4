// The HTTP port holds against clients that are slow, many, too big or wrong, and a handler may
// answer later.
#include "common/http_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/metrics_server.h"
#include "prometheus/counter.h"
#include "tests/common/http_client.h"

namespace zeroshard {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::unique_ptr<HttpServer> Serve(HttpServer::Options options = {}) {
  options.listen = "127.0.0.1:0";
  options.what = "the test";
  auto server = HttpServer::Start(options);
  EXPECT_TRUE(server.ok()) << server.status();
  (*server)->Handle("/", [](const HttpRequest& request, const HttpAnswer& answer) {
    HttpResponse response;
    response.body = request.path;
    for (const auto& [key, value] : request.query) response.body += " " + key + "=" + value;
    answer(std::move(response));
  });
  return *std::move(server);
}

std::string Gunzip(const std::string& packed) {
  z_stream stream = {};
  EXPECT_EQ(inflateInit2(&stream, 15 + 16), Z_OK);
  std::string text(1 << 20, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
  stream.avail_in = static_cast<uInt>(packed.size());
  stream.next_out = reinterpret_cast<Bytef*>(text.data());
  stream.avail_out = static_cast<uInt>(text.size());
  EXPECT_EQ(inflate(&stream, Z_FINISH), Z_STREAM_END);
  text.resize(stream.total_out);
  inflateEnd(&stream);
  return text;
}

TEST(HttpServer, GivesPathAndQueryAsSentAndGuardsEveryAnswer) {
  const auto server = Serve();
  const HttpReply reply = HttpGet(server->port(), "/a/..%2fb%00?x=1&y=%3C");
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.body, "/a/..%2fb%00 x=1 y=%3C");
  EXPECT_THAT(reply.head, AllOf(HasSubstr("Cache-Control: no-store\r\n"),
                                HasSubstr("X-Content-Type-Options: nosniff\r\n"),
                                HasSubstr("X-Frame-Options: DENY\r\n"),
                                HasSubstr("Referrer-Policy: no-referrer\r\n")));
}

TEST(HttpServer, TheLongestPrefixAnswersAndNothingElseDoes) {
  const auto server = Serve();
  server->Handle("/longer", [](const HttpRequest&, const HttpAnswer& answer) {
    answer(HttpError(418, "longer"));
  });
  EXPECT_EQ(HttpGet(server->port(), "/longer/x").status, 418);
  EXPECT_EQ(HttpGet(server->port(), "/long").status, 200);
  server->StopHandling("/");
  EXPECT_EQ(HttpGet(server->port(), "/long").status, 404);
}

TEST(HttpServer, HeadHasTheSameHeadersAndNoBody) {
  const auto server = Serve();
  const HttpReply reply = HttpSend(server->port(), "HEAD /12345 HTTP/1.1\r\nHost: test");
  EXPECT_EQ(reply.status, 200);
  EXPECT_THAT(reply.head, HasSubstr("Content-Length: 6\r\n"));
  EXPECT_THAT(reply.body, IsEmpty());
}

TEST(HttpServer, OtherMethodsAndBodiesAreRefused) {
  const auto server = Serve();
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "BREW"}) {
    const HttpReply reply =
        HttpSend(server->port(), absl::StrCat(method, " / HTTP/1.1\r\nHost: test"));
    EXPECT_EQ(reply.status, 405) << method;
    EXPECT_THAT(reply.head, HasSubstr("Allow: GET, HEAD\r\n")) << method;
  }
  EXPECT_EQ(HttpSend(server->port(), "GET / HTTP/1.1\r\nHost: test\r\nContent-Length: 99999999999")
                .status,
            413);
  EXPECT_EQ(
      HttpSend(server->port(), "GET / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked").status,
      413);
}

TEST(HttpServer, WhatIsNoHttpOrTooBigGetsAnErrorOrNothing) {
  const auto server = Serve();
  // A version 1.1 without a host; headers that no browser sends.
  EXPECT_EQ(HttpSend(server->port(), "GET / HTTP/1.1").status, 400);
  const HttpReply big = HttpGet(server->port(), "/", "\r\nX-Big: " + std::string(40 << 10, 'x'));
  EXPECT_TRUE(big.status == 431 || big.status == 413 || big.status == 0) << big.status;
  const HttpReply uri = HttpGet(server->port(), "/" + std::string(40 << 10, 'y'));
  EXPECT_TRUE(uri.status == 414 || uri.status == 431 || uri.status == 0) << uri.status;
  for (const std::string& junk :
       {std::string("\x16\x03\x01\x02\x00\x01", 6), std::string(100, '\0'), std::string("GET"),
        std::string("\r\n\r\n\r\n"), std::string("GET / HTTP/9.9\r\n\r\n")}) {
    HttpConnection connection(server->port());
    ASSERT_TRUE(connection.Send(junk + "\r\n\r\n"));
    bool closed = false;
    const std::string answer = connection.ReadAll(milliseconds(300), &closed);
    EXPECT_THAT(answer, Not(HasSubstr("HTTP/1.1 200"))) << junk;
  }
  EXPECT_EQ(HttpGet(server->port(), "/").status, 200);
}

TEST(HttpServer, CompressesForThoseWhoTakeIt) {
  const auto server = Serve();
  const std::string text(20000, 'z');
  server->Handle("/big", [&](const HttpRequest&, const HttpAnswer& answer) {
    HttpResponse response;
    response.body = text;
    answer(std::move(response));
  });
  const HttpReply packed = HttpGet(server->port(), "/big", "\r\nAccept-Encoding: br, gzip;q=0.8");
  EXPECT_THAT(packed.head, HasSubstr("Content-Encoding: gzip\r\n"));
  EXPECT_LT(packed.body.size(), 1000u);
  EXPECT_EQ(Gunzip(packed.body), text);
  for (const char* accepts : {"", "\r\nAccept-Encoding: br", "\r\nAccept-Encoding: gzip;q=0",
                              "\r\nAccept-Encoding: gzip; q=0.0, identity"}) {
    const HttpReply plain = HttpGet(server->port(), "/big", accepts);
    EXPECT_EQ(plain.body, text) << accepts;
    EXPECT_THAT(plain.head, HasSubstr("Vary: Accept-Encoding\r\n"));
  }
}

TEST(HttpServer, AnAnswerMayComeLaterFromAnotherThread) {
  const auto server = Serve();
  std::vector<std::thread> threads;
  std::mutex mutex;
  server->Handle("/later", [&](const HttpRequest& request, const HttpAnswer& answer) {
    std::lock_guard<std::mutex> lock(mutex);
    threads.emplace_back([answer, path = request.path] {
      std::this_thread::sleep_for(milliseconds(20));
      HttpResponse response;
      response.body = "late " + path;
      answer(std::move(response));
    });
  });
  std::vector<std::thread> clients;
  std::atomic<int> good = 0;
  for (int i = 0; i < 8; ++i) {
    clients.emplace_back([&, i] {
      const std::string path = absl::StrCat("/later/", i);
      if (HttpGet(server->port(), path).body == "late " + path) ++good;
    });
  }
  for (std::thread& client : clients) client.join();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 8);
}

TEST(HttpServer, AnAnswerThatComesAfterItsClientOrItsServerIsDropped) {
  std::mutex mutex;
  std::condition_variable asked;
  std::vector<HttpAnswer> answers;
  const auto keep = [&](const HttpRequest&, const HttpAnswer& answer) {
    std::lock_guard<std::mutex> lock(mutex);
    answers.push_back(answer);
    asked.notify_all();
  };
  auto server = Serve();
  server->Handle("/never", keep);
  auto gone = std::make_unique<HttpConnection>(server->port());
  HttpConnection waits(server->port());
  for (HttpConnection* connection : {gone.get(), &waits}) {
    ASSERT_TRUE(connection->Send("GET /never HTTP/1.1\r\nHost: test\r\n\r\n"));
  }
  {
    std::unique_lock<std::mutex> lock(mutex);
    ASSERT_TRUE(asked.wait_for(lock, seconds(20), [&] { return answers.size() == 2; }));
  }
  gone.reset();
  server.reset();
  bool closed = false;
  const std::string told = waits.ReadAll(seconds(20), &closed);
  EXPECT_TRUE(closed);
  EXPECT_TRUE(told.empty() || absl::StartsWith(told, "HTTP/1.1 503")) << told;
  for (const HttpAnswer& answer : answers) answer(HttpResponse());
}

TEST(HttpServer, AHandlerThatThrowsAnswersWithTheReason) {
  const auto server = Serve();
  server->Handle("/throws", [](const HttpRequest&, const HttpAnswer&) {
    throw std::runtime_error("no more of it");
  });
  const HttpReply reply = HttpGet(server->port(), "/throws");
  EXPECT_EQ(reply.status, 500);
  EXPECT_THAT(reply.body, HasSubstr("no more of it"));
}

// A request that never ends, a byte now and then; a client that reads nothing.
TEST(HttpServer, SlowClientsAreClosedInTime) {
  HttpServer::Options options;
  options.first_request = milliseconds(600);
  options.next_request = milliseconds(600);
  options.taking_answer = milliseconds(600);
  const auto server = Serve(options);
  server->Handle("/huge", [](const HttpRequest&, const HttpAnswer& answer) {
    HttpResponse response;
    response.body.assign(64 << 20, 'x');
    answer(std::move(response));
  });
  HttpConnection silent(server->port()), dripping(server->port()), idle(server->port()),
      deaf(server->port());
  ASSERT_TRUE(dripping.Send("GET / HTTP/1.1\r\n"));
  ASSERT_TRUE(idle.Send("GET / HTTP/1.1\r\nHost: test\r\n\r\n"));
  ASSERT_TRUE(deaf.Send("GET /huge HTTP/1.1\r\nHost: test\r\n\r\n"));
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < milliseconds(1200)) {
    dripping.Send("X: y\r\n");
    std::this_thread::sleep_for(milliseconds(50));
  }
  for (HttpConnection* connection : {&silent, &dripping, &idle}) {
    bool closed = false;
    connection->ReadAll(seconds(5), &closed);
    EXPECT_TRUE(closed);
  }
  bool closed = false;
  EXPECT_LT(deaf.ReadAll(seconds(5), &closed).size(), size_t{64} << 20);
  EXPECT_TRUE(closed);
}

TEST(HttpServer, OneAddressNeverHasAllConnections) {
  HttpServer::Options options;
  options.max_connections = 20;
  options.max_connections_per_address = 10;
  const auto server = Serve(options);
  std::vector<std::unique_ptr<HttpConnection>> open;
  for (int i = 0; i < 30; ++i) open.push_back(std::make_unique<HttpConnection>(server->port()));
  const auto is_closed = [](const std::unique_ptr<HttpConnection>& connection) {
    bool closed = false;
    connection->ReadAll(milliseconds(10), &closed);
    return closed;
  };
  const auto end = std::chrono::steady_clock::now() + options.first_request / 2;
  while (open.size() > 10 && std::chrono::steady_clock::now() < end) {
    std::erase_if(open, is_closed);
  }
  std::erase_if(open, is_closed);
  EXPECT_EQ(open.size(), 10u);
}

TEST(MetricsServer, AnswersAtOnceWhileAHundredClientsAreSlow) {
  auto server = MetricsServer::Start("127.0.0.1:0", "test");
  ASSERT_TRUE(server.ok()) << server.status();
  std::deque<HttpConnection> slow;
  for (int i = 0; i < 100; ++i) {
    slow.emplace_back((*server)->port());
    ASSERT_TRUE(slow.back().connected());
    ASSERT_TRUE(slow.back().Send(i % 2 == 0 ? "GET /metrics HT" : "GET / HTTP/1.1\r\nX: "));
  }
  for (int i = 0; i < 10; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const HttpReply reply = HttpGet((*server)->port(), "/metrics");
    EXPECT_EQ(reply.status, 200);
    EXPECT_THAT(reply.body, HasSubstr("zeroshard_build_info"));
    EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(5));
    for (HttpConnection& connection : slow) connection.Send("x");
  }
}

TEST(MetricsServer, ServesWhatWasAddedAsLongAsItIsThere) {
  auto server = MetricsServer::Start("127.0.0.1:0", "test");
  ASSERT_TRUE(server.ok()) << server.status();
  auto more = std::make_shared<prometheus::Registry>();
  prometheus::BuildCounter().Name("more_total").Help("More.").Register(*more).Add({}).Increment(3);
  (*server)->AddCollectable(more);
  const HttpReply reply = HttpGet((*server)->port(), "/metrics");
  EXPECT_THAT(reply.head, HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
  EXPECT_THAT(reply.body, AllOf(HasSubstr("zeroshard_build_info"), HasSubstr("more_total 3")));
  more.reset();
  EXPECT_THAT(HttpGet((*server)->port(), "/metrics").body, Not(HasSubstr("more_total")));
  EXPECT_EQ(HttpGet((*server)->port(), "/metricsx").status, 404);
  EXPECT_EQ(HttpGet((*server)->port(), "/").status, 404);
}

TEST(MetricsServer, EndsAtOnceWithConnectionsOpen) {
  auto server = MetricsServer::Start("127.0.0.1:0", "test");
  ASSERT_TRUE(server.ok()) << server.status();
  HttpConnection open((*server)->port());
  ASSERT_TRUE(open.Send("GET /metr"));
  const auto start = std::chrono::steady_clock::now();
  server->reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(5));
}

}  // namespace
}  // namespace zeroshard
