#include "worker/comm/mesh.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <exception>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gloo/transport/address.h"
#include "gloo/transport/pair.h"
#include "gloo/transport/tcp/device.h"
#include "worker/comm/listen_address.h"

namespace zeroshard {

namespace {

struct Greeting {
  uint64_t nonce = 0;
  int32_t rank = -1;
  int32_t size = 0;
};

std::string RankList(const std::set<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

std::string Key(int rank) { return absl::StrCat("gloo/", rank); }

std::chrono::milliseconds Millis(absl::Duration duration) {
  return std::chrono::milliseconds(
      std::clamp<int64_t>(absl::ToInt64Milliseconds(duration), 1, int64_t{24} * 3600 * 1000));
}

}  // namespace

Mesh::Mesh(const CommunicatorOptions& options)
    : rank_(options.rank),
      size_(options.size),
      host_(options.host),
      connect_timeout_(options.connect_timeout),
      peer_addresses_(options.size),
      peer_nonces_(options.size),
      farewells_(options.size),
      farewell_buffers_(options.size),
      cancelled_(options.cancelled) {}

Mesh::~Mesh() {
  Close(absl::OkStatus());
  {
    absl::MutexLock lock(&mutex_);
    stop_watcher_ = true;
    wake_watcher_.Signal();
  }
  if (watcher_.joinable()) watcher_.join();
}

absl::StatusOr<std::unique_ptr<Mesh>> Mesh::Connect(const CommunicatorOptions& options,
                                                    Rendezvous* rendezvous) {
  // The transport writes to sockets whose other end may be gone.
  std::signal(SIGPIPE, SIG_IGN);
  std::unique_ptr<Mesh> mesh(new Mesh(options));
  const auto deadline = Clock::now() + Millis(options.connect_timeout);
  absl::Status status = mesh->CreatePairs();
  if (status.ok()) status = mesh->ExchangeAddresses(rendezvous, deadline);
  if (status.ok()) {
    mesh->watcher_ = std::thread([m = mesh.get()] { m->Watch(); });
    mesh->Begin(absl::FromChrono(deadline - Clock::now()));
    status = mesh->ConnectPairs();
    if (status.ok()) status = mesh->PostGuards();
    if (status.ok()) status = mesh->Greet();
    mesh->End();
  }
  {
    absl::MutexLock lock(&mesh->mutex_);
    mesh->cancelled_ = nullptr;
    mesh->presence_ = options.presence;
    // The watcher may have noticed it when all were there already.
    if (status.ok()) status = mesh->interrupt_;
  }
  if (status.ok()) return mesh;
  mesh->Close(status);
  return absl::Status(status.code(),
                      absl::StrCat("rank ", options.rank, " of ", options.size,
                                   " could not join the collectives: ", status.message()));
}

absl::Status Mesh::CreatePairs() {
  absl::StatusOr<std::string> address = ResolveListenAddress(host_);
  if (!address.ok()) return address.status();
  std::random_device random;
  nonce_ = (uint64_t{random()} << 32) | random();
  try {
    gloo::transport::tcp::attr attr;
    attr.hostname = *address;
    device_ = gloo::transport::tcp::CreateDevice(attr);
    context_ = device_->createContext(rank_, size_);
    context_->setTimeout(Millis(connect_timeout_));
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) context_->createPair(peer);
    }
  } catch (const std::exception& e) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", *address, " for collectives: ", e.what()));
  }
  return absl::OkStatus();
}

// The value under a rank's key, in hexadecimal: its nonce (8 bytes), then for each rank in order,
// its own place zeroed, the address on which it awaits that rank, as the transport lays it out.
absl::Status Mesh::ExchangeAddresses(Rendezvous* rendezvous, Clock::time_point deadline) {
  const int some_peer = rank_ == 0 ? 1 : 0;
  const size_t address_bytes = context_->getPair(some_peer)->address().bytes().size();
  std::string value(reinterpret_cast<const char*>(&nonce_), sizeof(nonce_));
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) {
      value.append(address_bytes, '\0');
      continue;
    }
    const std::vector<char> bytes = context_->getPair(peer)->address().bytes();
    value.append(bytes.begin(), bytes.end());
  }
  if (absl::Status put = rendezvous->Put(Key(rank_), absl::BytesToHexString(value)); !put.ok()) {
    return put;
  }

  std::set<int> missing;
  absl::Status last;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const absl::Duration left =
        std::max(absl::ZeroDuration(), absl::FromChrono(deadline - Clock::now()));
    absl::StatusOr<std::string> got = rendezvous->Get(Key(peer), left);
    if (!got.ok()) {
      if (!absl::IsDeadlineExceeded(got.status())) return got.status();
      missing.insert(peer);
      last = got.status();
      continue;
    }
    const std::string bytes = absl::HexStringToBytes(*got);
    if (bytes.size() != value.size()) {
      return absl::FailedPreconditionError(
          absl::StrCat("the address of rank ", peer, " (rendezvous key \"", Key(peer), "\") has ",
                       bytes.size(), " bytes, expected ", value.size(),
                       "; do all workers run the same build and the same world size?"));
    }
    std::memcpy(&peer_nonces_[peer], bytes.data(), sizeof(uint64_t));
    const char* at = bytes.data() + sizeof(uint64_t) + rank_ * address_bytes;
    peer_addresses_[peer].assign(at, at + address_bytes);
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(RankList(missing), " did not come within ",
                                                  absl::FormatDuration(connect_timeout_), " (",
                                                  last.message(), ")"));
}

