'use strict';
// Draws the data of `page_data` in report.py. Text is set with textContent and is never markup.
const page = JSON.parse(document.getElementById('page_json').textContent);
const $ = (selector) => document.querySelector(selector);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children);  // strings become text nodes
  return node;
}

function number(x) {
  if (x === null || x === undefined) return 'NaN';
  if (typeof x === 'string') return x;  // an infinite log-prob
  const size = Math.abs(x);
  let text = x === 0 ? '0' : size >= 1e5 || size < 1e-3 ? x.toExponential(1)
    : size >= 100 ? x.toFixed(0) : size >= 10 ? x.toFixed(1) : size >= 1 ? x.toFixed(2) : x.toFixed(3);
  if (Number.isInteger(x) && size < 1e5) text = String(x);
  return text.replace('e+', 'e').replaceAll('-', '\u2212');
}

// Header.

function duration(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.round(seconds % 60)} s`;
}

function showHeader() {
  document.title = page.title;
  $('h1').textContent = page.title;
  let status = 'No metrics yet.';
  if (page.updates !== null) {
    status = plural(page.updates, 'update') + (page.seconds ? ` in ${duration(page.seconds)}` : '');
  }
  $('#status').append(make('p', {class: 'muted'}, status),
    ...page.warnings.map((warning) => make('p', {class: 'warning'}, plain(warning))));
  $('#results').append(page.results.rows.length ? resultsTable(page.results)
    : make('p', {class: 'muted'}, 'No evaluation yet.'));
  for (const [name, value] of page.highlights) {
    const parts = plain(value).split('/').flatMap((part, i) => i ? ['/', make('wbr'), part] : [part]);
    $('dl.config').append(make('div', {}, make('dt', {}, name), make('dd', {}, ...parts)));
  }
  $('#config pre').textContent = page.config;
  $('#config').hidden = !page.config;
}

function resultsTable({score, rows}) {
  const three = (x) => x.toFixed(3);
  const signed = (x) => Math.abs(x) < 5e-4 ? '0.000' : (x > 0 ? '+' : '\u2212') + three(Math.abs(x));
  const several = rows.some((row) => row.points.length > 1);
  const column = (name, at) => {
    const steps = new Set(rows.map((row) => row.points.at(at)[0]));
    return steps.size === 1 ? `update ${[...steps][0]}` : name;
  };
  const titles = [score === 'em' ? 'Held-out exact match' : `Held-out ${score}`, 'n', column('first', 0)];
  if (several) titles.push(column('last', -1), 'change', 'best');
  const head = make('tr', {}, ...titles.map((title) => make('th', {scope: 'col'}, plain(title))));
  if (several) head.lastChild.append(make('small', {}, 'at'));
  const body = rows.map((row) => {
    const first = row.points[0][1], last = row.points.at(-1)[1];
    const best = row.points.reduce((a, b) => b[1] > a[1] ? b : a);
    const line = make('tr', {class: row.is_hops ? 'hops' : 'all'}, make('th', {scope: 'row'}, plain(row.label)),
      make('td', {}, row.n === null ? '' : String(row.n)), make('td', {}, three(first)));
    if (row.points.length > 1) {
      line.append(make('td', {}, three(last)), make('td', {}, signed(last - first)),
        make('td', {}, three(best[1]), make('small', {}, `at ${best[0]}`)));
    } else if (several) {
      for (let i = 0; i < 3; i++) line.append(make('td', {}, '\u2013'));
    }
    return line;
  });
  return make('div', {class: 'scroll'}, make('table', {class: 'results'},
    make('thead', {}, head), make('tbody', {}, ...body)));
}

// Curves.

const HEIGHT = 190;
const MANY = 120;  // points of a series above which its running mean is drawn over them
const COLOURS = 8;
const WHOLE_STEPS = [0, 1, 2, 3, 4, 5].flatMap((e) => [1, 2, 5].map((m) => m * 10 ** e));
const plots = [];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (hue) => () => css(`--c${hue % COLOURS}`);
const faded = (hue, alpha) => () => {
  const text = css(`--c${hue % COLOURS}`);
  return text + Math.round(255 * alpha).toString(16).padStart(2, '0');
};

// The mean over a window of a twentieth of the points; of logarithms on a logarithmic scale.
function smoothed(ys, log) {
  const half = Math.max(1, Math.round(ys.length / 40));
  return ys.map((y, i) => {
    if (y === null) return null;
    const near = ys.slice(Math.max(0, i - half), i + half + 1).filter((x) => x !== null);
    const mean = near.map((x) => log ? Math.log(x) : x).reduce((a, b) => a + b, 0) / near.length;
    return log ? Math.exp(mean) : mean;
  });
}

function tickLabel(t) {
  if (t === null) return '';
  const size = Math.abs(t);
  const text = size >= 1e4 || size > 0 && size < 1e-3 ? t.toExponential() : String(Number(t.toPrecision(4)));
  return text.replace('e+', 'e').replaceAll('-', '\u2212');
}

// Returns {tables, series, bands} of a chart. A table is [steps, values] and belongs to a series.
function layers(chart) {
  const log = chart.scale === 'log', tables = [], series = [], bands = [];
  const add = (s, ys, options) => {
    tables.push([s.x, log ? ys.map((y) => y > 0 ? y : null) : ys]);
    series.push({label: s.label, stroke: colour(s.hue), width: 1.6, points: {show: s.x.length <= 16, size: 5},
      dash: s.dashed ? [4, 3] : undefined, ...options});
    return series.length;  // uPlot counts the steps as series 0
  };
  const hidden = {class: 'u-hidden', points: {show: false}};
  if (chart.scale === 'stack') {
    let total = new Map();
    let below = null;
    for (const s of chart.series) {
      const sums = s.x.map((x, i) => (total.get(x) || 0) + (s.y[i] || 0));
      s.x.forEach((x, i) => total.set(x, sums[i]));
      const options = {width: 1, points: {show: false}, value: (u, v, si, i) => number(own(s, u, i))};
      if (below === null) options.fill = faded(s.hue, 0.7);
      const index = add(s, sums, options);
      if (below !== null) bands.push({series: [index, below], fill: faded(s.hue, 0.7)});
      below = index;
    }
    return {tables, series, bands};
  }
  for (const s of chart.series) {
    if (s.low) {
      const high = add(s, s.high, {...hidden, width: 0}), low = add(s, s.low, {...hidden, width: 0});
      bands.push({series: [high, low], fill: faded(s.hue, 0.13)});
    }
    if (s.x.length > MANY) {
      add(s, s.y, {...hidden, width: 1, stroke: faded(s.hue, 0.3)});
      const ys = log ? s.y.map((y) => y > 0 ? y : null) : s.y;
      add(s, smoothed(ys, log), {points: {show: false}, value: (u, v, si, i) => number(own(s, u, i))});
    } else {
      add(s, s.y, {value: (u, v, si, i) => number(own(s, u, i))});
    }
  }
  return {tables, series, bands};
}

// The value of a series at the update nearest to the cursor; the last one without a cursor.
function own(s, u, index) {
  if (index === null || index === undefined) return s.y.at(-1);
  const step = u.data[0][index];
  let best = 0;
  s.x.forEach((x, i) => { if (Math.abs(x - step) < Math.abs(s.x[best] - step)) best = i; });
  return s.y[best];
}

function rangeY(scale) {
  return (u, low, high) => {
    if (low === null) return [0, 1];
    if (scale === 'log') return uPlot.rangeLog(low, high, 10, high / low > 100);
    if (scale === 'stack' || low > 0 && low < 0.5 * high) low = 0;
    if (high - low < 1e-12 + 1e-6 * Math.abs(high)) {
      return low >= 0 ? [0, high ? high * 1.25 : 1] : [low * 1.5, 0];
    }
    const pad = 0.04 * (high - low);
    return [low === 0 ? 0 : low - pad, high + pad];
  };
}

function addChart(chart, parent, steps) {
  const {tables, series, bands} = layers(chart);
  const plot = make('div', {class: 'plot'});
  const box = make('figure', {class: `chart ${chart.scale}`}, make('h4', {}, plain(chart.title)),
    make('p', {class: 'unit'}, chart.unit + (chart.scale === 'log' ? ', log' : '')), plot);
  if (chart.note) box.append(make('p', {class: 'note'}, chart.note));
  parent.append(box);
  const axis = {stroke: () => css('--faint'), font: '11px system-ui, sans-serif', ticks: {show: false}};
  const isPower = (t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-6;
  const filter = (u, ticks) => chart.scale === 'log' && ticks.at(-1) > 20 * ticks[0]
    ? ticks.map((t) => isPower(t) ? t : null) : ticks;
  const grid = {stroke: () => css('--rule'), width: 1, filter};
  const options = {
    width: plot.clientWidth || 340, height: HEIGHT, bands,
    series: [{label: 'update', value: (u, x) => String(x ?? u.data[0].at(-1))}, ...series],
    scales: {x: {time: false, range: steps}, y: {distr: chart.scale === 'log' ? 3 : 1, range: rangeY(chart.scale)}},
    axes: [
      {...axis, grid: {show: false}, size: 24, space: 60, incrs: WHOLE_STEPS},
      {...axis, grid, size: 48, space: 24, values: (u, ticks) => ticks.map(tickLabel)},
    ],
    cursor: {sync: {key: 'report'}, drag: {x: false, y: false}, points: {size: 5}},
    legend: {markers: {width: 0, fill: (u, i) => i ? series[i - 1].stroke() : ''}},
  };
  const made = new uPlot(options, uPlot.join(tables), plot);
  plots.push({made, plot});
}

function showCurves() {
  if (!page.charts.length) return;
  $('#curves').hidden = false;
  const all = page.charts.flatMap((chart) => chart.series.flatMap((s) => [s.x[0], s.x.at(-1)]));
  const steps = [Math.min(...all), Math.max(...all)];
  if (steps[0] === steps[1]) steps.splice(0, 2, steps[0] - 1, steps[1] + 1);
  for (const section of new Set(page.charts.map((chart) => chart.section))) {
    const members = page.charts.filter((chart) => chart.section === section);
    const grid = make('div', {class: 'charts'});
    if (section === 'Other series') {
      const details = make('details', {}, make('summary', {}, `Other series (${members.length})`), grid);
      details.addEventListener('toggle', () => members.forEach((chart) => addChart(chart, grid, steps)), {once: true});
      $('#curves').append(details);
    } else {
      $('#curves').append(make('h3', {}, section), grid);
      members.forEach((chart) => addChart(chart, grid, steps));
    }
  }
  addEventListener('resize', () => plots.forEach(({made, plot}) => made.setSize({width: plot.clientWidth, height: HEIGHT})));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => plots.forEach(({made}) => made.redraw(false)));
}

// Episodes.

// Characters that would reorder or hide the text around them are shown by their number.
const ODD = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff])/g;
const code = (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`;
const plain = (text) => String(text).replace(ODD, code);
const NUMBERS = {behaviour_logp: 'log-prob', old_logp: 'old log-prob', ratio: 'ratio',
  advantages: 'advantage', values: 'value'};
