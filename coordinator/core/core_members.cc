// Members: who joins, who is heard of, who is lost.
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

constexpr size_t kMaxLogLines = 1000;      // of one message
constexpr size_t kMaxLogLineBytes = 8192;  // longer ones are cut
constexpr size_t kMaxReasonBytes = 1024;   // likewise

std::string NameOfMember(const Member& member) {
  return absl::StrCat(member.hello.name(), " on ", member.hello.host());
}

}  // namespace

void Core::On(const MemberSaid& event, const Moment& moment, Decision* out) {
  if (event.message.has_hello()) {
    OnHello(event.session, event.message.hello(), moment, out);
    return;
  }
  Member* member = members_.FindBySession(event.session);
  if (member == nullptr) return;  // refused, displaced or lost; its stream is being closed
  member->last_heard = moment.now;
  switch (event.message.message_case()) {
    case v1::MemberMessage::kHeartbeat: {
      const v1::Heartbeat& beat = event.message.heartbeat();
      v1::CoordinatorMessage ack;
      ack.mutable_ack()->set_sequence(beat.sequence());
      out->actions.push_back(SendToSession{event.session, std::move(ack)});
      OnState(*member, beat.has_running(), beat.running(), beat.progress(), moment, out);
      if (member->hello.kind() == v1::MEMBER_KIND_STORE &&
          beat.progress().phase() == kLeavingPhase) {
        OnStoreLeaving(*member, moment, out);
      }
      break;
    }
    case v1::MemberMessage::kLog:
      OnLog(*member, event.message.log(), out);
      break;
    case v1::MemberMessage::kUnreachable:
      OnUnreachable(event.message.unreachable(), moment, out);
      break;
    case v1::MemberMessage::kStore:
      OnStoreReport(*member, event.message.store(), moment, out);
      break;
    case v1::MemberMessage::kGoodbye:
      OnGoodbye(*member, event.message.goodbye().reason(), moment, out);
      break;
    default:
      break;
  }
}

void Core::OnHello(SessionId session, const v1::Hello& hello, const Moment& moment, Decision* out) {
  v1::CoordinatorMessage answer;
  if (members_.FindBySession(session) != nullptr) {
    answer.mutable_refused()->set_reason("a session says Hello once");
    out->actions.push_back(SendToSession{session, std::move(answer)});
    return;
  }
  Membership::Verdict verdict = members_.Judge(hello, moment.now);
  if (verdict.kind != Membership::Verdict::kNew && verdict.kind != Membership::Verdict::kReturned) {
    answer.mutable_refused()->set_reason(verdict.reason);
    answer.mutable_refused()->set_fenced(verdict.kind == Membership::Verdict::kFenced);
    out->actions.push_back(SendToSession{session, std::move(answer)});
    out->actions.push_back(CloseSession{session});
    out->reasons.push_back(absl::StrCat("refused ", Quoted(hello.name()), ": ", verdict.reason));
    return;
  }
  if (verdict.replaces) {
    if (Member* old = members_.Find(*verdict.replaces)) {
      LoseMember(*old, verdict.reason, moment, out);
    }
  }
  if (verdict.stale_session != 0 && verdict.stale_session != session) {
    out->actions.push_back(CloseSession{verdict.stale_session});
  }
  Member& member = members_.Admit(session, hello, moment.now);
  if (member.since_unix_ms == 0) member.since_unix_ms = moment.unix_ms;
  v1::Welcome& welcome = *answer.mutable_welcome();
  welcome.set_term(term_);
  welcome.set_cluster_id(cluster_id_);
  welcome.set_heartbeat_interval_ms(absl::ToInt64Milliseconds(options_.heartbeat_interval));
  welcome.set_member_timeout_ms(absl::ToInt64Milliseconds(options_.member_timeout));
  out->actions.push_back(SendToSession{session, std::move(answer)});
  out->reasons.push_back(absl::StrCat(
      NameOfMember(member), " (pid ", hello.pid(), ") ",
      verdict.kind == Membership::Verdict::kNew ? "joined" : "is back",
      hello.has_running() ? absl::StrCat(", running ", hello.running().run_id()) : ""));
  schedule_again_ = true;

  if (hello.kind() == v1::MEMBER_KIND_STORE) OnStoreHello(member, moment, out);

  // A run that counts on this very process, which this coordinator has not met before or which may
  // never have got its assignment.
  if (!member.assignment) {
    for (auto& [run_id, run] : runs_) {
      if (!run.Live()) continue;
      for (RankState& rank : run.ranks) {
        if (rank.record.incarnation == hello.incarnation() && rank.record.member == hello.name() &&
            !rank.record.ended && !rank.lost) {
          member.assignment = Assignment{run_id, run.job.generation, rank.record.rank};
        }
      }
    }
  }
  if (member.assignment && !hello.has_running()) {
    const auto found = runs_.find(member.assignment->run_id);
    if (found != runs_.end() && found->second.Live() && !found->second.Failing() &&
        found->second.job.generation == member.assignment->generation) {
      const RankState& rank = found->second.ranks[member.assignment->rank];
      const bool told = found->second.offload == nullptr || found->second.offload->assigned;
      if (told && !rank.began && !rank.record.ended) SendAssign(found->second, rank, session, out);
    }
  }
  OnState(member, hello.has_running(), hello.running(), hello.progress(), moment, out);
  // What it was told on a connection that broke, or by a coordinator that is gone.
  if (!hello.has_running() || !member.assignment) return;
  const auto found = runs_.find(member.assignment->run_id);
  if (found == runs_.end() || !found->second.Live()) return;
  const Run& run = found->second;
  if (run.offload != nullptr) return;  // its stores save
  if (!run.job.saving || run.Failing() || run.job.generation != member.assignment->generation) {
    return;
  }
  SendStop(run.job.run_id, run.job.generation, run.job.reason, session, out, /*save=*/true);
}

