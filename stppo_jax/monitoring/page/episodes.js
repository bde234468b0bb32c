// Episodes.

const NUMBERS = {behaviour_logp: 'log-prob', old_logp: 'old log-prob', ratio: 'ratio',
  advantages: 'advantage', values: 'value'};
const MODES = {mask: null, advantage: 'advantages', ratio: 'ratio', value: 'values', 'log-prob': 'behaviour_logp'};
const REWARD_BINS = 4;
const PARTS = new RegExp(`(\n| )|${ODD.source}`);  // a piece of text is split at these
const browser = {
  run: null,  // name
  source: 'chosen',  // 'chosen', 'KIND UPDATE' or 'question'
  pool: [],  // the episodes to choose from
  visible: [],
  current: null,  // index into visible
  mode: 'mask',
};
let filters = {};

const right = (episode) => Boolean(episode.right);
const turnsOf = (episode) => (episode.actions || []).length;
const sameTask = (a, b) => JSON.stringify(a.task) === JSON.stringify(b.task);

function setMode(name) {
  browser.mode = name;
  if (browser.current !== null) showEpisode(browser.visible[browser.current]);
}

// Returns [{label, has}]: each reward, or quarters of the range if there are many.
function rewardBins(episodes) {
  const scores = [...new Set(episodes.map((episode) => episode.score))].filter(Number.isFinite).sort((a, b) => a - b);
  if (scores.length <= 2 * REWARD_BINS) {
    return scores.map((score) => ({label: `reward ${number(score)}`, has: (x) => x === score}));
  }
  const low = scores[0], width = (scores.at(-1) - low) / REWARD_BINS;
  return Array.from({length: REWARD_BINS}, (unused, i) => {
    const from = low + i * width, to = from + width, isLast = i === REWARD_BINS - 1;
    return {label: `reward ${number(from)} to ${number(to)}`, has: (x) => x >= from && (x < to || isLast)};
  });
}

// Adds a filter with a choice for each value, if there are several.
function addFilter(name, label, valueOf) {
  const values = [...new Set(browser.pool.map(valueOf))].sort((a, b) => a - b || (a < b ? -1 : 1));
  if (values.length < 2) return;
  addChoices(name, values.map((value) => ({label: label(value), accepts: (e) => valueOf(e) === value})));
}

function addChoices(name, choices) {
  const before = filters[name] && filters[name].select.value;
  const select = make('select', {'aria-label': name, onchange: () => fillList()}, make('option', {value: ''}, name));
  choices.forEach((choice, index) => select.append(make('option', {value: String(index)}, plain(choice.label))));
  if (before && Number(before) < choices.length) select.value = before;
  $('.filters').append(select);
  filters[name] = {select, choices};
}

function fillFilters() {
  $('.filters').replaceChildren();
  const before = filters;
  filters = {...before};
  const used = () => [...$('.filters').children].map((select) => select.getAttribute('aria-label'));
  addFilter('right and wrong', (v) => v, (e) => (right(e) ? 'right' : 'wrong'));
  addFilter('train and eval', (v) => v, (e) => e.kind);
  addFilter('any update', (v) => `update ${v}`, (e) => e.step);
  addFilter('any turns', (v) => plural(v, 'turn'), turnsOf);
  addFilter('any hops', (v) => plural(v, 'hop'), (e) => e.hops || 0);
  addFilter('any data set', (v) => v, (e) => e.dataset || '');
  addFilter('any role', (v) => v, (e) => e.role || '');
  const bins = rewardBins(browser.pool);
  if (bins.length > 1) {
    addChoices('any reward', bins.map((bin) => ({label: bin.label, accepts: (e) => bin.has(e.score)})));
  }
  filters = Object.fromEntries(used().map((name) => [name, filters[name]]));
}

function textOf(episode) {
  episode.search_text ??= `${episode.question}\n${episode.pieces.join('')}`.toLowerCase();
  return episode.search_text;
}