const MODES = {mask: null, advantage: 'advantages', ratio: 'ratio', value: 'values', 'log-prob': 'behaviour_logp'};
const filters = {};
let visible = [], current = null, mode = 'mask';

const right = (episode) => Boolean(episode.right);
const plural = (n, noun) => `${n} ${noun}${n === 1 ? '' : 's'}`;

function addFilter(name, label, valueOf) {
  const values = [...new Set(page.episodes.map(valueOf))].sort((a, b) => a - b || (a < b ? -1 : 1));
  const choice = make('select', {'aria-label': name, onchange: () => fillList()}, make('option', {value: ''}, name));
  values.forEach((value) => choice.append(make('option', {value}, label(value))));
  $('.filters').append(choice);
  filters[name] = {choice, valueOf};
}

function fillList(wanted) {
  visible = page.episodes.filter((episode) => Object.values(filters).every(
    ({choice, valueOf}) => choice.value === '' || String(valueOf(episode)) === choice.value));
  $('.list').replaceChildren(...visible.map((episode, index) => make('button', {onclick: () => show(index)},
    make('span', {class: right(episode) ? 'yes' : 'no', title: right(episode) ? 'right' : 'wrong'}, right(episode) ? '✓' : '✗'),
    make('span', {class: 'q'}, plain(episode.question)),
    make('small', {}, [...(episode.role ? [episode.role] : []), `${episode.kind} ${episode.step}`, ...(episode.hops ? [plural(episode.hops, 'hop')] : []),
      plural((episode.actions || []).length, 'turn')].join(' · ')))));
  if (!visible.length) $('.list').append(make('p', {class: 'muted', style: 'padding:8px'}, 'No such episode is shown.'));
  show(visible.length ? Math.min(wanted || 0, visible.length - 1) : null);
}

