#include "coordinator/core/membership.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

constexpr size_t kMostTextBytes = 256;

// What is said of members goes to terminals, logs and pages: nothing of it may be more than text.
std::string WhatIsWrongWith(absl::string_view what, absl::string_view text) {
  if (text.size() > kMostTextBytes) {
    return absl::StrCat("the ", what, " of the Hello has ", text.size(), " bytes, wanted at most ",
                        kMostTextBytes, ": ", Quoted(text));
  }
  const auto odd = std::find_if_not(text.begin(), text.end(), absl::ascii_isprint);
  if (odd == text.end()) return "";
  return absl::StrFormat(
      "the %s of the Hello, %s, has the byte 0x%02x at %d; wanted printable ASCII alone", what,
      Quoted(text), static_cast<unsigned char>(*odd), odd - text.begin());
}

// Empty when the Hello is well formed.
std::string WhatIsWrong(const v1::Hello& hello) {
  if (hello.kind() != v1::MEMBER_KIND_WORKER && hello.kind() != v1::MEMBER_KIND_STORE) {
    return absl::StrCat("the member kind ", static_cast<int>(hello.kind()), " is neither worker (",
                        static_cast<int>(v1::MEMBER_KIND_WORKER), ") nor store (",
                        static_cast<int>(v1::MEMBER_KIND_STORE),
                        "): is the member of another version than this coordinator?");
  }
  if (!IsName(hello.name())) {
    return absl::StrCat("the member name ", Quoted(hello.name()), " is not ", kNameRule);
  }
  const std::string& id = hello.incarnation();
  if (id.size() != 32 || !std::all_of(id.begin(), id.end(), absl::ascii_isxdigit)) {
    return absl::StrCat("the incarnation ", Quoted(id), " is not 32 hex digits");
  }
  const std::pair<absl::string_view, const std::string&> texts[] = {
      {"host", hello.host()},
      {"address", hello.address()},
      {"version", hello.version()},
      {"device", hello.device()},
      {"fingerprint", hello.fingerprint()},
      {"metrics address", hello.metrics_address()}};
  for (const auto& [what, text] : texts) {
    if (std::string wrong = WhatIsWrongWith(what, text); !wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace

bool NaturalLess::operator()(const std::string& a, const std::string& b) const {
  size_t i = 0;
  size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (absl::ascii_isdigit(a[i]) && absl::ascii_isdigit(b[j])) {
      const auto run = [](const std::string& text, size_t& at) {
        while (at < text.size() && text[at] == '0') ++at;
        const size_t begin = at;
        while (at < text.size() && absl::ascii_isdigit(text[at])) ++at;
        return text.substr(begin, at - begin);
      };
      const std::string x = run(a, i);
      const std::string y = run(b, j);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i;
      ++j;
    }
  }
  if ((i < a.size()) != (j < b.size())) return j < b.size();
  return a < b;  // differ at most in leading zeros
}

Membership::Verdict Membership::Judge(const v1::Hello& hello, absl::Duration now) const {
  Verdict verdict;
  if (std::string wrong = WhatIsWrong(hello); !wrong.empty()) {
    verdict.reason = std::move(wrong);
    return verdict;
  }
  if (const auto fence = fences_.find(hello.incarnation()); fence != fences_.end()) {
    verdict.kind = Verdict::kFenced;
    verdict.reason =
        absl::StrCat("incarnation ", hello.incarnation(), " of ", hello.name(),
                     " was fenced: ", fence->second.reason, ". Register with a new incarnation");
    return verdict;
  }
  const Member* old = Find(hello.name());
  if (old == nullptr) {
    if (members_.size() >= options_.max_members && !members_.contains(hello.name())) {
      verdict.reason =
          absl::StrCat("there are ", members_.size(), " members already, the most that are kept");
      return verdict;
    }
    verdict.kind = Verdict::kNew;
    return verdict;
  }
  if (old->hello.incarnation() == hello.incarnation()) {
    verdict.kind = Verdict::kReturned;
    verdict.stale_session = old->session;
    return verdict;
  }
  const std::string who = absl::StrCat("the name ", hello.name(), " is taken by pid ",
                                       old->hello.pid(), " on host ", old->hello.host());
  const std::string heard = absl::StrCat("last heard ", Age(now - old->last_heard), " ago");
  if (old->session == 0 && old->hello.host() == hello.host()) {
    verdict.kind = Verdict::kNew;
    verdict.replaces = hello.name();
    verdict.reason = absl::StrCat("its connection broke and pid ", hello.pid(), " on host ",
                                  hello.host(), " took its place");
    return verdict;
  }
  if (old->session == 0) {
    verdict.reason =
        absl::StrCat(who, ", ", heard, ", whose connection broke; the name is free in ",
                     Age(old->last_heard + options_.member_timeout - now),
                     " unless it comes back. Wait, or choose another name");
  } else {
    verdict.reason =
        absl::StrCat(who, ", ", heard, ". Stop that process or give this one another name");
  }
  return verdict;
}

Member& Membership::Admit(SessionId session, const v1::Hello& hello, absl::Duration now) {
  Member& member = members_[hello.name()];
  if (member.lost || member.hello.incarnation() != hello.incarnation()) {
    sessions_.erase(member.session);
    member = Member();
  }
  if (member.session != 0) sessions_.erase(member.session);
  member.hello = hello;
  member.session = session;
  member.last_heard = now;
  sessions_[session] = hello.name();
  return member;
}

Member* Membership::Find(const std::string& name) {
  return const_cast<Member*>(std::as_const(*this).Find(name));
}

const Member* Membership::Find(const std::string& name) const {
  const auto found = members_.find(name);
  return found == members_.end() || found->second.lost ? nullptr : &found->second;
}

Member* Membership::FindBySession(SessionId session) {
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? nullptr : Find(found->second);
}

void Membership::Disconnect(Member& member, absl::Duration now) {
  sessions_.erase(member.session);
  member.session = 0;
  member.disconnected_at = now;
}

FenceRecord Membership::Fence(Member& member, const std::string& reason, const Moment& moment) {
  FenceRecord record{member.hello.incarnation(), member.hello.name(), reason, moment.unix_ms};
  fences_[record.incarnation] = record;
  Disconnect(member, moment.now);
  member.lost = true;
  member.lost_reason = reason;
  member.since_unix_ms = moment.unix_ms;
  member.assignment.reset();
  member.stop_deadline.reset();
  return record;
}

FenceRecord Membership::FenceAbsent(const std::string& incarnation, const std::string& name,
                                    const std::string& reason, const Moment& moment) {
  if (Member* member = Find(name);
      member != nullptr && member->hello.incarnation() == incarnation) {
    return Fence(*member, reason, moment);
  }
  FenceRecord record{incarnation, name, reason, moment.unix_ms};
  fences_[incarnation] = record;
  return record;
}

void Membership::Remove(const std::string& name) {
  const auto found = members_.find(name);
  if (found == members_.end()) return;
  sessions_.erase(found->second.session);
  members_.erase(found);
}

void Membership::Prune(absl::Duration now) {
  for (auto it = members_.begin(); it != members_.end();) {
    const Member& member = it->second;
    if (member.lost && now - member.disconnected_at >= options_.lost_shown) {
      it = members_.erase(it);
    } else {
      ++it;
    }
  }
}

}  // namespace zeroshard::coordinator
