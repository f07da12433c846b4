// What must hold of the status page whatever it shows, checked in a browser that has it open.
#pragma once

#include <string>
#include <vector>

#include "tests/coordinator/service/page/browser.h"

namespace zeroshard {

// Empty: all well. At the width the browser has now: nothing is wider than the page, nobody's text
// became an element, each table has headers and each control a name, text stands out from what is
// behind it (WCAG AA), no identifier is there twice, and the browser had nothing to complain of.
std::vector<std::string> CheckPage(Browser* browser);

}  // namespace zeroshard
