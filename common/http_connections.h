// Which connections of an HTTP server are open, and by when each must have moved on: libmicrohttpd
// knows only how long one was silent, so a client that sends a byte now and then would stay.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

namespace zeroshard {

// Thread-safe. A connection that is late is shut down, which ends it wherever it is read or
// written.
class HttpConnections {
 public:
  using Clock = std::chrono::steady_clock;

  HttpConnections();
  ~HttpConnections();

  // The socket is open until Remove returned, and must have moved on `within` that time.
  void Expect(int socket, std::chrono::milliseconds within);
  // It may take as long as it likes; what it waits for has a deadline of its own.
  void Release(int socket);
  void Remove(int socket);

 private:
  void Main();

  std::mutex mutex_;
  std::condition_variable closing_changed_;
  std::map<int, Clock::time_point> due_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace zeroshard
