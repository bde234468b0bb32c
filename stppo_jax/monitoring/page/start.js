// Starts the page, and asks the viewer's server for changed runs.

const POLL_MS = 3000;
const FIRST_RUNS = 16;  // drawn at the start
const versions = new Map();  // run -> version of the files that were loaded

async function getJson(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function refresh() {
  showRuns();
  showHeader();
  showCurves();
  showDifferences();
  showEpisodes();
}

// Loads the chosen runs whose files have changed. Returns whether there were any. A run that cannot
// be read hides no other one.
async function loadChosen() {
  const stale = state.listed.filter(({name, version}) => state.chosen.includes(name) && versions.get(name) !== version);
  const failures = [];
  for (const {name, version} of stale) {
    try {
      state.runs.set(name, await getJson(`/api/run?name=${encodeURIComponent(name)}`));
      versions.set(name, version);
    } catch (error) {
      failures.push(`${name} cannot be shown (${error.message}).`);
    }
  }
  showProblem(failures.join(' '));
  return stale.length > failures.length;
}

function showProblem(text) {
  $('#server').textContent = plain(text);
  $('#server').hidden = !text;
}

async function poll() {
  try {
    const runs = await getJson('/api/runs');
    const isFirst = !state.listed.length;
    state.listed = runs;
    if (isFirst) {
      const newest = [...runs].sort((a, b) => (a.age_s ?? Infinity) - (b.age_s ?? Infinity)).slice(0, FIRST_RUNS).map((run) => run.name);
      const named = new URLSearchParams(location.hash.slice(1)).getAll('run');
      state.chosen = runs.map((run) => run.name).filter((name) => (named.length ? named : newest).includes(name));
    }
    if (await loadChosen() || isFirst) refresh();
    else showRuns();
  } catch (error) {
    showProblem(`The viewer's server does not answer (${error.message}). The page tries again.`);
  }
  setTimeout(poll, POLL_MS);
}

async function chooseRuns() {
  await loadChosen();
  refresh();
}

function start() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.get('colour') in MODES) browser.mode = wanted.get('colour');
  listenToEpisodes();
  $('#smoothing').addEventListener('input', showCurves);
  $('#bands').addEventListener('change', refresh);
  $('#zoom_out').addEventListener('click', () => setZoom(null));
  addEventListener('resize', () => plots.forEach(({made, plot}) => made.setSize({width: plot.clientWidth, height: HEIGHT})));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => plots.forEach(({made}) => made.redraw(false)));
  if (state.live) poll();
  else {
    refresh();
    if (wanted.get('episode')) fillList(Number(wanted.get('episode')));
  }
}

start();