void Core::OnState(Member& member, bool running, const v1::Fence& fence,
                   const v1::Progress& progress, const Moment& moment, Decision* out) {
  const bool said_running = std::exchange(member.says_running, running);
  if (running) {
    Run* run = nullptr;
    RankState* rank = nullptr;
    absl::Status current = CheckFence(fence, &run, &rank);
    if (current.ok() && rank->record.member != member.hello.name()) {
      current = absl::FailedPreconditionError(
          absl::StrCat("rank ", fence.rank(), " of ", fence.run_id(), " is ", rank->record.member));
    }
    if (current.ok()) {
      Heard(*run, *rank, &progress, moment, out);
      rank->left_since.reset();
      member.stop_deadline.reset();
      if (run->Failing()) {
        SendStop(fence.run_id(), fence.generation(), run->job.reason, member.session, out);
      }
      return;
    }
    SendStop(fence.run_id(), fence.generation(), std::string(current.message()), member.session,
             out);
    // It may still be on its way out of one run while it holds the next one's assignment.
    if (!member.stop_deadline &&
        (!member.assignment || member.assignment->run_id == fence.run_id())) {
      member.stop_deadline = moment.now + options_.stop_grace;
      WakeBy(*member.stop_deadline);
    }
    return;
  }

  if (!member.assignment) {
    member.stop_deadline.reset();
    if (said_running) schedule_again_ = true;
    return;
  }
  const auto found = runs_.find(member.assignment->run_id);
  const bool current = found != runs_.end() && found->second.Live() &&
                       found->second.job.generation == member.assignment->generation;
  if (current) {
    Run& run = found->second;
    RankState& rank = run.ranks[member.assignment->rank];
    if (!rank.record.ended && !rank.lost) {
      MarkPresent(run, rank, moment, out);
      // Before it began, the assignment may still be under way to it.
      if (rank.began && !rank.left_since) {
        rank.left_since = moment.now;
        WakeBy(moment.now + options_.member_timeout);
      }
      return;
    }
  }
  member.assignment.reset();
  member.stop_deadline.reset();
  schedule_again_ = true;
}

void Core::OnLog(const Member& member, const v1::LogLines& lines, Decision* out) {
  const auto found = runs_.find(lines.running().run_id());
  if (found == runs_.end() || lines.lines().empty()) return;
  const Run& run = found->second;
  const uint32_t rank = lines.running().rank();
  if (rank >= run.ranks.size() || run.ranks[rank].record.member != member.hello.name()) return;
  if (newest_[run.job.spec.name()] != run.job.run_id) return;
  AppendLog action{run.job.spec.name(), run.job.run_id, rank, {}};
  for (const std::string& line : lines.lines()) {
    if (action.lines.size() == kMaxLogLines) {
      action.lines.push_back(absl::StrCat("(", lines.lines_size() - static_cast<int>(kMaxLogLines),
                                          " more lines of this message were dropped)"));
      break;
    }
    action.lines.push_back(CutText(line, kMaxLogLineBytes));
  }
  out->actions.push_back(std::move(action));
}

void Core::OnUnreachable(const v1::Unreachable& report, const Moment& moment, Decision* out) {
  Run* run = nullptr;
  RankState* rank = nullptr;
  if (!CheckFence(report.running(), &run, &rank).ok()) return;
  if (report.peer_rank() >= run->ranks.size() || report.peer_rank() == report.running().rank()) {
    return;
  }
  RankState& peer = run->ranks[report.peer_rank()];
  if (peer.record.ended) return;
  peer.accusers[report.running().rank()] = CutText(report.reason(), kMaxReasonBytes);
  BeginFailure(*run,
               absl::StrCat("rank ", report.running().rank(), " cannot reach rank ",
                            report.peer_rank(), ": ", CutText(report.reason(), kMaxReasonBytes)),
               moment, out);
}

void Core::OnGoodbye(Member& member, const std::string& reason, const Moment& moment,
                     Decision* out) {
  const std::string name = member.hello.name();
  const SessionId session = member.session;
  out->reasons.push_back(absl::StrCat(NameOfMember(member), " leaves: ", Quoted(reason)));
  LoseMember(member, absl::StrCat("it left: ", Quoted(reason)), moment, out);
  members_.Remove(name);
  out->actions.push_back(CloseSession{session});
}

