// Gradients in and parameters out between two processes of one host, in turns: over gRPC on
// loopback against what one TCP stream carries there, and through shared memory against memcpy.
//
//   bulk_bench --mb 2048 --rounds 5
//
// tcp     blocks of 1 MiB with write() and read(), one connection
// iperf3  one stream in blocks of 1 MiB, where it is installed
// memcpy  blocks of 1 MiB, one thread
// push    StoreClient::Push, checksums on both sides, copied into the store's memory, acknowledged
// pull    StoreClient::Pull, checksums on both sides, copied into the rank's memory
// crc     what computing a checksum twice takes of a push's time: its share on one core
//
// Both sides of push, pull and memcpy use 256 MiB, more than caches hold.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/bulk/transport/channel_arguments.h"
#include "common/bulk/transport/frame_buffer.h"
#include "common/checksum.h"
#include "common/grpc_server.h"
#include "common/status_macros.h"
#include "shard_store/service/bulk_service.h"
#include "tests/bench/support/rates.h"
#include "worker/agent/store_client.h"

namespace zeroshard {
namespace {

using bench::Now;

constexpr size_t kBlock = size_t{1} << 20;
constexpr int kChunks = 128;  // of 2^20 elements of 2 bytes
constexpr int64_t kElements = kChunks * kChunkElements;

struct Options {
  int megabytes = 2048;
  int rounds = 5;
  bool iperf = true;
};

// Processor seconds that a process has used.
double CpuSeconds(pid_t pid) {
  clockid_t clock;
  timespec time{};
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// --- the store's process ---------------------------------------------------------------------

struct Memory {
  std::vector<char> staging = std::vector<char>(kElements * 2, 1);
  std::shared_ptr<std::vector<char>> parameters =
      std::make_shared<std::vector<char>>(kElements * 2, 2);
};

class Session : public store::BulkSession {
 public:
  explicit Session(Memory* memory) : memory_(memory) {}
  absl::Status Push(const bulk::Header& header,
                    absl::Span<const absl::Span<const char>> parts) override {
    bulk::CopyTo(parts, memory_->staging.data() + Offset(header));
    return absl::OkStatus();
  }
  void WaitForPush(const bulk::Header&, std::function<void(const absl::Status&)> ready) override {
    ready(absl::OkStatus());
  }
  void Pull(const bulk::Header& header, PullHandler handler) override {
    handler(store::PinnedParameters{
        memory_->parameters, absl::MakeConstSpan(memory_->parameters->data() + Offset(header),
                                                 header.count * size_t{2})});
  }
  absl::Status State(const bulk::Header&, absl::Span<float>) override {
    return absl::UnimplementedError("not here");
  }

 private:
  static size_t Offset(const bulk::Header& header) {
    return (size_t{header.chunk} * kChunkElements + header.begin) * 2;
  }
  Memory* const memory_;
};

[[noreturn]] void Serve(int out, int in) {
  Memory memory;
  store::BulkService service(
      [&memory](const v1::BulkHello&, std::function<void(const absl::Status&)>)
          -> absl::StatusOr<std::unique_ptr<store::BulkSession>> {
        return std::make_unique<Session>(&memory);
      });
  GrpcServer::Options options;
  options.listen = "127.0.0.1:0";
  options.services = {&service};
  options.max_message_bytes = bulk::kMaxMessageBytes;
  options.arguments = bulk::BulkArguments();
  auto server = GrpcServer::Start(options);
  const std::string port = server.ok() ? absl::StrCat((*server)->port(), "\n") : "0\n";
  if (write(out, port.data(), port.size()) < 0) _exit(1);
  char end;
  while (read(in, &end, 1) > 0) {
  }
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  std::_Exit(0);
}

// A process that takes TCP blocks in for as long as the parent lives.
[[noreturn]] void Sink(int listener) {
  std::vector<char> buffer(kBlock);
  while (true) {
    const int fd = accept(listener, nullptr, nullptr);
    if (fd < 0) std::_Exit(0);
    while (recv(fd, buffer.data(), buffer.size(), 0) > 0) {
    }
    const char done = 1;
    if (send(fd, &done, 1, MSG_NOSIGNAL) < 0) std::_Exit(1);
    close(fd);
  }
}

// --- the rank's process ----------------------------------------------------------------------

class Rates {
 public:
  void Add(double bytes, double seconds, double cpu_seconds = 0) {
    rates_.Add(bytes / seconds);
    costs_.push_back(cpu_seconds / bytes);
  }
  // Processor seconds a GB, both processes together.
  double Cost() const { return bench::Median(costs_) * 1e9; }
  double Median() const { return rates_.Median(); }
  bool empty() const { return rates_.empty(); }
  std::string Text() const { return rates_.TextInGigabytes(); }

 private:
  bench::Rates rates_;
  std::vector<double> costs_;
};

absl::StatusOr<double> TcpSeconds(const sockaddr_in& address, const std::vector<char>& data,
                                  int64_t bytes) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError("no TCP connection on loopback");
  }
  const double begun = Now();
  size_t at = 0;
  for (int64_t sent = 0; sent < bytes;) {
    const ssize_t n = send(fd, data.data() + at, kBlock, MSG_NOSIGNAL);
    if (n <= 0) return absl::UnavailableError("the TCP connection broke");
    sent += n;
    at = (at + kBlock) % (data.size() - kBlock);
  }
  shutdown(fd, SHUT_WR);
  char done;
  if (recv(fd, &done, 1, 0) != 1) return absl::UnavailableError("the TCP connection broke");
  const double seconds = Now() - begun;
  close(fd);
  return seconds;
}

// One stream, receiving as zeroshard's store does; bytes a second, 0 where there is no iperf3.
double Iperf() {
  if (std::system("iperf3 --version >/dev/null 2>&1") != 0) return 0;
  const int port = 20000 + getpid() % 20000;
  FILE* pipe = popen(absl::StrCat("iperf3 -s -1 -p ", port, " >/dev/null 2>&1 & sleep 0.3; ",
                                  "iperf3 -c 127.0.0.1 -p ", port,
                                  " -l 1M -t 3 -f k 2>/dev/null | ", "awk '/receiver/ {print $7}'")
                         .c_str(),
                     "r");
  if (pipe == nullptr) return 0;
  char text[64] = "";
  const bool got = fgets(text, sizeof(text), pipe) != nullptr;
  pclose(pipe);
  double kilobits = 0;
  if (!got || !absl::SimpleAtod(absl::StripAsciiWhitespace(text), &kilobits)) return 0;
  return kilobits * 1000 / 8;
}

absl::StatusOr<std::unique_ptr<StoreClient>> Connect(int port, bool shared_memory) {
  StoreClientOptions options;
  options.fence.set_run_id("bench-1");
  options.fence.set_generation(1);
  auto* store = options.map.add_stores();
  store->set_member("store-0");
  store->set_address(absl::StrCat("127.0.0.1:", port));
  options.map.set_replicas(1);
  options.base.set_epoch(1);
  options.dtype = DType::kBF16;
  options.chunks.first = {0, kChunks};
  for (int c = 0; c < kChunks; ++c) {
    options.chunks.chunks.push_back({0, c * kChunkElements, (c + 1) * kChunkElements, true});
    options.map.add_placement(0);
  }
  options.shared_memory = shared_memory;
  options.most_pushed = options.most_pulled = int64_t{1} << 40;
  return StoreClient::Open(std::move(options));
}

// What one kind of transfer reached.
struct Transfers {
  explicit Transfers(const char* of) : name(of) {}
  const char* const name;
  std::unique_ptr<StoreClient> client;
  Rates push, pull;
  uint64_t step = 0;
};

// What memcpy does, with as many bytes.
double MemcpySeconds(const std::vector<char>& from, std::vector<char>* to, int times) {
  const double begun = Now();
  for (int i = 0; i < times; ++i) {
    for (size_t at = 0; at < from.size(); at += kBlock) {
      std::memcpy(to->data() + at, from.data() + at, kBlock);
    }
  }
  return Now() - begun;
}

// Seconds.
absl::StatusOr<double> Wait(const std::vector<Event>& events, double begun) {
  for (const Event& event : events) ZS_RETURN_IF_ERROR(event.Wait());
  return Now() - begun;
}

absl::Status RunTransfers(Transfers* transfers, const std::vector<char>& gradients,
                          std::vector<char>* parameters, int times, pid_t server, bool counts) {
  const auto bytes = static_cast<double>(times) * kElements * 2;
  const auto used = [&] { return CpuSeconds(getpid()) + CpuSeconds(server); };
  std::vector<Event> events;
  double before = used();
  double begun = Now();
  for (int i = 0; i < times; ++i) {
    events.push_back(transfers->client->Push(++transfers->step, 0, 0, kElements, gradients.data()));
  }
  ZS_ASSIGN_OR_RETURN(const double push_seconds, Wait(events, begun));
  const double push_cpu = used() - before;
  events.clear();
  std::fill(parameters->begin(), parameters->end(), 4);
  before = used();
  begun = Now();
  for (int i = 0; i < times; ++i) {
    events.push_back(transfers->client->Pull(transfers->step, 0, 0, kElements, parameters->data()));
  }
  ZS_ASSIGN_OR_RETURN(const double pull_seconds, Wait(events, begun));
  const double pull_cpu = used() - before;
  if (std::any_of(parameters->begin(), parameters->end(), [](char value) { return value != 2; })) {
    return absl::DataLossError("what was pulled is not what the store has");
  }
  if (!counts) return absl::OkStatus();
  transfers->push.Add(bytes, push_seconds, push_cpu);
  transfers->pull.Add(bytes, pull_seconds, pull_cpu);
  return absl::OkStatus();
}

void Print(const Transfers& transfers, const Rates& limit, const char* limit_name,
           const Rates* second, const char* second_name) {
  for (const auto& [name, rate] :
       {std::pair<const char*, const Rates&>{"push", transfers.push}, {"pull", transfers.pull}}) {
    std::printf("%s over %-13s %s  %.0f %% of %s", name, transfers.name, rate.Text().c_str(),
                100 * rate.Median() / limit.Median(), limit_name);
    if (second != nullptr) {
      std::printf(", %.0f %% of %s", 100 * rate.Median() / second->Median(), second_name);
    }
    std::printf(", %.2f core seconds a GB\n", rate.Cost());
  }
}

absl::Status Run(const Options& options, int port, const sockaddr_in& tcp, pid_t server,
                 pid_t sink) {
  Transfers grpc("gRPC"), memory("shared memory");
  ZS_ASSIGN_OR_RETURN(grpc.client, Connect(port, false));
  ZS_ASSIGN_OR_RETURN(memory.client, Connect(port, true));
  const std::vector<char> gradients(kElements * 2, 3);
  std::vector<char> parameters(kElements * 2, 4);
  const int times = std::max(1, options.megabytes / static_cast<int>(kElements * 2 >> 20));
  const auto bytes = static_cast<double>(times) * kElements * 2;
  Rates tcp_rate, memcpy_rate, crc_rate, iperf_rate;
  const auto used = [&] { return CpuSeconds(getpid()) + CpuSeconds(sink); };
  for (int round = 0; round <= options.rounds; ++round) {
    const bool counts = round > 0;  // the first one touches memory and opens windows
    const double before = used();
    ZS_ASSIGN_OR_RETURN(const double tcp_seconds,
                        TcpSeconds(tcp, gradients, static_cast<int64_t>(bytes)));
    const double tcp_cpu = used() - before;
    ZS_RETURN_IF_ERROR(RunTransfers(&grpc, gradients, &parameters, times, server, counts));
    const double iperf = options.iperf ? Iperf() : 0;
    ZS_RETURN_IF_ERROR(RunTransfers(&memory, gradients, &parameters, times, server, counts));
    const double memcpy_before = CpuSeconds(getpid());
    const double memcpy_seconds = MemcpySeconds(gradients, &parameters, times);
    const double memcpy_cpu = CpuSeconds(getpid()) - memcpy_before;
    const double begun = Now();
    uint32_t crc = 0;
    for (int64_t at = 0; at < kElements * 2; at += kBlock) {
      crc ^= Crc32c(gradients.data() + at, kBlock);
    }
    const double crc_seconds = (Now() - begun) + (crc == 1 ? 1e-12 : 0);
    if (!counts) continue;
    tcp_rate.Add(bytes, tcp_seconds, tcp_cpu);
    memcpy_rate.Add(bytes, memcpy_seconds, memcpy_cpu);
    crc_rate.Add(kElements * 2, crc_seconds);
    if (iperf > 0) iperf_rate.Add(iperf, 1);
  }
  std::printf("%.0f MB a turn, medians of %d rounds (least to most)\n", bytes / 1e6,
              options.rounds);
  std::printf("tcp                     %s  %.2f core seconds a GB\n", tcp_rate.Text().c_str(),
              tcp_rate.Cost());
  if (!iperf_rate.empty()) {
    std::printf("iperf3                  %s  one stream, -l 1M\n", iperf_rate.Text().c_str());
  }
  Print(grpc, tcp_rate, "tcp", iperf_rate.empty() ? nullptr : &iperf_rate, "iperf3");
  std::printf("memcpy                  %s  one thread, blocks of 1 MiB, %.2f core seconds a GB\n",
              memcpy_rate.Text().c_str(), memcpy_rate.Cost());
  Print(memory, memcpy_rate, "memcpy", nullptr, nullptr);
  std::printf("crc                     %s  of each side's time when pushing over gRPC: %.0f %%\n",
              crc_rate.Text().c_str(), 100 * grpc.push.Median() / crc_rate.Median());
  return absl::OkStatus();
}

int Main(const Options& options) {
  bulk::KeepReceiveMemory();
  // Before gRPC has threads.
  int port_pipe[2], end_pipe[2];
  if (pipe(port_pipe) != 0 || pipe(end_pipe) != 0) return 1;
  const pid_t server = fork();
  if (server == 0) {
    close(end_pipe[1]);
    Serve(port_pipe[1], end_pipe[0]);
  }
  close(port_pipe[1]);
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener, 4) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    std::fprintf(stderr, "bulk_bench: cannot listen on loopback\n");
    return 1;
  }
  const pid_t sink = fork();
  if (sink == 0) {
    close(end_pipe[1]);
    Sink(listener);
  }
  char text[16] = "";
  int port = 0;
  if (read(port_pipe[0], text, sizeof(text) - 1) <= 0 ||
      !absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &port) || port == 0) {
    std::fprintf(stderr, "bulk_bench: the store's side did not start\n");
    return 1;
  }
  const absl::Status status = Run(options, port, address, server, sink);
  close(end_pipe[1]);
  kill(sink, SIGKILL);
  waitpid(sink, nullptr, 0);
  waitpid(server, nullptr, 0);
  if (status.ok()) return 0;
  std::fprintf(stderr, "bulk_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) {
  zeroshard::Options options;
  CLI::App app("Gradients and parameters between two processes of one host, against its limits");
  app.add_option("--mb", options.megabytes, "MiB in each turn")->check(CLI::Range(256, 1 << 20));
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 1000));
  app.add_flag("!--no-iperf", options.iperf, "Without iperf3");
  CLI11_PARSE(app, argc, argv);
  return zeroshard::Main(options);
}