function show(index) {
  $('.list [aria-current]')?.removeAttribute('aria-current');
  current = index;
  if (index === null) { $('#episodes article').replaceChildren(); return; }
  const button = $('.list').children[index];
  button.setAttribute('aria-current', 'true');
  const list = $('.list');
  if (button.offsetTop - list.offsetTop < list.scrollTop) list.scrollTop = button.offsetTop - list.offsetTop;
  const under = button.offsetTop - list.offsetTop + button.offsetHeight - list.clientHeight;
  if (under > list.scrollTop) list.scrollTop = under;
  showEpisode(visible[index]);
}

function showEpisode(episode) {
  const agent = episode.turn_ids.filter((turn) => turn > 0).length;
  const facts = [['gold', (episode.answers || []).join(' | ')], ['score', number(episode.score)],
    ...Object.entries(episode.metrics || {}).map(([name, value]) => [name, number(value)]), ['tokens', episode.tokens.length], ['of the agent', agent],
    ['data set', episode.dataset], ['task', episode.task]];
  if (episode.role) facts.unshift(['role', episode.role], ['of episode', episode.of_episode]);
  if (episode.truncated) facts.push(['ended by', 'a limit']);
  if (episode.failed) facts.push(['retrieval', 'failed']);
  const buttons = Object.entries(MODES).map(([name, field]) => make('button', {
    'aria-pressed': String(name === mode), disabled: Boolean(field) && !has(episode, field),
    onclick: () => { mode = name; showEpisode(episode); }}, name));
  const scale = scaleOf(episode, MODES[mode]);
  $('#episodes article').replaceChildren(
    make('p', {class: 'question'}, plain(episode.question)),
    make('div', {class: 'facts'}, ...facts.map(([name, value]) => make('span', {}, `${name} `, make('b', {}, plain(value))))),
    make('div', {class: 'colours'}, make('span', {class: 'switch', role: 'group', 'aria-label': 'colour tokens by'}, ...buttons),
      legendOf(episode, scale)),
    ...pieces(episode, scale));
  for (const box of document.querySelectorAll('.piece.forced')) {
    if (box.querySelector('.tokens').scrollHeight < 330) continue;
    box.classList.add('cut');
    box.append(make('button', {class: 'more', onclick: (event) => { box.classList.remove('cut'); event.target.remove(); }},
      'Show all of it'));
  }
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
  } else if (mode === 'mask') {
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
  let agentIndex = 0, start = 0;
  while (start < episode.tokens.length) {
    const turn = episode.turn_ids[start];
    let end = start;
    while (end < episode.tokens.length && episode.turn_ids[end] === turn) end++;
    const title = turn > 0 ? `turn ${turn} · ${(episode.actions || [])[turn - 1] || 'unknown'}`
      : start === 0 ? 'prompt' : 'observation';
    const body = make('div', {class: 'tokens'}), lines = {run: 0};
    for (let i = start; i < end; i++) {
      body.append(tokenNode(episode, i, turn > 0 ? agentIndex++ : null, scale, lines));
    }
    boxes.push(make('section', {class: `piece ${turn > 0 ? 'agent' : 'forced'}`},
      make('header', {}, make('b', {}, title), make('span', {}, plural(end - start, 'token'))), body));
    start = end;
  }
  return boxes;
}

