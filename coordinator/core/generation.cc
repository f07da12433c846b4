#include "coordinator/core/generation.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {

Generation::Generation(const CoreOptions& options, std::string run_id, uint64_t number,
                       uint32_t world)
    : options_(options), run_id_(std::move(run_id)), number_(number), world_(world) {}

void Generation::Restore(std::map<std::string, std::string> keys,
                         const std::vector<std::string>& barriers) {
  keys_ = std::move(keys);
  key_bytes_ = 0;
  for (const auto& [key, value] : keys_) key_bytes_ += key.size() + value.size();
  for (const std::string& name : barriers) Remember(name);
}

void Generation::Put(RequestId request, const std::string& key, const std::string& value,
                     Decision* out) {
  const auto refuse = [&](absl::Status status) {
    out->actions.push_back(Reply{request, std::move(status), "", 0});
  };
  if (key.empty() || key.size() > options_.max_key_bytes) {
    return refuse(
        absl::InvalidArgumentError(absl::StrCat("rendezvous key ", Quoted(key), " has ", key.size(),
                                                " bytes; wanted 1 to ", options_.max_key_bytes)));
  }
  if (value.size() > options_.max_value_bytes) {
    return refuse(absl::InvalidArgumentError(
        absl::StrCat("the value of rendezvous key ", Quoted(key), " has ", value.size(),
                     " bytes; wanted at most ", options_.max_value_bytes)));
  }
  if (const auto found = keys_.find(key); found != keys_.end()) {
    if (found->second == value) return refuse(absl::OkStatus());
    return refuse(absl::AlreadyExistsError(
        absl::StrCat("rendezvous key ", Quoted(key), " of ", run_id_, " generation ", number_,
                     " has another value already; keys are written once a generation")));
  }
  const size_t most_keys = options_.max_keys_per_rank * world_;
  if (keys_.size() >= most_keys ||
      key_bytes_ + key.size() + value.size() > options_.max_key_bytes_per_generation) {
    return refuse(absl::ResourceExhaustedError(
        absl::StrCat(run_id_, " generation ", number_, " holds ", keys_.size(),
                     " rendezvous keys and ", key_bytes_, " bytes; the most are ", most_keys,
                     " keys and ", options_.max_key_bytes_per_generation, " bytes")));
  }
  keys_[key] = value;
  key_bytes_ += key.size() + value.size();
  out->records.push_back(KeyRecord{run_id_, number_, key, value});
  refuse(absl::OkStatus());
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (it->second.key == key) {
      out->actions.push_back(Reply{it->first, absl::OkStatus(), value, 0});
      it = waiting_.erase(it);
    } else {
      ++it;
    }
  }
}

void Generation::Get(RequestId request, uint32_t rank, const std::string& key,
                     absl::Duration deadline, Decision* out) {
  if (key.empty() || key.size() > options_.max_key_bytes) {
    out->actions.push_back(Reply{
        request,
        absl::InvalidArgumentError(absl::StrCat("rendezvous key ", Quoted(key), " has ", key.size(),
                                                " bytes; wanted 1 to ", options_.max_key_bytes)),
        "", 0});
    return;
  }
  if (const auto found = keys_.find(key); found != keys_.end()) {
    out->actions.push_back(Reply{request, absl::OkStatus(), found->second, 0});
    return;
  }
  if (TooManyWait(request, rank, out)) return;
  waiting_[request] = Waiting{rank, deadline, key, ""};
}

