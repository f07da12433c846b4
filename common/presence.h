// How much of a wait counts against its deadline where the coordinator decides how it goes on:
// while the coordinator is away a job pauses, and nobody is to blame for it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace zeroshard {

// Whether the coordinator is there, as one member hears it. Told by one thread at a time; any
// thread may ask, with whatever locks held.
class Presence {
 public:
  using Clock = std::chrono::steady_clock;

  // `settle`: what the other members need to find a coordinator that has returned, and that does
  // not count either.
  explicit Presence(Clock::duration settle = std::chrono::seconds(5)) : settle_(settle) {}

  // The coordinator said something. Where it had been silent for longer than `most_silence`, or
  // lost, it has just returned.
  void Heard(Clock::time_point now, Clock::duration most_silence) {
    const Clock::time_point last(Clock::duration(heard_.load()));
    if (lost_ || now - last > most_silence) since_ = (now + settle_).time_since_epoch().count();
    lost_ = false;
    heard_ = now.time_since_epoch().count();  // after since_, for those who ask meanwhile
  }
  // The connection to it is gone.
  void Lost() { lost_ = true; }

  // Of a wait that began at `start`, the time that the coordinator is known to have been there:
  // from its last return on, up to its last word. A wait that outlasts its return begins anew.
  Clock::duration Counted(Clock::time_point start) const {
    const Clock::rep heard = heard_;
    const Clock::rep since = std::max<Clock::rep>(since_, start.time_since_epoch().count());
    return Clock::duration(std::max<Clock::rep>(0, heard - since));
  }

 private:
  const Clock::duration settle_;
  bool lost_ = true;
  std::atomic<Clock::rep> since_{0}, heard_{0};
};

// The same without a coordinator, where all time counts.
inline Presence::Clock::duration Counted(const Presence* presence,
                                         Presence::Clock::time_point start) {
  return presence != nullptr ? presence->Counted(start) : Presence::Clock::now() - start;
}

}  // namespace zeroshard
