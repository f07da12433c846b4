#include "worker/device/host_event.h"

#include <algorithm>

namespace zeroshard {
namespace {

class JoinedEvent : public Event::State {
 public:
  explicit JoinedEvent(std::vector<Event> events) : events_(std::move(events)) {}
  bool Done() const override {
    return std::all_of(events_.begin(), events_.end(), [](const Event& e) { return e.Done(); });
  }
  absl::Status Wait() override {
    absl::Status first;
    for (const Event& event : events_) first.Update(event.Wait());
    return first;
  }

 private:
  const std::vector<Event> events_;
};

}  // namespace

Event DoneEvent(absl::Status status) {
  if (status.ok()) return Event();
  auto state = std::make_shared<HostEvent>();
  state->Finish(std::move(status));
  return Event(std::move(state));
}

Event AllOf(std::vector<Event> events) {
  std::erase_if(events, [](const Event& event) { return event.state() == nullptr; });
  if (events.empty()) return Event();
  if (events.size() == 1) return events[0];
  return Event(std::make_shared<JoinedEvent>(std::move(events)));
}

}  // namespace zeroshard
