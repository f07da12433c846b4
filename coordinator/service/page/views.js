// The parts of the page, each from what the coordinator said. No state of their own.

const LIVE = new Set(['QUEUED', 'PLACING', 'RUNNING', 'RECOVERING']);
const STATE_STYLE = {
  QUEUED: 'warn', PLACING: 'live', RUNNING: 'live', RECOVERING: 'warn', COMPLETED: 'good',
  FAILED: 'bad', CANCELLED: '', idle: '', running: 'live', lost: 'bad', READY: 'good',
  APPLYING: 'live', LOADING: 'warn'
};
const MOST_JOBS = 100, MOST_MEMBERS = 300, MOST_RANKS = 256, MOST_PROBLEMS = 12;
const SILENT_MS = 5000;  // a member that was not heard for so long is worth a word

const stateOf = (job) => String(job.state).replace('JOB_STATE_', '');
const kindOf = (node) => String(node.hello.kind).replace('MEMBER_KIND_', '').toLowerCase();
const phaseOf = (store) => String(store.phase).replace('STORE_PHASE_', '');
const badge = (state) =>
  h('span', {class: 'badge ' + (STATE_STYLE[state] || '')}, String(state).toLowerCase());
const sum = (values) => values.reduce((a, b) => a + b, 0);
const some = (count, what) => `${whole(count)} ${what}${number(count) === 1 ? '' : 's'}`;
const list = (value) => Array.isArray(value) ? value : [];

// From the last steps of the curve where there is one, else from the last step.
function paceOf(job, history) {
  const n = history ? history.step.length : 0;
  let seconds = 0, tokens = 0, steps = 0;
  for (let i = n - 1; i >= 1 && steps < 20; --i) {
    seconds += history.seconds[i];
    tokens += history.tokens[i];
    steps += history.step[i] - history.step[i - 1];
  }
  if (steps > 0) return {stepSeconds: seconds / steps, tokensPerSecond: tokens / seconds};
  if (!job.last || !(number(job.last.seconds) > 0)) return {stepSeconds: NaN, tokensPerSecond: NaN};
  return {
    stepSeconds: number(job.last.seconds),
    tokensPerSecond: number(job.last.tokens) / number(job.last.seconds)
  };
}
const secondsLeft = (job, pace) =>
  (number(job.steps) - number(job.committed_step)) * pace.stepSeconds;

function progressOf(job) {
  return h('progress', {max: Math.max(1, number(job.steps)), value: number(job.committed_step),
    'aria-label': 'steps committed'});
}

// --- what is wrong ---
function problemsOf(data, now) {
  const problems = [];
  const add = (style, what, text) => problems.push({style, what, text});
  const seen = new Set();
  for (const job of [...list(data.jobs)].reverse()) {  // the newest run of a name speaks for it
    if (seen.has(job.name)) continue;
    seen.add(job.name);
    const state = stateOf(job);
    if (state === 'FAILED' && now - number(job.ended_unix_ms) < 24 * 3600e3) {
      add('bad', `${job.name} failed`, job.reason);
    } else if (state === 'RECOVERING') {
      add('warn', `${job.name} recovers`, job.reason);
    } else if (state === 'QUEUED') {
      add('warn', `${job.name} waits`, job.reason);
    }
  }
  for (const node of list(data.nodes)) {
    const name = node.hello.name;
    const silent = number(node.heartbeat_age_ms);
    if (node.state === 'lost') {
      add('bad', `${name} is lost`, node.lost_reason || `on ${node.hello.host}`);
    } else if (silent > SILENT_MS) {
      add('warn', `${name} is silent`, `not heard for ${span(silent / 1000)}, on ${node.hello.host}`);
    }
  }
  for (const store of data.job && LIVE.has(stateOf(data.job)) ? list(data.job.stores) : []) {
    if (phaseOf(store) === 'FAILED' || store.problem) {
      add(phaseOf(store) === 'FAILED' ? 'bad' : 'warn', `${store.member}, for ${data.job.name}`,
        store.problem || 'its part of the state is lost');
    }
  }
  return problems.sort((a, b) => (a.style === 'warn') - (b.style === 'warn'));
}

function problems(data, now) {
  const found = problemsOf(data, now);
  if (found.length === 0) return [];
  const more = found.length - MOST_PROBLEMS;
  return h('ul', {class: 'problems'},
    found.slice(0, MOST_PROBLEMS).map(({style, what, text}) =>
      h('li', {class: style, key: what}, h('b', null, foreign(what)), long(text))),
    more > 0 && h('li', {class: 'warn'}, `and ${more} more`));
}

