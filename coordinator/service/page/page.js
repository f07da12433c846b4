// Asks the coordinator every two seconds and draws what it says. The URL's hash says which job is
// looked at (#job=RUN), so that a page can be kept and passed on.

const EVERY_MS = 2000, PATIENCE_MS = 8000, CHECKPOINTS_EVERY_MS = 10000, ROWS = 50;

const state = {
  data: {}, scale: 'linear', point: null, first: 0, chunksShown: false,
  heard: null,       // when the coordinator last answered
  silentSince: null, // when it first did not
  skew: 0,           // its clock less this one's
  checkpointsAt: -Infinity, asking: false, again: false
};

const $ = (id) => document.getElementById(id);
const chosen = () => new URLSearchParams(location.hash.slice(1)).get('job');
const now = () => Date.now() + state.skew;

async function ask(path) {
  const patience = new AbortController();
  const timer = setTimeout(() => patience.abort(), PATIENCE_MS);
  try {
    const answer = await fetch('/api/v1/' + path, {signal: patience.signal, cache: 'no-store'});
    const date = Date.parse(answer.headers.get('Date'));
    // It is in whole seconds.
    if (Math.abs(date - Date.now()) > 2000) state.skew = date - Date.now();
    else state.skew = 0;
    const body = await answer.json();
    if (!answer.ok) throw Object.assign(new Error(body.error || answer.statusText), {said: true});
    return body;
  } finally {
    clearTimeout(timer);
  }
}

// An error that the coordinator stated is an answer too: {error}.
async function askGently(path) {
  try {
    return {value: await ask(path)};
  } catch (error) {
    if (!error.said) throw error;
    return {error: error.message};
  }
}

// The chosen job, else the newest that lives, else the newest.
function pickJob(jobs) {
  if (chosen()) return chosen();
  const newest = [...jobs].reverse();
  const job = newest.find((one) => LIVE.has(stateOf(one))) || newest[0];
  return job ? job.run_id : null;
}

async function askJob(data, run) {
  const path = 'jobs/' + encodeURIComponent(run);
  const status = await askGently(path);
  data.jobError = status.error;
  data.job = status.value;
  if (!data.job) return;
  const old = state.data.job && state.data.job.run_id === data.job.run_id ? state.data : {};
  const offloaded = data.job.store_plan !== undefined && data.job.store_plan !== null;
  const due = Date.now() - state.checkpointsAt >= CHECKPOINTS_EVERY_MS || !old.job;
  const [history, shards, checkpoints] = await Promise.all([
    askGently(path + '/history'),
    offloaded ? askGently(`${path}/shards?first=${state.first}&rows=${state.chunksShown ? ROWS : 0}`) : {},
    due ? askGently(path + '/checkpoints')
      : {value: old.checkpoints, error: old.checkpointsError}
  ]);
  if (due) state.checkpointsAt = Date.now();
  data.history = history.value;
  data.historyError = history.error;
  data.shards = shards.value;
  data.shardsError = shards.error;
  data.checkpoints = checkpoints.value;
  // A job that saves nothing has no such part.
  data.checkpointsError = /no checkpoint section/.test(checkpoints.error || '') ? null : checkpoints.error;
}

async function refresh() {
  if (state.asking) {
    state.again = true;
    return;
  }
  state.asking = true;
  try {
    const data = {};
    const [jobs, nodes, version] = await Promise.all([ask('jobs'), ask('nodes'),
      state.data.version ? {version: state.data.version} : ask('version')]);
    data.jobs = list(jobs.jobs);
    data.nodes = list(nodes.nodes);
    data.term = nodes.term;
    data.cluster = nodes.cluster_id;
    data.version = version.version;
    data.run = pickJob(data.jobs);
    if (data.run) await askJob(data, data.run);
    state.data = data;
    state.heard = Date.now();
    if (state.silentSince !== null) state.data.version = null;  // it may be another one now
    state.silentSince = null;
  } catch (error) {
    state.silentSince = state.silentSince || Date.now();
  }
  state.asking = false;
  draw();
  if (state.again) {
    state.again = false;
    refresh();
  }
}

const view = {
  get scale() { return state.scale; },
  get point() { return state.point; },
  get width() { return Math.max(240, state.width || 600); },
  rows: ROWS,
  setScale(scale) {
    state.scale = scale;
    draw();
  },
  choosePoint(point) {
    if (state.point === point) return;
    state.point = point;
    draw();
  },
  setFirst(first) {
    state.first = first;
    refresh();
  },
  showChunks(shown) {
    if (state.chunksShown === shown) return;
    state.chunksShown = shown;
    refresh();
  }
};

function drawHeader() {
  const {cluster, term, version} = state.data;
  patch($('cluster'), cluster ? ['cluster ', foreign(cluster.slice(0, 8)), `, term ${whole(term)}`,
    version ? [', version ', foreign(version)] : ''] : '');
  const silent = state.silentSince !== null;
  $('live').className = silent ? 'down' : '';
  // A reader's voice is for changes, not for each second.
  const text = silent
    ? `The coordinator does not answer since ${clock(state.silentSince)}` +
      (state.heard ? '; what is shown is older' : '; this page asks again')
    : state.heard ? 'Live, every 2 s' : 'Loading…';
  if ($('live').textContent !== text) $('live').textContent = text;
}

function draw() {
  const data = state.data;
  drawHeader();
  if (!data.jobs) return;
  const run = data.job ? data.job.run_id : null;
  patch($('problems'), problems(data, now()));
  patch($('jobs'), jobs(data, run));
  patch($('job'), job(data, view, now()) || []);
  patch($('members'), members(data, now()));
  // While nothing is chosen there is nothing to take room.
  for (const id of ['problems', 'job']) $(id).hidden = $(id).childNodes.length === 0;
  document.title = data.job ? `${data.job.name} ${stateOf(data.job).toLowerCase()} – ZeroShard` : 'ZeroShard';
  document.body.dataset.ready = 'yes';
}

function measure() {
  const width = $('job').clientWidth - 2 * parseFloat(getComputedStyle(document.documentElement).fontSize);
  if (width > 0 && width !== state.width) {
    state.width = width;
    draw();
  }
}

new ResizeObserver(measure).observe($('main'));
addEventListener('hashchange', () => {
  state.point = null;
  state.first = 0;
  state.checkpointsAt = -Infinity;
  refresh();
});
document.addEventListener('visibilitychange', () => document.hidden || refresh());
setInterval(() => document.hidden || refresh(), EVERY_MS);
refresh();