function fillList(wanted) {
  const text = $('#search').value.trim().toLowerCase();
  browser.visible = browser.pool.filter((episode) => (!text || textOf(episode).includes(text)) &&
    Object.values(filters).every(({select, choices}) => select.value === '' || choices[Number(select.value)].accepts(episode)));
  $('.list').replaceChildren(...browser.visible.map((episode, index) => make('button', {onclick: () => show(index)},
    make('span', {class: right(episode) ? 'yes' : 'no', title: right(episode) ? 'right' : 'wrong'}, right(episode) ? '\u2713' : '\u2717'),
    make('span', {class: 'q'}, plain(episode.question)),
    make('small', {}, [...(episode.role ? [episode.role] : []), `${episode.kind} ${episode.step}`, ...(episode.hops ? [plural(episode.hops, 'hop')] : []),
      plural(turnsOf(episode), 'turn')].join(' \u00b7 ')))));
  const {visible, pool} = browser;
  $('#count').textContent = `${visible.length} of ${plural(pool.length, 'episode')}`;
  if (!visible.length) $('.list').append(make('p', {class: 'muted', style: 'padding:8px'}, 'No such episode is shown.'));
  show(visible.length ? Math.min(wanted || 0, visible.length - 1) : null);
}

function show(index) {
  $('.list [aria-current]')?.removeAttribute('aria-current');
  browser.current = index;
  if (index === null) { $('#episodes article').replaceChildren(); return; }
  const list = $('.list'), button = list.children[index];
  button.setAttribute('aria-current', 'true');
  const top = button.offsetTop - list.offsetTop;
  if (top < list.scrollTop) list.scrollTop = top;
  const under = top + button.offsetHeight - list.clientHeight;
  if (under > list.scrollTop) list.scrollTop = under;
  showEpisode(browser.visible[index]);
}

// A line that leads to the episodes of the same question at other updates.
function questionLine(episode) {
  if (browser.source === 'question') return make('button', {class: 'more', onclick: () => setSource('chosen')}, 'Back to all questions');
  const others = browser.pool.filter((other) => sameTask(other, episode));
  if (!state.live && others.length < 2) return make('span');
  const label = state.live ? 'This question through training' : `This question in ${plural(others.length, 'episode')}`;
  return make('button', {class: 'more', onclick: () => setSource('question', episode)}, label);
}

async function setSource(source, episode) {
  const run = state.runs.get(browser.run), name = encodeURIComponent(browser.run);
  browser.source = source;
  let note = '';
  if (source === 'question') {
    browser.pool = state.live ? await getJson(`/api/question?name=${name}&task=${encodeURIComponent(JSON.stringify(episode.task))}`)
      : run.episodes.filter((other) => sameTask(other, episode));
  } else if (source === 'chosen') {
    browser.pool = run.episodes;
    note = run.groups.map((g) => `${g.label}: ${g.shown} of ${g.total}`).join(' \u00b7 ') +
      '. Right and wrong episodes are shown in equal parts where both exist.';
  } else {
    const [kind, step] = source.split(' ');
    const group = await getJson(`/api/episodes?name=${name}&kind=${kind}&update=${step}`);
    browser.pool = group.episodes;
    if (group.shown < group.total) note = `${group.shown} of ${group.total} episodes are shown.`;
  }
  $('#shown').textContent = note;
  fillSources();
  fillFilters();
  fillList();
}

// The choices of runs and files.
function fillSources() {
  const run = state.runs.get(browser.run);
  const option = (value, label, chosen) => make('option', {value, selected: value === chosen}, plain(label));
  $('#run').replaceChildren(...shownRuns().map((other) => option(other.name, other.name, browser.run)));
  $('#run').hidden = shownRuns().length < 2;
  const files = [...run.files].reverse().map(([kind, step]) => option(`${kind} ${step}`, `${kind} ${step}`, browser.source));
  $('#source').replaceChildren(option('chosen', 'first and last updates', browser.source), ...files);
  if (browser.source === 'question') $('#source').prepend(option('question', 'one question', 'question'));
  $('#source').hidden = !state.live;
}

function showEpisodes() {
  const runs = shownRuns().filter((run) => run.groups.length);
  $('#episodes').hidden = !runs.length;
  if (!runs.length) { browser.run = null; return; }
  if (runs.some((run) => run.name === browser.run)) { fillSources(); return; }  // does not disturb the reader
  browser.run = runs[0].name;
  setSource('chosen');
}

function listenToEpisodes() {
  $('#run').addEventListener('change', (event) => { browser.run = event.target.value; setSource('chosen'); });
  $('#source').addEventListener('change', (event) => setSource(event.target.value));
  $('#search').addEventListener('input', () => fillList());
  const modes = Object.keys(MODES);
  addEventListener('keydown', (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === 'Escape' && event.target === $('#search')) $('#search').blur();
    if (event.target.closest && event.target.closest('select, input')) return;
    if (event.key === '/') { event.preventDefault(); $('#search').focus(); return; }
    if (browser.current === null) return;
    const chosen = modes[Number(event.key) - 1];
    if (chosen) { setMode(chosen); return; }
    const move = {ArrowLeft: -1, ArrowRight: 1, k: -1, j: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    show(Math.max(0, Math.min(browser.visible.length - 1, browser.current + move)));
  });
  $('#episodes article').addEventListener('pointermove', tokenTip);
  $('#episodes article').addEventListener('click', tokenTip);
  $('#episodes article').addEventListener('pointerleave', () => { $('.tip').hidden = true; });
}

