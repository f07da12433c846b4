// Listens and accepts for a gRPC server, which gets the connections that the gate lets in.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/net_address.h"
#include "common/security/connection_gate.h"

namespace zeroshard::security {

// Thread-safe.
class Listener {
 public:
  // Takes over `fd`, a connection that does not block, which came to `listening`.
  using Take = std::function<void(int listening, int fd)>;

  // Binds every address that the host has, all to one port; port 0 takes a free one. Nothing is
  // accepted before Serve. UNAVAILABLE: a port is taken; INVALID_ARGUMENT: not an address of ours.
  // Both say `what` was to be listened for.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const HostPort& address,
                                                        const ConnectionGate::Most& most,
                                                        absl::string_view what);
  ~Listener();

  int port() const { return port_; }
  void Serve(Take take);
  // Accepts nothing any more, and listens no longer. Nothing is handed to `take` afterwards.
  void Stop();

 private:
  explicit Listener(const ConnectionGate::Most& most);

  void Loop();
  // False: nobody waits there any more, or files have run out.
  bool AcceptOne(int listening);

  int port_ = 0;
  std::vector<int> listening_;
  int wake_ = -1;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> out_of_files_{false};
  Take take_;
  ConnectionGate gate_;                                    // of the accepting thread
  absl::Duration complained_ = -absl::InfiniteDuration();  // likewise
  std::thread thread_;
};

// What this process may open, raised to what the system lets it; and what of that is for
// connections.
size_t RaiseFileLimit();

}  // namespace zeroshard::security
