#include "tests/coordinator/service/page/page_checks.h"

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

// A list of what is wrong. Contrast is that of WCAG 2.1, 1.4.3 (4.5 for text of this size), by its
// definition of relative luminance.
constexpr char kChecks[] = R"js((() => {
  const wrong = [];
  const all = [...document.querySelectorAll('body *')];
  const name = (e) => e.localName + (e.id ? '#' + e.id : '') + '.' + (e.getAttribute('class') || '');
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) {
    wrong.push(`the page is ${document.documentElement.scrollWidth} px wide in ${width}`);
  }
  const scrolls = (e) => e && (getComputedStyle(e).overflowX !== 'visible' || scrolls(e.parentElement));
  for (const e of all) {
    const box = e.getBoundingClientRect();
    if (box.width > 0 && box.right > width + 1 && !scrolls(e.parentElement) && !e.closest('svg')) {
      wrong.push(`${name(e)} reaches ${box.right} px of ${width}`);
    }
  }
  // The page makes none of these, except its own two.
  for (const e of document.querySelectorAll('body img, body iframe, body object, body embed, body link, ' +
      'body style, body form, body input, body video, body audio, body marquee, body base, body meta')) {
    wrong.push('an element that is not the page\'s: ' + name(e));
  }
  if (document.querySelectorAll('script').length !== 1) wrong.push('more scripts than the page\'s');
  for (const e of all) {
    for (const {name: attribute, value} of e.attributes) {
      if (attribute.startsWith('on')) wrong.push(`${name(e)} has ${attribute}`);
      if (attribute === 'href' && !/^(#|\/api\/v1\/jobs$)/.test(value)) wrong.push('link to ' + value);
    }
  }
  for (const t of document.querySelectorAll('table')) {
    const heads = [...t.querySelectorAll('thead th')];
    if (heads.length === 0 || heads.some((e) => e.scope !== 'col')) wrong.push('a table without headers');
    if ([...t.querySelectorAll('tbody tr')].some((e) => !e.querySelector('th[scope=row]'))) {
      wrong.push('a row without a header');
    }
  }
  for (const e of document.querySelectorAll('button, a, summary, svg[role=img], [role=region], section')) {
    const labelled = (e.getAttribute('aria-labelledby') || '').split(' ').filter(Boolean)
      .map((id) => document.getElementById(id)).filter(Boolean);
    if (!e.hidden && !(e.textContent.trim() || e.getAttribute('aria-label') || labelled.length)) {
      wrong.push('nameless ' + name(e));
    }
  }
  const ids = all.map((e) => e.id).filter(Boolean);
  for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) wrong.push('twice: #' + id);

  const colour = (text) => text.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = colour(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const seen = new Set();
  for (const e of all) {
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.nodeValue.trim());
    if (!text || !e.getClientRects().length || e.closest('svg') || e.disabled || e.localName === 'script') continue;
    const [a, b] = [light(colour(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5 && !seen.has(name(e))) {
      seen.add(name(e));
      wrong.push(`${name(e)} has a contrast of ${contrast.toFixed(2)}: ${e.textContent.slice(0, 30)}`);
    }
  }
  return wrong;
})())js";

}  // namespace

std::vector<std::string> CheckPage(Browser* browser) {
  std::vector<std::string> wrong = browser->complaints();
  const auto found = browser->Evaluate(kChecks);
  if (!found.ok()) {
    wrong.push_back(std::string(found.status().message()));
    return wrong;
  }
  for (const auto& one : *found) wrong.push_back(one.get<std::string>());
  return wrong;
}

}  // namespace zeroshard