void Core::On(const SessionClosed& event, const Moment& moment, Decision* out) {
  Member* member = members_.FindBySession(event.session);
  if (member == nullptr) return;
  members_.Disconnect(*member, moment.now);
  schedule_again_ = true;
  out->reasons.push_back(absl::StrCat("the connection of ", NameOfMember(*member), " broke"));
}

void Core::On(const ReportExit& event, const Moment& moment, Decision* out) {
  const v1::ReportExitRequest& body = event.body;
  out->actions.push_back(Reply{event.request, absl::OkStatus(), "", 0});
  const std::string how = body.signal() != 0
                              ? absl::StrCat("its process was killed by signal ", body.signal(),
                                             " (", SignalName(body.signal()), ")")
                              : absl::StrCat("its process ended with exit code ", body.exit_code());
  // The rank first: it may belong to a member that is known to nobody any more.
  for (auto& [run_id, run] : runs_) {
    if (!run.Live()) continue;
    for (RankState& rank : run.ranks) {
      if (rank.record.member != body.member() || rank.record.ended || rank.exit) continue;
      if (body.pid() != 0 && rank.record.pid != body.pid()) continue;
      rank.exit = RankEvidence::Exit{body.exit_code(), body.signal()};
      if (rank.evidence_order == 0) rank.evidence_order = next_evidence_++;
      BeginFailure(run, absl::StrCat("rank ", rank.record.rank, ": ", how), moment, out);
      MaybeConclude(run, moment, out);
      break;  // a run that goes on has other ranks now
    }
  }
  Member* member = members_.Find(body.member());
  if (member == nullptr) {
    // A store that is known from the log alone.
    for (auto& [run_id, run] : runs_) {
      if (run.offload == nullptr || IsEnded(run.job.state)) continue;
      for (size_t store = 0; store < run.offload->slots.size(); ++store) {
        const StoreSlot& slot = run.offload->slots[store];
        if (slot.store.member() != body.member() || slot.lost || slot.heard) continue;
        LoseSlot(run, store, how, moment, out);
        break;
      }
    }
  }
  if (member == nullptr || (body.pid() != 0 && member->hello.pid() != body.pid())) return;
  const SessionId session = member->session;
  LoseMember(*member, how, moment, out);
  if (session != 0) out->actions.push_back(CloseSession{session});
  if (body.signal() == 0 && body.exit_code() == 0) members_.Remove(body.member());
}

void Core::LoseMember(Member& member, const std::string& reason, const Moment& moment,
                      Decision* out) {
  const std::string name = member.hello.name();
  const std::optional<Assignment> assignment = member.assignment;
  out->reasons.push_back(absl::StrCat(NameOfMember(member), " is lost: ", reason));
  out->records.push_back(members_.Fence(member, reason, moment));
  schedule_again_ = true;
  if (member.hello.kind() == v1::MEMBER_KIND_STORE) {
    LoseStore(name, std::string(member.hello.incarnation()), reason, moment, out);
  }
  if (!assignment) return;
  const auto found = runs_.find(assignment->run_id);
  if (found == runs_.end() || !found->second.Live()) return;
  Run& run = found->second;
  if (run.job.generation != assignment->generation || assignment->rank >= run.World()) return;
  RankState& rank = run.ranks[assignment->rank];
  if (rank.record.ended || rank.lost) return;
  rank.lost = reason;
  if (rank.evidence_order == 0) rank.evidence_order = next_evidence_++;
  BeginFailure(run, absl::StrCat("rank ", assignment->rank, " (", name, "): ", reason), moment,
               out);
}

void Core::FenceMember(const std::string& name, const std::string& reason, const Moment& moment,
                       Decision* out) {
  Member* member = members_.Find(name);
  if (member == nullptr) return;
  const SessionId session = member->session;
  LoseMember(*member, reason, moment, out);
  if (session == 0) return;
  v1::CoordinatorMessage message;
  message.mutable_refused()->set_reason(reason);
  message.mutable_refused()->set_fenced(true);
  out->actions.push_back(SendToSession{session, std::move(message)});
  out->actions.push_back(CloseSession{session});
}

void Core::CheckMembers(const Moment& moment, Decision* out) {
  for (auto& [name, member] : members_.all()) {
    if (member.lost) continue;
    if (moment.now - member.last_heard >= options_.member_timeout) {
      const SessionId session = member.session;
      LoseMember(member,
                 absl::StrCat("nothing was heard of it for ", Age(moment.now - member.last_heard)),
                 moment, out);
      if (session != 0) out->actions.push_back(CloseSession{session});
    } else if (member.stop_deadline && moment.now >= *member.stop_deadline) {
      const SessionId session = member.session;
      LoseMember(member,
                 absl::StrCat("it still ran an ended job ", Age(options_.stop_grace),
                              " after it was told to stop"),
                 moment, out);
      if (session != 0) {
        v1::CoordinatorMessage message;
        message.mutable_refused()->set_reason(member.lost_reason);
        message.mutable_refused()->set_fenced(true);
        out->actions.push_back(SendToSession{session, std::move(message)});
        out->actions.push_back(CloseSession{session});
      }
    }
  }
  members_.Prune(moment.now);
}

}  // namespace zeroshard::coordinator
