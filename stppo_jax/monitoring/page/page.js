'use strict';
// The state of the page, the table of runs, the header and the differences of configs.
// A run is the data of `page_data` in report.py. Text is set with textContent and is never markup.
const embedded = JSON.parse(document.getElementById('page_json').textContent);
const state = {
  live: embedded.live,
  listed: [],  // rows of /api/runs
  runs: new Map(embedded.runs.map((run) => [run.name, run])),  // loaded runs by name
  chosen: embedded.runs.map((run) => run.name),  // names of the runs that are drawn
};
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

// Characters that would reorder or hide the text around them are shown by their number.
const ODD = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff])/g;
const code = (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`;
const plain = (text) => String(text).replace(ODD, code);
const plural = (n, noun) => `${n} ${noun}${n === 1 ? '' : 's'}`;

function number(x) {
  if (x === null || x === undefined) return 'NaN';
  if (typeof x === 'string') return x;  // an infinite log-prob
  const size = Math.abs(x);
  let text = x === 0 ? '0' : size >= 1e5 || size < 1e-3 ? x.toExponential(1)
    : size >= 100 ? x.toFixed(0) : size >= 10 ? x.toFixed(1) : size >= 1 ? x.toFixed(2) : x.toFixed(3);
  if (Number.isInteger(x) && size < 1e5) text = String(x);
  return text.replace('e+', 'e').replaceAll('-', '\u2212');
}

function duration(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.round(seconds % 60)} s`;
}

const shownRuns = () => state.chosen.map((name) => state.runs.get(name)).filter((run) => run);

// Runs.

// Returns [{label, runs}]: the seeds of a sweep are one group, see report.seed_group.
function seedGroups() {
  const groups = new Map();
  for (const run of shownRuns()) {
    const key = ($('#bands').checked && run.seed_group) || run.name;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(run);
  }
  const members = [...groups.values()];
  const paths = members.map((runs) => commonStart(runs.map((run) => run.name.split('/'))));
  const shared = members.length > 1 ? commonStart(paths).length : 0;
  return members.map((runs, i) => {
    const name = paths[i].slice(shared).join('/') || runs[0].name;
    return {runs, label: runs.length > 1 ? `${name} (${plural(runs.length, 'seed')})` : name};
  });
}

// The elements with which all lists start.
function commonStart(lists) {
  const end = lists[0].findIndex((part, i) => lists.some((list) => list[i] !== part));
  return end < 0 ? lists[0] : lists[0].slice(0, end);
}

function showRuns() {
  $('#runs').hidden = state.listed.length < 2;
  const groups = seedGroups();
  const hueOf = (name) => groups.findIndex((group) => group.runs.some((run) => run.name === name));
  const rows = state.listed.map((row) => {
    const box = make('input', {type: 'checkbox', 'aria-label': `draw ${plain(row.name)}`, onchange: (event) => {
      state.chosen = state.listed.map((other) => other.name).filter((name) =>
        name === row.name ? event.target.checked : state.chosen.includes(name));
      chooseRuns();
    }});
    box.checked = state.chosen.includes(row.name);
    const swatch = make('span', {class: 'swatch'});
    if (hueOf(row.name) >= 0) swatch.style.background = `var(--c${hueOf(row.name) % COLOURS})`;
    const score = (x) => x === null ? '\u2013' : x.toFixed(3);
    return make('tr', {}, make('td', {}, make('label', {}, box, swatch, plain(row.name))),
      make('td', {}, row.updates === null ? '\u2013' : String(row.updates)), make('td', {}, score(row.last)),
      make('td', {}, score(row.best)), make('td', {class: row.warnings ? 'warning' : ''}, String(row.warnings)),
      make('td', {}, row.age_s === null ? '' : row.age_s < 90 ? 'now' : `${duration(row.age_s)} ago`));
  });
  const titles = ['run', 'updates', 'last score', 'best', 'warnings', 'written'];
  $('#runs tbody').replaceChildren(...rows);
  $('#runs thead').replaceChildren(make('tr', {}, ...titles.map((title) => make('th', {scope: 'col'}, title))));
}

// Header.

function showHeader() {
  const runs = shownRuns(), single = runs.length === 1 ? runs[0] : null;
  const title = single ? single.title : state.live ? 'Runs' : 'Report';
  document.title = title;
  $('h1').textContent = title;
  $('.head').hidden = !single;
  const warnings = runs.flatMap((run) => run.warnings.map((text) => single ? text : `${run.name}: ${text}`));
  let status = '';
  if (!runs.length) status = state.live ? 'No run is chosen, or none has begun.' : 'No metrics yet.';
  if (single) {
    status = 'No metrics yet.';
    if (single.updates !== null) {
      status = plural(single.updates, 'update') + (single.seconds ? ` in ${duration(single.seconds)}` : '');
    }
  }
  $('#status').replaceChildren(make('p', {class: 'muted'}, status),
    ...warnings.slice(0, 12).map((warning) => make('p', {class: 'warning'}, plain(warning))));
  $('#config').hidden = !single || !single.config;
  if (!single) return;
  $('#results').replaceChildren(single.results.rows.length ? resultsTable(single.results)
    : make('p', {class: 'muted'}, 'No evaluation yet.'));
  $('dl.config').replaceChildren(...single.highlights.map(([name, value]) => {
    const parts = plain(value).split('/').flatMap((part, i) => i ? ['/', make('wbr'), part] : [part]);
    return make('div', {}, make('dt', {}, name), make('dd', {}, ...parts));
  }));
  $('#outcomes').replaceChildren(outcomesTable(single.outcomes));
  $('#config pre').textContent = single.config;
  $('#provenance pre').textContent = JSON.stringify(single.provenance, null, 2);
  $('#provenance').hidden = !Object.keys(single.provenance).length;
}

// How the episodes of training and of the last evaluation ended.
function outcomesTable(outcomes) {
  const columns = Object.keys(outcomes);
  const names = [...new Set(columns.flatMap((column) => Object.keys(outcomes[column])))];
  const used = names.filter((name) => columns.some((column) => outcomes[column][name]));
  if (!used.length) return make('span');
  const head = make('tr', {}, ...['Episodes by outcome', ...columns].map((title) => make('th', {scope: 'col'}, title)));
  const rows = used.map((name) => make('tr', {}, make('th', {scope: 'row'}, name.replaceAll('_', ' ')),
    ...columns.map((column) => make('td', {}, String(outcomes[column][name] ?? 0)))));
  return make('table', {class: 'results'}, make('thead', {}, head), make('tbody', {}, ...rows));
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

// Differences of configs.

function showDifferences() {
  const runs = shownRuns();
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].sort();
  const different = names.filter((name) => new Set(runs.map((run) => run.settings[name])).size > 1);
  $('#differences').hidden = runs.length < 2;
  const head = make('tr', {}, make('th', {scope: 'col'}, 'setting'),
    ...runs.map((run) => make('th', {scope: 'col'}, plain(run.name))));
  const rows = different.map((name) => make('tr', {}, make('th', {scope: 'row'}, name),
    ...runs.map((run) => make('td', {}, plain(run.settings[name] ?? '\u2013')))));
  $('#differences .scroll').replaceChildren(different.length
    ? make('table', {class: 'differences'}, make('thead', {}, head), make('tbody', {}, ...rows))
    : make('p', {class: 'muted'}, 'The configs are the same.'));
}