bool Generation::Arrive(RequestId request, uint32_t rank, const std::string& name,
                        absl::Duration now, absl::Duration deadline, Decision* out,
                        absl::Duration* took) {
  if (name.empty() || name.size() > options_.max_key_bytes) {
    out->actions.push_back(Reply{
        request,
        absl::InvalidArgumentError(absl::StrCat("barrier name ", Quoted(name), " has ", name.size(),
                                                " bytes; wanted 1 to ", options_.max_key_bytes)),
        "", 0});
    return false;
  }
  if (complete_.contains(name)) {
    out->actions.push_back(Reply{request, absl::OkStatus(), "", 0});
    return false;
  }
  auto found = barriers_.find(name);
  if (found == barriers_.end()) {
    if (barriers_.size() >= options_.max_barriers) {
      out->actions.push_back(Reply{
          request,
          absl::ResourceExhaustedError(absl::StrCat(run_id_, " generation ", number_, " waits at ",
                                                    barriers_.size(),
                                                    " barriers already, the most that are kept")),
          "", 0});
      return false;
    }
    found = barriers_.emplace(name, Barrier{{}, now}).first;
  }
  Barrier& barrier = found->second;
  if (barrier.arrived.size() + 1 < world_ || barrier.arrived.contains(rank)) {
    if (TooManyWait(request, rank, out)) return false;
  }
  barrier.arrived.insert(rank);
  waiting_[request] = Waiting{rank, deadline, "", name};
  if (barrier.arrived.size() < world_) return false;

  *took = now - barrier.first_arrival;
  barriers_.erase(found);
  Remember(name);
  out->records.push_back(BarrierRecord{run_id_, number_, name});
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (it->second.barrier == name) {
      out->actions.push_back(Reply{it->first, absl::OkStatus(), "", 0});
      it = waiting_.erase(it);
    } else {
      ++it;
    }
  }
  return true;
}

void Generation::Expire(absl::Duration now, const std::function<std::string(uint32_t)>& describe,
                        Decision* out) {
  std::map<std::string, std::string> texts;  // by barrier: a thousand ranks may wait at one
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const Waiting& waiting = it->second;
    if (waiting.deadline > now) {
      ++it;
      continue;
    }
    std::string message;
    if (!waiting.barrier.empty()) {
      std::string& text = texts[waiting.barrier];
      if (text.empty()) {
        const std::vector<std::string> missing = Missing(waiting.barrier, describe);
        text = absl::StrCat("barrier ", Quoted(waiting.barrier), " of ", run_id_, " generation ",
                            number_, ": ", missing.size(), " of ", world_,
                            " ranks had not arrived: ", AtMostThree(missing));
      }
      message = text;
    } else {
      message = absl::StrCat("rendezvous key ", Quoted(waiting.key), " of ", run_id_,
                             " generation ", number_, " was not put in time");
    }
    out->actions.push_back(Reply{it->first, absl::DeadlineExceededError(message), "", 0});
    it = waiting_.erase(it);
  }
}

void Generation::Drop(RequestId request) { waiting_.erase(request); }

void Generation::Close(const absl::Status& status, Decision* out) {
  for (const auto& [request, waiting] : waiting_) {
    out->actions.push_back(Reply{request, status, "", 0});
  }
  waiting_.clear();
  barriers_.clear();
}

size_t Generation::MostMissing() const {
  size_t most = 0;
  for (const auto& [name, barrier] : barriers_) {
    most = std::max(most, world_ - barrier.arrived.size());
  }
  return most;
}

std::vector<std::string> Generation::Missing(
    const std::string& name, const std::function<std::string(uint32_t)>& describe) const {
  std::vector<std::string> missing;
  const auto found = barriers_.find(name);
  if (complete_.contains(name)) return missing;
  for (uint32_t rank = 0; rank < world_; ++rank) {
    if (found == barriers_.end() || !found->second.arrived.contains(rank)) {
      missing.push_back(describe(rank));
    }
  }
  return missing;
}

bool Generation::TooManyWait(RequestId request, uint32_t rank, Decision* out) const {
  const auto same = [&](const auto& entry) { return entry.second.rank == rank; };
  if (waiting_.size() < options_.max_waiting_per_rank ||
      std::count_if(waiting_.begin(), waiting_.end(), same) <
          static_cast<ptrdiff_t>(options_.max_waiting_per_rank)) {
    return false;
  }
  out->actions.push_back(Reply{request,
                               absl::ResourceExhaustedError(absl::StrCat(
                                   "rank ", rank, " of ", run_id_, " has ",
                                   options_.max_waiting_per_rank, " calls waiting already")),
                               "", 0});
  return true;
}

void Generation::Remember(const std::string& barrier) {
  if (!complete_.insert(barrier).second) return;
  complete_order_.push_back(barrier);
  if (complete_order_.size() > options_.max_barriers) {
    complete_.erase(complete_order_.front());
    complete_order_.pop_front();
  }
}

}  // namespace zeroshard::coordinator