// --- jobs ---
function jobs(data, chosenRun) {
  const all = [...list(data.jobs)].reverse();
  const live = all.filter((job) => LIVE.has(stateOf(job)));
  const shown = live.concat(all.filter((job) => !LIVE.has(stateOf(job)))).slice(0, MOST_JOBS);
  const rows = shown.map((job) => {
    const pace = paceOf(job, job.run_id === chosenRun ? data.history : null);
    const isLive = LIVE.has(stateOf(job));
    const speed = isLive && Number.isFinite(pace.tokensPerSecond)
      ? compact(pace.tokensPerSecond) : NONE;
    const left = isLive ? span(secondsLeft(job, pace)) : NONE;
    const steps = `${whole(job.committed_step)} / ${whole(job.steps)}`;
    return {
      key: job.run_id, style: job.run_id === chosenRun ? 'chosen' : null,
      cells: [
        [h('a', {href: '#job=' + encodeURIComponent(job.run_id),
          'aria-current': job.run_id === chosenRun ? 'true' : null}, clipped(job.name)),
        h('span', {class: 'sub'}, [steps, isLive && speed !== NONE ? speed + ' tokens/s' : null,
          isLive && left !== NONE ? left + ' left' : null].filter(Boolean).join(' · '))],
        badge(stateOf(job)),
        [steps, progressOf(job)],
        job.last ? loss(job.last.loss) : NONE,
        speed, left
      ]
    };
  });
  const columns = [{head: 'Job'}, {head: 'State'}, {head: 'Step', roomy: true, style: 'tight'},
    {head: 'Loss', number: true}, {head: 'Tokens/s', number: true, roomy: true},
    {head: 'Time left', number: true, roomy: true}];
  return h('div', {class: 'card'},
    h('div', {class: 'head'}, h('h2', null, 'Jobs'),
      h('span', {class: 'note'}, `${whole(live.length)} live, ${whole(all.length)} in all`)),
    all.length === 0
      ? h('p', {class: 'note'}, 'None yet: zeroshard submit JOB.yaml')
      : table('Jobs', columns, rows),
    all.length > shown.length && h('p', {class: 'note'}, `The ${MOST_JOBS} newest are shown.`));
}

// --- the chosen job ---
const isMesh = (mesh) => Boolean(mesh) && (number(mesh.pipeline) > 1 || number(mesh.tensor) > 1);

function figures(job, history, now) {
  const pace = paceOf(job, history);
  const isLive = LIVE.has(stateOf(job));
  const last = job.last || {};
  const evals = history ? history.eval : [];
  const entry = (name, value, big) => value !== null && value !== undefined && value !== false &&
    h('div', null, h('dt', null, name), h('dd', {class: big ? 'big' : null}, value));
  const checkpoint = job.checkpoint;
  return h('dl', {class: 'figures'},
    entry('step', `${whole(job.committed_step)} / ${whole(job.steps)}`, true),
    entry('loss', job.last ? loss(last.loss) : NONE, true),
    entry('tokens/s', Number.isFinite(pace.tokensPerSecond) ? compact(pace.tokensPerSecond) : NONE, true),
    entry('time left', isLive ? span(secondsLeft(job, pace)) : NONE, true),
    entry('validation loss', evals.length > 0 ? loss(evals[evals.length - 1][1]) : null),
    entry('gradient norm', job.last ? small(last.grad_norm) : null),
    entry('learning rate', job.last ? small(last.learning_rate) : null),
    entry('loss scale', last.loss_scale !== undefined ? small(last.loss_scale) : null),
    entry('ZeRO stage', whole(job.stage)),
    entry('workers', whole(job.workers)),
    entry('mesh (pipeline × data × tensor)', isMesh(job.mesh)
      ? `${whole(job.mesh.pipeline)} × ${whole(job.mesh.data)} × ${whole(job.mesh.tensor)}` : null),
    entry('generation', whole(job.generation)),
    entry('state version', job.version
      ? `epoch ${whole(job.version.epoch)}, step ${whole(job.version.step)}` : null),
    entry('steps lost', number(job.steps_lost) > 0 ? whole(job.steps_lost) : null),
    entry('newest checkpoint', checkpoint
      ? `step ${whole(checkpoint.step)}, ${bytes(checkpoint.bytes)}` : null),
    entry('went on from', job.resume ? foreign(job.resume.checkpoint) : null),
    entry('submitted', clock(job.submitted_unix_ms)),
    entry('elapsed', span(
      ((number(job.ended_unix_ms) > 0 ? number(job.ended_unix_ms) : now) -
        number(job.submitted_unix_ms)) / 1000)));
}

