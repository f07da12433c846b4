// The loss curve: one SVG of a history (coordinator/service/page/curve.h).

const HEIGHT = 260, LEFT = 52, RIGHT = 10, TOP = 12, BOTTOM = 26;

function ticksLinear(low, high, about) {
  const raw = (high - low) / about || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) ticks.push(i * step);
  return ticks;
}
function ticksLog(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power) {
    for (const factor of [1, 2, 5]) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  // A curve within 2 and 5 has none of them.
  return inside.length >= 3 ? inside : ticksLinear(low, high, 4).filter((tick) => tick > 0);
}

// From data to pixels; null where there is nothing to draw.
function scalesOf(history, log, width) {
  const usable = (value) => Number.isFinite(value) && (!log || value > 0);
  const values = [...history.least, ...history.most, ...history.eval.map((pair) => pair[1])]
    .filter((value) => value !== null && usable(value));
  if (values.length === 0) return null;
  const from = history.step[0], to = Math.max(history.step[history.step.length - 1], from + 1);
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = log ? [low * 0.9, high * 1.1] : [low - 0.5, high + 0.5];
  const f = log ? Math.log10 : (value) => value;
  const room = log ? 0 : (high - low) * 0.04;
  const bottom = f(low) - room, top = f(high) + room;
  return {
    from, to, low, high, usable,
    x: (step) => LEFT + (step - from) / (to - from) * (width - LEFT - RIGHT),
    y: (value) => TOP + (top - f(value)) / (top - bottom) * (HEIGHT - TOP - BOTTOM)
  };
}

const at = (x, y) => x.toFixed(1) + ' ' + y.toFixed(1);

// Lines with gaps where a value is missing.
function lineOf(points, s) {
  let path = '', open = false;
  for (const [step, value] of points) {
    if (value === null || !s.usable(value)) {
      open = false;
      continue;
    }
    path += (open ? 'L' : 'M') + at(s.x(step), s.y(value));
    // A point of its own is to be seen too.
    if (!open) path += 'h.01';
    open = true;
  }
  return path;
}

function bandOf(history, s) {
  const up = [], down = [];
  history.step.forEach((step, i) => {
    const least = history.least[i], most = history.most[i];
    if (least === null || !s.usable(least) || !s.usable(most)) return;
    up.push(at(s.x(step), s.y(most)));
    down.unshift(at(s.x(step), s.y(least)));
  });
  return up.length < 2 ? '' : 'M' + up.concat(down).join('L') + 'Z';
}

function describe(history) {
  const finite = history.loss.map((value, i) => [history.step[i], value])
    .filter((pair) => pair[1] !== null);
  if (finite.length === 0) return 'No finite loss yet.';
  const [first, last] = [finite[0], finite[finite.length - 1]];
  const best = finite.reduce((a, b) => b[1] < a[1] ? b : a);
  let text = `Loss ${loss(first[1])} at step ${first[0]}, ${loss(last[1])} at step ${last[0]}, ` +
    `lowest ${loss(best[1])} at step ${best[0]}.`;
  if (history.eval.length > 0) {
    const [step, value] = history.eval[history.eval.length - 1];
    text += ` Validation loss ${loss(value)} at step ${step}.`;
  }
  for (const [step, count] of history.lost.slice(-3)) {
    text += ` Went back ${count} steps before step ${step}.`;
  }
  return text;
}

function readoutOf(history, i) {
  if (i === null || i === undefined || i >= history.step.length) return describe(history);
  const step = history.step[i];
  const from = i === 0 ? step - history.width + 1 : history.step[i - 1] + 1;
  const which = history.width > 1 && from < step ? `steps ${Math.max(from, 1)}–${step}` : `step ${step}`;
  const seconds = history.seconds[i];
  return [`${which}: loss ${loss(history.loss[i])}`,
    history.least[i] !== history.most[i]
      ? `from ${loss(history.least[i])} to ${loss(history.most[i])}` : null,
    `gradient norm ${small(history.grad_norm[i])}`,
    `learning rate ${small(history.learning_rate[i])}`,
    seconds > 0 ? compact(history.tokens[i] / seconds) + ' tokens/s' : null
  ].filter(Boolean).join(', ');
}