absl::Status Mesh::ConnectVerdict(int peer, const std::string& error) {
  if (!interrupt_.ok()) return interrupt_;
  if (expired_) {
    return absl::DeadlineExceededError(absl::StrCat("rank ", peer, " did not connect within ",
                                                    absl::FormatDuration(connect_timeout_)));
  }
  if (error.empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("rank ", peer, " gave its address but cannot be reached: ", error));
}

absl::Status Mesh::ConnectPairs() {
  absl::Status status;
  {
    // The watcher closes the connections once, and only from now on.
    absl::MutexLock lock(&mutex_);
    connecting_ = true;
    status = ConnectVerdict(rank_ == 0 ? 1 : 0, "");
  }
  for (int peer = 0; peer < size_ && status.ok(); ++peer) {
    if (peer == rank_) continue;
    std::string error;
    try {
      context_->getPair(peer)->connect(peer_addresses_[peer]);
    } catch (const std::exception& e) {
      error = e.what();
    }
    absl::MutexLock lock(&mutex_);
    status = ConnectVerdict(peer, error);
  }
  absl::MutexLock lock(&mutex_);
  connecting_ = false;
  return status;
}

absl::Status Mesh::PostGuards() {
  own_farewell_buffers_.resize(size_);
  std::vector<std::unique_ptr<MessageBuffer>> alive(size_);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    auto guard = Wrap(&alive_byte_, 1);
    if (!guard.ok()) return guard.status();
    alive[peer] = *std::move(guard);
    auto own = Wrap(&own_farewell_, sizeof(Farewell));
    if (!own.ok()) return own.status();
    own_farewell_buffers_[peer] = *std::move(own);
    auto farewell = Wrap(&farewells_[peer], sizeof(Farewell));
    if (!farewell.ok()) return farewell.status();
    farewell_buffers_[peer] = *std::move(farewell);
    absl::Status status = PostReceive(*alive[peer], peer, kAliveSlot, 0, 1);
    if (status.ok()) {
      status = PostReceive(*farewell_buffers_[peer], peer, kFarewellSlot, 0, sizeof(Farewell));
    }
    if (!status.ok()) return status;
  }
  absl::MutexLock lock(&mutex_);
  alive_ = std::move(alive);
  return absl::OkStatus();
}

// A connection that the kernel accepted proves nothing: the peer may have died since, or be
// somebody else on a port used before.
absl::Status Mesh::Greet() {
  Greeting own{nonce_, rank_, size_};
  std::vector<Greeting> greetings(size_);
  std::vector<std::unique_ptr<MessageBuffer>> buffers;
  std::vector<Await> awaits;
  for (bool receive : {true, false}) {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      auto buffer = Wrap(receive ? &greetings[peer] : &own, sizeof(Greeting));
      if (!buffer.ok()) return buffer.status();
      buffers.push_back(*std::move(buffer));
      MessageBuffer& message = *buffers.back();
      absl::Status status = receive ? PostReceive(message, peer, kGreetingSlot, 0, sizeof(Greeting))
                                    : PostSend(message, peer, kGreetingSlot, 0, sizeof(Greeting));
      if (!status.ok()) return status;
      awaits.push_back({&message, peer, receive, 1});
    }
  }
  if (absl::Status status = AwaitAll(absl::MakeSpan(awaits)); !status.ok()) return status;
  for (int peer = 0; peer < size_; ++peer) {
    const Greeting& greeting = greetings[peer];
    if (peer != rank_ &&
        (greeting.nonce != peer_nonces_[peer] || greeting.rank != peer || greeting.size != size_)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "whoever answered for rank ", peer, " says to be rank ", greeting.rank, " of ",
          greeting.size, " and is not the process that published that address"));
    }
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