function tokenNode(episode, index, agentIndex, scale, lines) {
  const node = make('span', {class: 't'});
  for (const part of String(episode.pieces[index] ?? '').split(new RegExp(`(\n| )|${ODD.source}`))) {
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
  if (agentIndex !== null) {
    const field = MODES[mode], x = field && has(episode, field) ? episode[field][agentIndex] : undefined;
    if (!field || (x !== null && x !== undefined)) node.style.background = scale.paint(x);
    if (episode.clipped && episode.clipped[agentIndex]) node.classList.add('clipped');
  }
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

function showEpisodes() {
  if (!page.groups.length) return;
  $('#episodes').hidden = false;
  $('#shown').textContent = page.groups.map((g) => `${g.label}: ${g.shown} of ${g.total} shown`).join(' · ') +
    '. Right and wrong ones in equal parts where both exist. Keys ← and → go through the list.';
  addFilter('right and wrong', (v) => v, (e) => (right(e) ? 'right' : 'wrong'));
  addFilter('train and eval', (v) => v, (e) => e.kind);
  if (page.episodes.some((e) => e.hops)) addFilter('any hops', (v) => plural(v, 'hop'), (e) => e.hops);
  if (page.episodes.some((e) => e.role)) addFilter('any role', (v) => v, (e) => e.role || '');
  addFilter('any update', (v) => `update ${v}`, (e) => e.step);
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.get('colour') in MODES) mode = wanted.get('colour');
  fillList(Number(wanted.get('episode')) || 0);
  addEventListener('keydown', (event) => {
    if (event.target.closest('select, input') || event.altKey || event.ctrlKey || event.metaKey) return;
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move || current === null) return;
    event.preventDefault();
    show(Math.max(0, Math.min(visible.length - 1, current + move)));
  });
  $('#episodes article').addEventListener('pointermove', tokenTip);
  $('#episodes article').addEventListener('click', tokenTip);
  $('#episodes article').addEventListener('pointerleave', () => { $('.tip').hidden = true; });
}

showHeader();
showCurves();
showEpisodes();