// The index of the point nearest to a step.
function nearest(history, step) {
  let best = 0;
  history.step.forEach((s, i) => {
    if (Math.abs(s - step) < Math.abs(history.step[best] - step)) best = i;
  });
  return best;
}

function legend(history) {
  const sample = (...shapes) => h('svg', {viewBox: '0 0 26 10', 'aria-hidden': 'true'}, shapes);
  const entry = (sign, text) => h('span', null, sign, text);
  return h('p', {class: 'legend'},
    entry(sample(h('path', {class: 'line', d: 'M0 5h26'})),
      history.width > 1 ? `loss, mean of ${whole(history.width)} steps` : 'loss'),
    history.width > 1 &&
      entry(sample(h('rect', {class: 'band', width: 26, height: 10})), 'lowest to highest'),
    history.eval.length > 0 && entry(sample(h('path', {class: 'eval', d: 'M0 5h26'}),
      h('circle', {class: 'eval-dot', cx: 13, cy: 5, r: 3})), 'validation loss'),
    history.lost.length > 0 &&
      entry(sample(h('line', {class: 'lost', x1: 13, x2: 13, y1: 0, y2: 10})), 'went back'),
    history.skipped.length > 0 &&
      entry(sample(h('line', {class: 'skipped', x1: 13, x2: 13, y1: 2, y2: 10})), 'skipped, not finite'));
}

// `chosen`: the index whose values are shown; `choose(index or null)` is called when it changes.
function curve(history, {log, width, chosen, choose}) {
  const s = scalesOf(history, log, width);
  if (s === null) {
    return h('p', {class: 'note'}, history.step.length === 0
      ? 'No step is committed yet.' : 'No loss that can be drawn.');
  }
  const bottom = HEIGHT - BOTTOM;
  const yTicks = log ? ticksLog(s.low, s.high) : ticksLinear(s.low, s.high, 5);
  const xTicks = ticksLinear(s.from, s.to, Math.min(10, width / 60)).filter(Number.isInteger);
  const pick = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    choose(nearest(history, s.from + (event.clientX - box.left - LEFT) /
      (width - LEFT - RIGHT) * (s.to - s.from)));
  };
  const keys = {ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20};
  const key = (event) => {
    const last = history.step.length - 1;
    if (event.key === 'Escape') return choose(null);
    let to = chosen === null ? last : chosen;
    if (event.key === 'Home') to = 0;
    else if (event.key === 'End') to = last;
    else if (event.key in keys) to = Math.min(last, Math.max(0, to + keys[event.key]));
    else return;
    event.preventDefault();
    choose(to);
  };
  return h('svg', {id: 'curve', viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: 'img',
    tabindex: 0, 'aria-label': describe(history) + ' Arrow keys read single points.',
    onpointermove: pick, onpointerdown: pick, onpointerleave: () => choose(null), onkeydown: key},
    yTicks.map((tick) => h('g', null,
      h('line', {class: 'grid', x1: LEFT, x2: width - RIGHT, y1: s.y(tick), y2: s.y(tick)}),
      h('text', {x: LEFT - 6, y: s.y(tick) + 4, 'text-anchor': 'end'}, small(tick)))),
    xTicks.map((tick) => h('text',
      {x: s.x(tick), y: HEIGHT - 6, 'text-anchor': s.x(tick) > width - 40 ? 'end' : 'middle'}, compact(tick))),
    history.width > 1 && h('path', {class: 'band', d: bandOf(history, s)}),
    history.lost.map(([step]) =>
      h('line', {class: 'lost', x1: s.x(step), x2: s.x(step), y1: TOP, y2: bottom})),
    history.skipped.map(([step]) =>
      h('line', {class: 'skipped', x1: s.x(step), x2: s.x(step), y1: bottom - 8, y2: bottom})),
    h('path', {class: 'line', d: lineOf(history.step.map((step, i) => [step, history.loss[i]]), s)}),
    h('path', {class: 'eval', d: lineOf(history.eval, s)}),
    history.eval.filter((pair) => pair[1] !== null && s.usable(pair[1])).slice(-100)
      .map(([step, value]) =>
        h('circle', {class: 'eval-dot', cx: s.x(step), cy: s.y(value), r: 3})),
    chosen !== null && chosen < history.step.length && h('line', {class: 'cursor',
      x1: s.x(history.step[chosen]), x2: s.x(history.step[chosen]), y1: TOP, y2: bottom}));
}
