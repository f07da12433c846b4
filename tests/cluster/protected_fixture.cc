#include "tests/cluster/protected_fixture.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/files.h"
#include "common/net_address.h"

namespace zeroshard::cluster {
namespace {

// The body, or nothing.
std::string HttpGet(const std::string& address, const std::string& path) {
  const auto where = ParseHostPort(address);
  if (!where.ok()) return "";
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  timeval patience = {10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  sockaddr_in to = {};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(where->port));
  inet_pton(AF_INET, where->host.c_str(), &to.sin_addr);
  std::string text;
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) > 0) {
      char buffer[4096];
      for (ssize_t got; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) text.append(buffer, got);
    }
  }
  close(fd);
  return text;
}

}  // namespace

ProtectedTest::ProtectedTest() : ca_(folder_ + "/ca.crt") {
  security::WriteWhole(ca_, authority_.Pem());
  std::filesystem::create_directories(folder_ + "/w/run");
}

void ProtectedTest::Issue(const security::TestAuthority& authority, const std::string& name,
                          const std::string& role) {
  authority.Issue(folder_ + "/" + name, "spiffe://zeroshard/" + role);
}

std::vector<std::string> ProtectedTest::TlsOptions(const std::string& name) const {
  return {"--tls-cert", absl::StrCat(folder_, "/", name, ".crt"),
          "--tls-key",  absl::StrCat(folder_, "/", name, ".key"),
          "--tls-ca",   ca_};
}

std::string ProtectedTest::Program(const std::string& name) const {
  const std::map<std::string, std::string> programs = {
      {"zeroshard-coordinator", ZEROSHARD_COORDINATOR_PROGRAM},
      {"zeroshard-worker", ZEROSHARD_WORKER_PROGRAM},
      {"zeroshard-store", ZEROSHARD_STORE_PROGRAM}};
  return programs.at(name);
}

Process* ProtectedTest::Start(const std::string& name, const std::string& program,
                              const std::vector<std::string>& more) {
  std::vector<std::string> argv = {Program(program), "--port-file",
                                   WorkPath("w", absl::StrCat("run/", name, ".port"))};
  if (program == "zeroshard-coordinator") {
    argv.insert(argv.end(), {"--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0",
                             "--data-dir", folder_ + "/w"});
  } else {
    argv.insert(argv.end(), {"--coordinator", AddressOf("w", "coordinator"), "--name", name,
                             "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"});
    if (program == "zeroshard-worker") argv.insert(argv.end(), {"--threads", "1"});
  }
  argv.insert(argv.end(), more.begin(), more.end());
  auto& process = daemons_[name];
  process = std::make_unique<Process>(argv, folder_ + "/" + name);
  return process.get();
}

void ProtectedTest::StartCluster() {
  Issue(authority_, "coordinator", "coordinator");
  Issue(authority_, "worker-0", "worker/worker-0");
  Issue(authority_, "worker-1", "worker/worker-1");
  Issue(authority_, "store-0", "store");
  Issue(authority_, "client", "client");
  const std::string tokens = folder_ + "/tokens";
  security::WriteWhole(tokens, "a-token-that-the-test-made\n");
  std::vector<std::string> options = TlsOptions("coordinator");
  options.insert(options.end(), {"--max-connection-age", "2", "--token-file", tokens});
  Start("coordinator", "zeroshard-coordinator", options);
  ASSERT_TRUE(Eventually(kPatience, [&] { return !AddressOf("w", "coordinator").empty(); }))
      << daemons_["coordinator"]->Err();
  Start("store-0", "zeroshard-store", TlsOptions("store-0"));
  Start("worker-0", "zeroshard-worker", TlsOptions("worker-0"));
  Start("worker-1", "zeroshard-worker", TlsOptions("worker-1"));
}

std::unique_ptr<Process> ProtectedTest::Client(std::vector<std::string> args) {
  const std::vector<std::string> options = TlsOptions("client");
  args.insert(args.end(), options.begin(), options.end());
  args.insert(args.end(), {"--coordinator", AddressOf("w", "coordinator")});
  return Run(args);
}

void ProtectedTest::SubmitEndless() {
  const auto submit =
      Client({"submit", job_, "--set", "steps=1000000", "--set", "bf16.enabled=true", "--set",
              "zero_optimization.offload_optimizer={device: cpu}", "--set", "store={replicas: 1}"});
  ASSERT_EQ(submit->Wait(absl::Seconds(1)), 0) << submit->Err();
  ASSERT_TRUE(GoesOn(3));
}

nlohmann::ordered_json ProtectedTest::Status() {
  const auto status = Client({"status", "small", "--output", "json"});
  EXPECT_EQ(status->Wait(absl::Seconds(1)), 0) << status->Err();
  return nlohmann::ordered_json::parse(status->Out(), nullptr, /*allow_exceptions=*/false);
}

double ProtectedTest::Metric(const std::string& daemon, const std::string& series) {
  const auto ports = ReadPortFile(WorkPath("w", absl::StrCat("run/", daemon, ".port")));
  const std::string page = ports.ok() ? HttpGet(ports->metrics, "/metrics") : "";
  for (const absl::string_view line : absl::StrSplit(page, '\n')) {
    double value = 0;
    if (line.substr(0, series.size() + 1) == series + " " &&
        absl::SimpleAtod(line.substr(series.size() + 1), &value)) {
      return value;
    }
  }
  return -1;
}

bool ProtectedTest::GoesOn(size_t steps) {
  const size_t before = History("w").size();
  return Eventually(kPatience, [&] { return History("w").size() >= before + steps; });
}

}  // namespace zeroshard::cluster