function showEpisode(episode) {
  const agent = episode.turn_ids.filter((turn) => turn > 0).length;
  const facts = [['gold', (episode.answers || []).join(' | ')], ['score', number(episode.score)],
    ...Object.entries(episode.metrics || {}).map(([name, value]) => [name, number(value)]), ['tokens', episode.tokens.length], ['of the agent', agent],
    ['data set', episode.dataset], ['task', episode.task]];
  facts.unshift(...placeFacts(episode));
  if (episode.role) facts.unshift(['role', episode.role], ['of episode', episode.of_episode]);
  if (episode.truncated) facts.push(['ended by', 'a limit']);
  if (episode.failed) facts.push(['retrieval', 'failed']);
  const buttons = Object.entries(MODES).map(([name, field]) => make('button', {
    'aria-pressed': String(name === browser.mode), disabled: Boolean(field) && !has(episode, field),
    onclick: () => setMode(name)}, name));
  const scale = scaleOf(episode, MODES[browser.mode]);
  $('#episodes article').replaceChildren(
    make('p', {class: 'question'}, plain(episode.question)),
    questionLine(episode),
    make('div', {class: 'facts'}, ...facts.map(([name, value]) => make('span', {}, `${name} `, make('b', {}, plain(value))))),
    make('div', {class: 'colours'}, make('span', {class: 'switch', role: 'group', 'aria-label': 'colour tokens by'}, ...buttons),
      legendOf(episode, scale)),
    ...pieces(episode, scale));
  // All heights are read before the page changes, so that the browser computes its layout once.
  const boxes = [...document.querySelectorAll('.piece.forced')];
  for (const box of boxes.filter((other) => other.querySelector('.tokens').scrollHeight >= 330)) {
    box.classList.add('cut');
    box.append(make('button', {class: 'more', onclick: (event) => { box.classList.remove('cut'); event.target.remove(); }},
      'Show all of it'));
  }
}

// The place of a row in the tree of an agent program's episode.
function placeFacts(episode) {
  const facts = [];
  if (episode.agent_id) facts.push(['agent', episode.agent_id]);
  for (const [label, place] of [['branch of segment', episode.branched_from], ['follows segment', episode.parent]]) {
    if (place) facts.push([label, `${place[0]} after turn ${place[1]}`]);
  }
  return facts.length ? [['of episode', episode.of_episode], ['segment', episode.segment || 0], ...facts] : [];
}

const has = (episode, field) => Array.isArray(episode[field]) && episode[field].some((x) => x !== null);

// A token's colour is an opacity of one of two hues, so it reads on a light and on a dark page.
function scaleOf(episode, field) {
  if (!field) return {paint: () => 'rgb(var(--up) / .16)'};
  if (!has(episode, field)) return {paint: () => ''};
  const all = episode[field].filter((x) => x !== null && (field !== 'ratio' || x > 0));
  const sorted = (values) => values.slice().sort((a, b) => a - b);
  const high = (values) => { const v = sorted(values); return v[Math.min(v.length - 1, Math.floor(0.98 * v.length))]; };
  if (field === 'behaviour_logp') {
    const most = high(all.map((x) => -x)) || 1;
    return {ends: [number(-most), '0'], colours: ['rgb(var(--level) / .8)', 'transparent'],
      paint: (x) => `rgb(var(--level) / ${(0.8 * Math.min(1, Math.max(0, -x / most))).toFixed(3)})`};
  }
  if (field === 'values') {
    const v = sorted(all), low = v[0], span = v[v.length - 1] - low || 1;
    return {ends: [number(low), number(v[v.length - 1])], colours: ['transparent', 'rgb(var(--level) / .8)'],
      paint: (x) => `rgb(var(--level) / ${(0.8 * (x - low) / span).toFixed(3)})`};
  }
  const f = field === 'ratio' ? Math.log : (x) => x;
  const most = high(all.map((x) => Math.abs(f(x)))) || (field === 'ratio' ? Math.log(1.2) : 1);
  const ends = field === 'ratio' ? [Math.exp(-most), Math.exp(most)] : [-most, most];
  return {ends: ends.map(number), middle: field === 'ratio' ? '1' : '0',
    colours: ['rgb(var(--down) / .8)', 'transparent', 'rgb(var(--up) / .8)'],
    paint: (x) => {
      const part = Math.max(-1, Math.min(1, f(Math.max(x, field === 'ratio' ? 1e-9 : x)) / most));
      return `rgb(var(${part < 0 ? '--down' : '--up'}) / ${(0.8 * Math.abs(part)).toFixed(3)})`;
    }};
}

