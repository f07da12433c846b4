#include "tests/coordinator/service/page/browser.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

extern char** environ;

namespace zeroshard {
namespace {

using Json = nlohmann::json;

constexpr char kProgram[] = "/usr/bin/chromium";
// Where the protocol wants them in the child: it reads 3 and writes 4.
constexpr int kChildReads = 3, kChildWrites = 4;

std::string TextOf(const Json& event) {
  return event.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 1000);
}

}  // namespace

bool Browser::Installed() { return access(kProgram, X_OK) == 0; }

absl::StatusOr<std::unique_ptr<Browser>> Browser::Start(std::chrono::seconds patience) {
  std::unique_ptr<Browser> browser(new Browser(patience));
  if (absl::Status launched = browser->Launch(); !launched.ok()) return launched;
  auto target = browser->Call("Target.createTarget", {{"url", "about:blank"}});
  if (!target.ok()) return target.status();
  auto attached = browser->Call("Target.attachToTarget",
                                {{"targetId", (*target)["targetId"]}, {"flatten", true}});
  if (!attached.ok()) return attached.status();
  browser->session_ = (*attached)["sessionId"];
  for (const char* domain : {"Page.enable", "Runtime.enable", "Log.enable"}) {
    if (auto enabled = browser->Call(domain, Json::object()); !enabled.ok()) {
      return enabled.status();
    }
  }
  return browser;
}

