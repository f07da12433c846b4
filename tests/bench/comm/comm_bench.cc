// Collectives between processes of this machine, beside what plain TCP over loopback takes to move
// the same bytes in the same run: comm_bench [ranks] [elements] [rounds]
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/comm/file_rendezvous.h"
#include "worker/comm/gloo_communicator.h"

namespace zeroshard {
namespace {

double SecondsOf(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Must(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "comm_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

struct Median {
  double median, best;
};

Median Measure(Communicator& comm, int rounds, const std::function<void()>& body) {
  std::vector<double> seconds;
  for (int i = 0; i < rounds + 2; ++i) {
    Must(comm.Barrier({}).Wait());
    const double s = SecondsOf(body);
    if (i >= 2) seconds.push_back(s);
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front()};
}

void Report(int rank, const char* name, const Median& m, double bytes_sent) {
  if (rank != 0) return;
  std::printf("%-28s %9.3f ms median %9.3f ms best %8.2f GB/s sent\n", name, 1e3 * m.median,
              1e3 * m.best, 1e-9 * bytes_sent / m.median);
  std::fflush(stdout);
}

// A connected pair of loopback sockets, one end for each of ranks 0 and 1.
void TcpPair(int fds[2]) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener, 1) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    Must(absl::UnavailableError("no loopback"));
  }
  fds[0] = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(fds[0], reinterpret_cast<sockaddr*>(&address), length) != 0) {
    Must(absl::UnavailableError("no loopback connection"));
  }
  fds[1] = accept(listener, nullptr, nullptr);
  close(listener);
}

// Both directions at once, as a reduce-scatter of two ranks has them.
void Exchange(int fd, std::vector<char>& out, std::vector<char>& in) {
  std::thread sender([&] {
    for (size_t done = 0; done < out.size();) {
      const ssize_t n = send(fd, out.data() + done, out.size() - done, 0);
      if (n <= 0) Must(absl::UnavailableError("send failed"));
      done += n;
    }
  });
  for (size_t done = 0; done < in.size();) {
    const ssize_t n = recv(fd, in.data() + done, in.size() - done, 0);
    if (n <= 0) Must(absl::UnavailableError("recv failed"));
    done += n;
  }
  sender.join();
}

void RunRank(int rank, int size, int64_t elements, int rounds, const std::string& folder, int fd) {
  FileRendezvous rendezvous(folder);
  auto device = MakeCpuDevice();
  auto made = MakeGlooCommunicator(CommunicatorOptions{.rank = rank,
                                                       .size = size,
                                                       .host = "127.0.0.1",
                                                       .connect_timeout = absl::Seconds(20),
                                                       .operation_timeout = absl::Seconds(60)},
                                   &rendezvous, device.get());
  Must(made.status());
  Communicator& comm = **made;
  const int64_t part = elements / size;
  std::vector<uint16_t> bf16(part * size, 0x3f80);
  std::vector<float> fp32(part * size, 1.0f), sum(part);
  std::vector<uint16_t> sum16(part);
  const double sent = static_cast<double>(part * (size - 1));

  if (fd >= 0) {
    std::vector<char> out(part * 2), in(part * 2);
    Report(rank, "raw TCP, bf16 bytes", Measure(comm, rounds, [&] { Exchange(fd, out, in); }),
           part * 2.0);
  }
  ReduceScatterArgs args;
  args.counts.assign(size, part);
  args.contributors = size;
  args.input = bf16.data();
  args.type = args.output_type = DType::kBF16;
  args.output = sum16.data();
  Report(rank, "reduce_scatter bf16 -> bf16",
         Measure(comm, rounds, [&] { Must(comm.ReduceScatter(args, {}).Wait()); }), 2 * sent);
  args.output = sum.data();
  args.output_type = DType::kF32;
  args.accumulate = true;
  Report(rank, "reduce_scatter bf16 += fp32",
         Measure(comm, rounds, [&] { Must(comm.ReduceScatter(args, {}).Wait()); }), 2 * sent);
  args.input = fp32.data();
  args.type = DType::kF32;
  Report(rank, "reduce_scatter fp32",
         Measure(comm, rounds, [&] { Must(comm.ReduceScatter(args, {}).Wait()); }), 4 * sent);
  Report(rank, "all_gather bf16",
         Measure(comm, rounds,
                 [&] { Must(comm.AllGather(bf16.data(), part, DType::kBF16, {}).Wait()); }),
         2 * sent);
  Report(rank, "all_reduce fp32",
         Measure(comm, rounds,
                 [&] { Must(comm.AllReduce(fp32.data(), part * size, DType::kF32, {}).Wait()); }),
         8 * sent);
  Report(rank, "all_reduce of 16 fp32",
         Measure(comm, 20 * rounds,
                 [&] { Must(comm.AllReduce(fp32.data(), 16, DType::kF32, {}).Wait()); }),
         64.0 * (size - 1));
  Report(rank, "barrier", Measure(comm, 20 * rounds, [&] { Must(comm.Barrier({}).Wait()); }), 0);
  Must(comm.Barrier({}).Wait());
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 2;
  const int64_t elements = argc > 2 ? std::atoll(argv[2]) : 7'000'000;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 30;
  if (size < 2 || elements < size || rounds < 1) {
    std::fprintf(stderr, "comm_bench [ranks >= 2] [elements] [rounds]\n");
    return 2;
  }
  const std::string folder =
      std::filesystem::temp_directory_path() / ("comm_bench_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  int fds[2] = {-1, -1};
  zeroshard::TcpPair(fds);
  std::printf("%d processes, %lld elements\n", size, static_cast<long long>(elements));
  std::fflush(stdout);
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      zeroshard::RunRank(rank, size, elements, rounds, folder, size == 2 ? fds[rank] : -1);
      std::exit(0);
    }
    children.push_back(pid);
  }
  int failed = 0;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) failed = 1;
  }
  std::filesystem::remove_all(folder);
  return failed;
}