function legendOf(episode, scale) {
  const legend = make('span', {class: 'scale'});
  if (scale.ends) {
    const bar = make('span', {class: 'bar'}, scale.middle || '');
    bar.style.background = `linear-gradient(90deg, ${scale.colours.join(', ')})`;
    legend.append(scale.ends[0], bar, scale.ends[1]);
  } else if (browser.mode === 'mask') {
    const sample = make('span', {class: 't'}, '\u00a0agent token\u00a0');
    sample.style.background = scale.paint();
    legend.append(sample, make('span', {style: 'color:var(--forced)'}, 'prompt, observation'));
  }
  if (has(episode, 'clipped')) {
    const count = episode.clipped.filter((x) => x).length;
    legend.append(make('span', {class: count ? 'clipped' : ''}, `${count} clipped`));
  }
  return legend;
}

function pieces(episode, scale) {
  const boxes = [];
  const field = MODES[browser.mode];
  const values = field && has(episode, field) ? episode[field] : [];
  const paint = (x) => (field && (x === null || x === undefined) ? '' : scale.paint(x));
  let agentIndex = 0, start = 0;
  while (start < episode.tokens.length) {
    const turn = episode.turn_ids[start];
    let end = start;
    while (end < episode.tokens.length && episode.turn_ids[end] === turn) end++;
    const title = turn > 0 ? `turn ${turn} · ${(episode.actions || [])[turn - 1] || 'unknown'}`
      : start === 0 ? 'prompt' : 'observation';
    const body = make('div', {class: 'tokens'}), lines = {run: 0};
    for (let i = start; i < end; i++) {
      const node = tokenNode(episode, i, turn > 0 ? agentIndex : null, lines);
      if (turn > 0) node.style.background = paint(values[agentIndex++]);
      body.append(node);
    }
    boxes.push(make('section', {class: `piece ${turn > 0 ? 'agent' : 'forced'}`},
      make('header', {}, make('b', {}, title), make('span', {}, plural(end - start, 'token'))), body));
    start = end;
  }
  return boxes;
}

function tokenNode(episode, index, agentIndex, lines) {
  const node = make('span', {class: 't'});
  for (const part of String(episode.pieces[index] ?? '').split(PARTS)) {
    if (!part) continue;
    if (part === '\n') {  // a third newline in a row is shown, but takes no line of its own
      lines.run++;
      node.append(make('span', {class: 'nl'}, lines.run > 2 ? '' : part));
      continue;
    }
    lines.run = 0;
    if (part === ' ') node.append(make('span', {class: 'sp'}, part));
    else if (plain(part) !== part) node.append(make('span', {class: 'odd'}, plain(part)));
    else node.append(part);
  }
  if (agentIndex !== null && episode.clipped && episode.clipped[agentIndex]) node.classList.add('clipped');
  node.tokenAt = [episode, index, agentIndex];
  return node;
}

function tokenTip(event) {
  const node = event.target.closest && event.target.closest('.t'), tip = $('.tip');
  if (!node || !node.tokenAt) { tip.hidden = true; return; }
  const [episode, index, agentIndex] = node.tokenAt;
  const rows = [['token', `${index} of ${episode.tokens.length}`], ['id', String(episode.tokens[index])],
    ['piece', plain(JSON.stringify(episode.pieces[index] ?? '')).slice(0, 120)]];
  if (agentIndex === null) rows.push(['source', 'not the agent']);
  else {
    for (const [field, label] of Object.entries(NUMBERS)) {
      if (has(episode, field)) rows.push([label, number(episode[field][agentIndex])]);
    }
    if (episode.clipped) rows.push(['clipped', episode.clipped[agentIndex] ? 'yes' : 'no']);
  }
  tip.replaceChildren(...rows.flatMap(([label, value]) => [make('span', {}, label), make('b', {}, value)]));
  tip.hidden = false;
  tip.style.left = '0';  // at its last place the window's edge may have squeezed it
  const box = tip.getBoundingClientRect(), room = document.documentElement.clientWidth;
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, room - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
}