absl::Status Browser::Launch() {
  const char* temporary = std::getenv("TMPDIR");
  std::string folder = absl::StrCat(temporary == nullptr ? "/tmp" : temporary, "/browser_XXXXXX");
  if (mkdtemp(folder.data()) == nullptr) {
    return absl::UnavailableError(absl::StrCat(folder, ": ", std::strerror(errno)));
  }
  profile_ = folder;
  int to[2], from[2];
  if (pipe2(to, O_CLOEXEC) != 0) return absl::UnavailableError(std::strerror(errno));
  if (pipe2(from, O_CLOEXEC) != 0) {
    close(to[0]);
    close(to[1]);
    return absl::UnavailableError(std::strerror(errno));
  }
  to_ = to[1];
  from_ = from[0];
  // Numbers above those that the child gets, so that no dup2 overwrites the other's.
  const int reads = fcntl(to[0], F_DUPFD_CLOEXEC, 10);
  const int writes = fcntl(from[1], F_DUPFD_CLOEXEC, 10);
  close(to[0]);
  close(from[1]);
  const std::string profile = "--user-data-dir=" + profile_;
  std::vector<std::string> words = {kProgram,
                                    "--headless=new",
                                    "--no-sandbox",
                                    "--disable-gpu",
                                    "--hide-scrollbars",  // they take room at a desk alone
                                    "--disable-dev-shm-usage",
                                    "--disable-background-networking",
                                    "--disable-component-update",
                                    "--disable-extensions",
                                    "--no-first-run",
                                    "--force-color-profile=srgb",
                                    "--remote-debugging-pipe",
                                    profile};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_adddup2(&files, reads, kChildReads);
  posix_spawn_file_actions_adddup2(&files, writes, kChildWrites);
  posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // it has children of its own
  const int error = posix_spawn(&pid_, kProgram, &files, &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  close(reads);
  close(writes);
  if (error == 0) return absl::OkStatus();
  pid_ = 0;
  return absl::UnavailableError(
      absl::StrCat("cannot start ", kProgram, ": ", std::strerror(error)));
}

Browser::~Browser() {
  if (to_ >= 0) close(to_);
  if (from_ >= 0) close(from_);
  if (pid_ > 0) {
    kill(-pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  // What its own children still wrote as they were killed may be in the way once.
  std::error_code error;
  for (int i = 0; i < 20 && !profile_.empty() && std::filesystem::exists(profile_, error); ++i) {
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::filesystem::remove_all(profile_, error);
  }
}

absl::Status Browser::Resize(int width, int height) {
  return Call("Emulation.setDeviceMetricsOverride", {{"width", width},
                                                     {"height", height},
                                                     {"deviceScaleFactor", 1},
                                                     {"mobile", width < 600}})
      .status();
}

absl::Status Browser::SetDark(bool dark) {
  const Json feature = {{"name", "prefers-color-scheme"}, {"value", dark ? "dark" : "light"}};
  return Call("Emulation.setEmulatedMedia", {{"features", Json::array({feature})}}).status();
}

absl::Status Browser::Open(const std::string& url) {
  auto opened = Call("Page.navigate", {{"url", url}});
  if (!opened.ok()) return opened.status();
  if (opened->contains("errorText")) {
    return absl::UnavailableError(absl::StrCat(url, ": ", (*opened)["errorText"].dump()));
  }
  return absl::OkStatus();
}

absl::StatusOr<Json> Browser::Evaluate(const std::string& expression) {
  auto result = Call("Runtime.evaluate",
                     {{"expression", expression}, {"returnByValue", true}, {"awaitPromise", true}});
  if (!result.ok()) return result.status();
  if (result->contains("exceptionDetails")) {
    return absl::InvalidArgumentError(absl::StrCat(expression, ": ", TextOf(*result)));
  }
  return (*result)["result"].value("value", Json());
}

absl::Status Browser::WaitFor(const std::string& expression) {
  const auto end = Clock::now() + patience_;
  Json last;
  while (Clock::now() < end) {
    auto value = Evaluate(expression);
    // While a page is being opened there is none to ask.
    last = value.ok() ? *value : Json(value.status().ToString());
    if (value.ok() && value->is_boolean() && value->get<bool>()) return absl::OkStatus();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return absl::DeadlineExceededError(
      absl::StrCat("not true within ", patience_.count(), " s: ", expression, ": ", TextOf(last)));
}

absl::Status Browser::Press(const std::string& key) {
  for (const char* type : {"keyDown", "keyUp"}) {
    auto pressed = Call("Input.dispatchKeyEvent", {{"type", type}, {"key", key}, {"code", key}});
    if (!pressed.ok()) return pressed.status();
  }
  return absl::OkStatus();
}

absl::Status Browser::Screenshot(const std::string& path) {
  auto picture =
      Call("Page.captureScreenshot", {{"format", "png"}, {"captureBeyondViewport", true}});
  if (!picture.ok()) return picture.status();
  std::string bytes;
  if (!absl::Base64Unescape((*picture)["data"].get<std::string>(), &bytes)) {
    return absl::InternalError("the picture is not base64");
  }
  std::ofstream(path, std::ios::binary) << bytes;
  return absl::OkStatus();
}

absl::StatusOr<Json> Browser::Call(const std::string& method, const Json& parameters) {
  const auto end = Clock::now() + patience_;
  const int id = next_id_++;
  Json message = {{"id", id}, {"method", method}, {"params", parameters}};
  if (!session_.empty()) message["sessionId"] = session_;
  const std::string text = message.dump();
  for (size_t sent = 0; sent <= text.size();) {  // the zero at its end too
    const ssize_t wrote = write(to_, text.c_str() + sent, text.size() + 1 - sent);
    if (wrote <= 0) return absl::UnavailableError("the browser has ended");
    sent += static_cast<size_t>(wrote);
  }
  while (true) {
    auto answer = NextMessage(end);
    if (!answer.ok()) {
      return absl::Status(answer.status().code(),
                          absl::StrCat(method, ": ", answer.status().message()));
    }
    if (!answer->contains("id")) {
      Note(*answer);
      continue;
    }
    if ((*answer)["id"] != id) continue;
    if (answer->contains("error")) {
      return absl::InternalError(absl::StrCat(method, ": ", TextOf(*answer)));
    }
    return (*answer)["result"];
  }
}

absl::StatusOr<Json> Browser::NextMessage(Clock::time_point end) {
  size_t zero;
  while ((zero = received_.find('\0')) == std::string::npos) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    pollfd wait = {from_, POLLIN, 0};
    if (left.count() <= 0 || poll(&wait, 1, static_cast<int>(left.count())) <= 0) {
      return absl::DeadlineExceededError("the browser does not answer");
    }
    char buffer[65536];
    const ssize_t got = read(from_, buffer, sizeof(buffer));
    if (got <= 0) return absl::UnavailableError("the browser has ended");
    received_.append(buffer, static_cast<size_t>(got));
  }
  Json message = Json::parse(received_.substr(0, zero), nullptr, /*allow_exceptions=*/false);
  received_.erase(0, zero + 1);
  if (message.is_discarded()) return absl::InternalError("the browser said what is no JSON");
  return message;
}

void Browser::Note(const Json& event) {
  const std::string method = event.value("method", "");
  if (method == "Runtime.exceptionThrown") complaints_.push_back(TextOf(event));
  if (method == "Page.javascriptDialogOpening") {
    complaints_.push_back(TextOf(event));
    // It would wait for somebody.
    const Json close = {{"id", next_id_++},
                        {"method", "Page.handleJavaScriptDialog"},
                        {"sessionId", session_},
                        {"params", {{"accept", false}}}};
    const std::string text = close.dump();
    (void)!write(to_, text.c_str(), text.size() + 1);
  }
  if (method == "Runtime.consoleAPICalled" && event["params"]["type"] == "error") {
    complaints_.push_back(TextOf(event));
  }
  if (method != "Log.entryAdded") return;
  const Json& entry = event["params"]["entry"];
  if (entry.value("level", "") == "error" && entry.value("source", "") != "network") {
    complaints_.push_back(TextOf(event));
  }
}

}  // namespace zeroshard