function curveCard(data, view) {
  const history = data.history;
  const scale = (name) => h('button', {type: 'button', 'aria-pressed': String(view.scale === name),
    onclick: () => view.setScale(name)}, name);
  return h('div', {class: 'card'},
    h('div', {class: 'head'}, h('h3', null, 'Loss'),
      h('span', {class: 'group right', role: 'group', 'aria-label': 'Scale of the loss'},
        scale('linear'), scale('log'))),
    !history ? h('div', {class: 'note'}, data.historyError ? long(data.historyError) : 'Loading…') : [
      curve(history, {log: view.scale === 'log', width: view.width, chosen: view.point,
        choose: view.choosePoint}),
      h('p', {class: 'readout', 'aria-live': view.point === null ? 'off' : 'polite'},
        readoutOf(history, view.point)),
      legend(history),
      !history.complete && h('p', {class: 'note'}, 'A long history: it is still being read.')
    ]);
}

function ranks(job) {
  const place = (at) => at ? `${whole(at.pipeline)}, ${whole(at.data)}, ${whole(at.tensor)}` : NONE;
  const meshed = isMesh(job.mesh);
  const rows = list(job.ranks).slice(0, MOST_RANKS).map((rank) => ({
    key: rank.rank,
    cells: [rank.rank, ...meshed ? [place(rank.position)] : [], clipped(rank.member),
      clipped(rank.host),
      clipped(rank.progress && rank.progress.phase || NONE),
      rank.progress ? whole(rank.progress.step) : NONE,
      number(rank.heartbeat_age_ms) < 0 ? 'gone' : span(number(rank.heartbeat_age_ms) / 1000)]
  }));
  return h('div', {class: 'card'}, h('h3', null, `Ranks (${whole(list(job.ranks).length)})`),
    rows.length === 0 ? h('p', {class: 'note'}, 'None is assigned.')
      : table('Ranks', [{head: 'Rank'}, ...meshed ? [{head: 'Stage, data, tensor'}] : [],
        {head: 'Worker'}, {head: 'Host'}, {head: 'Phase'},
        {head: 'Step', number: true}, {head: 'Heard', number: true, style: 'tight'}], rows),
    list(job.ranks).length > MOST_RANKS && h('p', {class: 'note'}, `The first ${MOST_RANKS}.`));
}

function plan(job) {
  const plans = list(job.plan);
  if (plans.length === 0) return null;
  const columns = [{head: 'Rank'}, {head: 'Owns', number: true}, {head: 'Parameters', number: true},
    {head: 'Gradients', number: true}, {head: 'Optimizer', number: true},
    {head: 'Activations', number: true}, {head: 'Traffic/step', number: true},
    {head: 'Push/step', number: true}, {head: 'Pull/step', number: true}];
  // What a rank measured of itself, where it has said so, below what was planned for it.
  const usages = new Map(list(job.ranks).filter((rank) => rank.usage)
    .map((rank) => [number(rank.rank), rank.usage]));
  const pair = (planned, measured) =>
    [bytes(planned), measured !== undefined && h('div', {class: 'note'}, bytes(measured))];
  const rows = plans.slice(0, MOST_RANKS).map((p) => {
    const u = usages.get(number(p.rank)) || {};
    const t = number(u.step) > 0 ? u : {};  // else no step was counted yet
    return {
      key: p.rank,
      cells: [p.rank, compact(p.owned_parameters), pair(p.parameter_bytes, u.parameter_bytes),
        pair(p.gradient_bytes, u.gradient_bytes), pair(p.optimizer_bytes, u.optimizer_bytes),
        pair(p.activation_bytes, u.activation_bytes),
        pair(p.traffic_bytes_per_step, t.traffic_bytes), pair(p.push_bytes_per_step, t.push_bytes),
        pair(p.pull_bytes_per_step, t.pull_bytes)]
    };
  });
  const inStores = job.store_plan;
  return h('div', {class: 'card'}, h('h3', null, usages.size > 0 ? 'Plan, and below it measured' : 'Plan'),
    [...usages.values()].some((u) => !(number(u.step) > 0)) && h('p', {class: 'note'},
      'Traffic is measured on a whole step without an evaluation, sample, checkpoint or waiting.'),
    inStores && h('p', {class: 'note'}, `In the stores: ${some(inStores.chunks, 'chunk')}, ` +
      `${bytes(inStores.state_bytes)} of state and ${bytes(inStores.staging_bytes)} of staging, ` +
      `${whole(inStores.replicas)} ${number(inStores.replicas) === 1 ? 'copy' : 'copies'}.`),
    table('Plan by rank', columns, rows));
}

