// zeroshard_page_probe URL FOLDER [EXPRESSION...]: opens the status page on a desk and on a phone,
// light and dark, waits until each JavaScript expression is true, and checks what must hold of any
// page (page_checks.h). FOLDER gets pictures. Exit codes: 0 all well, 1 not, 77 no chromium here.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/coordinator/service/page/browser.h"
#include "tests/coordinator/service/page/page_checks.h"

namespace zeroshard {
namespace {

struct Look {
  const char* name;
  int width, height;
  bool dark;
};
constexpr Look kLooks[] = {{"desk", 1280, 900, false},
                           {"desk-dark", 1280, 900, true},
                           {"phone", 360, 740, false},
                           {"phone-dark", 360, 740, true}};

absl::Status LookAt(Browser* browser, const Look& look, const std::string& url,
                    const std::string& folder, const std::vector<std::string>& wanted) {
  absl::Status status = browser->Resize(look.width, look.height);
  status.Update(browser->SetDark(look.dark));
  status.Update(browser->Open(url));
  for (const std::string& expression : wanted) {
    if (status.ok()) status.Update(browser->WaitFor(expression));
  }
  // Also of a page that is not as wanted.
  status.Update(browser->Screenshot(absl::StrCat(folder, "/", look.name, ".png")));
  for (const std::string& wrong : CheckPage(browser)) {
    status.Update(absl::InternalError(wrong));
    std::fprintf(stderr, "%s: %s\n", look.name, wrong.c_str());
  }
  return status;
}

int Main(const std::string& url, const std::string& folder,
         const std::vector<std::string>& wanted) {
  if (!Browser::Installed()) {
    std::printf("SKIPPED: no chromium; 'deploy/install_deps.sh --tests' installs it\n");
    return 77;
  }
  auto browser = Browser::Start();
  if (!browser.ok()) {
    std::fprintf(stderr, "%s\n", std::string(browser.status().message()).c_str());
    return 1;
  }
  int bad = 0;
  for (const Look& look : kLooks) {
    const absl::Status looked = LookAt(browser->get(), look, url, folder, wanted);
    if (looked.ok()) continue;
    ++bad;
    std::fprintf(stderr, "%s: %s\n", look.name, std::string(looked.message()).c_str());
  }
  return bad == 0 ? 0 : 1;
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: zeroshard_page_probe URL FOLDER [EXPRESSION...]\n");
    return 2;
  }
  return zeroshard::Main(argv[1], argv[2], {argv + 3, argv + argc});
}