function stores(job) {
  const rows = list(job.stores).map((store, i) => {
    const u = store.usage || {};
    const version = store.version || {};
    return {
      key: i,
      cells: [clipped(store.member), clipped(store.host), badge(phaseOf(store)),
        `${whole(version.epoch || 0)} · ${whole(version.step || 0)}`, whole(store.sealed_step),
        whole(u.chunks), bytes(sum([u.master_bytes, u.exp_avg_bytes, u.exp_avg_sq_bytes,
          u.parameter_bytes].map((value) => number(value || 0)))),
        bytes(u.staging_bytes || 0), bytes(u.nvme_bytes || 0), whole(store.generation)]
    };
  });
  return table('Stores of this job', [{head: 'Store'}, {head: 'Host'}, {head: 'Phase'},
    {head: 'Epoch · step', number: true}, {head: 'Sealed', number: true},
    {head: 'Chunks', number: true}, {head: 'State', number: true}, {head: 'Staging', number: true},
    {head: 'NVMe', number: true}, {head: 'Generation', number: true}], rows);
}

// Runs of cells that a store holds as much of, as rectangles.
function strip(store, shards) {
  const rects = [];
  const size = (i) => Math.floor((i + 1) * shards.chunks / shards.cells) -
    Math.floor(i * shards.chunks / shards.cells);
  const share = (i) => store.held[i] / size(i);
  for (let i = 0; i < shards.cells;) {
    let end = i + 1;
    while (end < shards.cells && share(end) === share(i)) ++end;
    if (share(i) > 0) {
      rects.push(h('rect', {x: i, width: end - i, y: 0, height: 1, opacity: share(i) < 1
        ? 0.25 + 0.7 * share(i) : null}));
    }
    i = end;
  }
  return h('svg', {class: 'strip', viewBox: `0 0 ${shards.cells} 1`, preserveAspectRatio: 'none',
    role: 'img', 'aria-label': `${store.member} holds ${store.chunks} of ${shards.chunks} chunks`},
  rects);
}

function shardCard(data, view) {
  const job = data.job, shards = data.shards;
  if (list(job.stores).length === 0 && !shards) return null;
  const versionOf = (i) => {
    const store = list(job.stores)[i];
    return store && store.version ? `${whole(store.version.epoch || 0)} · ${whole(store.version.step || 0)}` : NONE;
  };
  return h('div', {class: 'card'},
    h('h3', null, 'Shard stores'), stores(job),
    !shards ? h('div', {class: 'note'}, data.shardsError ? long(data.shardsError) : 'Loading…') : [
      h('h3', {id: 'map-title'}, 'Shard map'),
      h('p', {class: 'note'}, `${whole(shards.chunks)} chunks of up to ` +
        `${whole(shards.chunk_elements)} elements, ${whole(shards.replicas)} ` +
        `${shards.replicas === 1 ? 'copy' : 'copies'} each; map version ${whole(shards.version)}.`),
      h('div', {class: 'strips'}, shards.stores.map((store) => [
        h('span', null, clipped(store.member), h('br'),
          h('span', {class: 'note'}, `${whole(store.chunks)}, ${bytes(store.bytes)}`)),
        strip(store, shards)])),
      h('details', {ontoggle: (event) => view.showChunks(event.currentTarget.open)},
        h('summary', null, 'Chunk by chunk'),
        table('Chunks', [{head: 'Chunk', style: 'n'}, {head: 'Unit'}, {head: 'Elements', style: 'tight'},
          {head: 'State', number: true}, {head: 'Where (epoch · step)'}],
        shards.rows.map((row) => ({
          key: row.chunk,
          cells: [whole(row.chunk), [clipped(row.unit), row.trained ? null : ', frozen'],
            `${whole(row.begin)} – ${whole(row.end)}`, bytes(row.bytes),
            row.stores.map((i, at) => [at > 0 && ', ', clipped(shards.stores[i].member),
              ` (${versionOf(i)})`])]
        }))),
        h('p', {class: 'group'},
          h('button', {type: 'button', disabled: shards.first === 0 ? '' : null,
            onclick: () => view.setFirst(Math.max(0, shards.first - view.rows))}, 'Earlier'),
          h('button', {type: 'button',
            disabled: shards.first + view.rows >= shards.chunks ? '' : null,
            onclick: () => view.setFirst(shards.first + view.rows)}, 'Later')))
    ]);
}

function checkpoints(data) {
  const found = data.checkpoints;
  if (!found && !data.checkpointsError) return null;
  const rows = list(found && found.checkpoints).slice(-50).reverse().map((entry) => ({
    key: entry.path,
    cells: [whole(entry.step), entry.complete
      ? h('span', {class: 'badge good'}, entry.latest ? 'complete, latest' : 'complete')
      : h('span', {class: 'badge bad'}, 'not complete'),
    entry.complete ? bytes(entry.bytes) : NONE, clock(entry.unix_ms),
    h('div', {class: 'wide'}, long(entry.problem || entry.path))]
  }));
  return h('div', {class: 'card'}, h('h3', null, 'Checkpoints'),
    data.checkpointsError && h('div', {class: 'note'}, long(data.checkpointsError)),
    found && (rows.length === 0 ? h('p', {class: 'note'}, 'None yet in ', foreign(found.dir))
      : table('Checkpoints', [{head: 'Step', style: 'n'}, {head: 'State'}, {head: 'Size', number: true},
        {head: 'Written', style: 'tight'}, {head: 'Where'}], rows)));
}

function events(job) {
  const all = [...list(job.events)].reverse();
  return h('div', {class: 'card'}, h('h3', null, 'Events'),
    all.length === 0 ? h('p', {class: 'note'}, 'None yet.')
      : h('ol', {class: 'events', tabindex: 0, 'aria-label': 'Events, newest first'}, all.map((event) =>
        h('li', {key: event.unix_ms + event.reason}, h('time', null, clock(event.unix_ms)),
          h('span', null, badge(String(event.state).replace('JOB_STATE_', '')), ' ', long(event.reason))))));
}

function job(data, view, now) {
  if (data.jobError) return h('div', {class: 'card'}, h('h2', null, 'This job'),
    h('div', null, long(data.jobError)));
  const job = data.job;
  if (!job) return null;
  return [
    h('div', {class: 'card', key: 'summary'},
      h('div', {class: 'head'}, h('h2', null, foreign(job.name)), badge(stateOf(job)),
        h('span', {class: 'note'}, 'run ', foreign(job.run_id))),
      job.reason && h('div', null, long(job.reason)),
      progressOf(job), figures(job, data.history, now)),
    curveCard(data, view),
    h('div', {class: 'two'}, events(job),
      h('div', {class: 'stack'}, ranks(job), checkpoints(data) || h('div', {hidden: ''}))),
    shardCard(data, view) || h('div', {hidden: ''}),
    plan(job) || h('div', {hidden: ''})
  ];
}

// --- members ---
function members(data, now) {
  const all = list(data.nodes);
  const rows = all.slice(0, MOST_MEMBERS).map((node) => {
    const hello = node.hello;
    const isStore = kindOf(node) === 'store';
    const since = number(node.since_unix_ms);
    return {
      key: hello.name + hello.incarnation,
      cells: [clipped(hello.name), badge(node.state), kindOf(node),
        h('span', {title: clock(since)}, since > 0 ? span((now - since) / 1000) : NONE),
        span(number(node.heartbeat_age_ms) / 1000), clipped(hello.host), clipped(hello.version || NONE),
        isStore ? `${some(node.jobs, 'job')}, ${some(node.chunks, 'chunk')}`
          : node.job ? [clipped(node.job), `, rank ${whole(node.rank)}`] : NONE,
        isStore ? `${bytes(node.held_bytes)} of ${bytes(hello.memory_bytes)}` : clipped(hello.device || NONE),
        isStore && number(hello.nvme_bytes) > 0
          ? `${bytes(node.held_nvme_bytes)} of ${bytes(hello.nvme_bytes)}` : NONE]
    };
  });
  const count = (state) => all.filter((node) => node.state === state).length;
  return h('div', {class: 'card'},
    h('div', {class: 'head'}, h('h2', null, 'Members'),
      h('span', {class: 'note'},
        `${whole(count('running'))} running, ${whole(count('idle'))} idle, ${whole(count('lost'))} lost`)),
    all.length === 0 ? h('p', {class: 'note'}, 'None is registered: start zeroshard-worker.')
      : table('Members', [{head: 'Name'}, {head: 'State'}, {head: 'Kind'},
        {head: 'For', style: 'tight'}, {head: 'Heard', style: 'tight'}, {head: 'Host'}, {head: 'Version'},
        {head: 'Works on', style: 'tight'}, {head: 'Memory or device', style: 'tight'},
        {head: 'NVMe', style: 'tight'}], rows),
    all.length > MOST_MEMBERS && h('p', {class: 'note'}, `The first ${MOST_MEMBERS} are shown.`));
}
