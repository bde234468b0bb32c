// Curves.

const HEIGHT = 190;
const MANY = 120;  // points of a series above which its running mean is drawn over them
const COLOURS = 8;
const WHOLE_STEPS = [0, 1, 2, 3, 4, 5].flatMap((e) => [1, 2, 5].map((m) => m * 10 ** e));
let plots = [];
let zoom = null;  // [first, last] update
let otherIsOpen = false;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (hue) => () => css(`--c${hue % COLOURS}`);
const faded = (hue, alpha) => () => {
  const text = css(`--c${hue % COLOURS}`);
  return text + Math.round(255 * alpha).toString(16).padStart(2, '0');
};

// Returns the points on each side of a running mean; 0: none.
function halfWindow(count) {
  const share = Number($('#smoothing').value) / 100;
  if (share > 0) return Math.max(1, Math.round(count * share / 2));
  return count > MANY ? Math.round(count / 40) : 0;
}

// The running mean; of logarithms on a logarithmic scale.
function smoothed(ys, half, log) {
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

// Returns the charts of the chosen runs. Several runs have a chart per metric, with a line per run.
// Layers of a stack that are 0 in all runs have no chart.
function mergedCharts() {
  const groups = seedGroups();
  if (groups.length === 1 && groups[0].runs.length === 1) return groups[0].runs[0].charts;
  const drawn = shownRuns().flatMap((run) => run.charts);
  const crowded = new Set(drawn.filter((chart) => chart.series.length > 1).map((chart) => chart.title));
  const charts = new Map();  // by metric
  const labels = new Map();  // the longest: a run with one data set does not name it
  for (const chart of drawn) {
    const isStack = chart.scale === 'stack';
    for (const s of chart.series) {
      if (s.label.length > (labels.get(s.name) || '').length) labels.set(s.name, s.label);
      if (charts.has(s.name) || isStack && !s.y.some((y) => y)) continue;
      charts.set(s.name, {...chart, scale: isStack ? 'linear' : chart.scale, metric: s.name, series: []});
    }
  }
  for (const [name, chart] of charts) {
    if (crowded.has(chart.title)) chart.title += `: ${labels.get(name)}`;
  }
  groups.forEach((group, hue) => {
    for (const [name, chart] of charts) {
      const parts = group.runs.flatMap((run) => run.charts.flatMap((one) => one.series.filter((s) => s.name === name)));
      if (parts.length) chart.series.push({...meanOf(parts), name, hue, label: group.label});
    }
  });
  return [...charts.values()];
}

// The values of a series at these steps, on the line between two points: a long series holds only
// some steps, and others than those of another seed. null: the series has no value there.
function valuesAt({x, y}, steps) {
  let i = 0;
  return steps.map((step) => {
    while (i + 1 < x.length && x[i + 1] <= step) i++;
    if (x[i] === step) return y[i];
    if (step < x[i] || i + 1 === x.length || y[i] === null || y[i + 1] === null) return null;
    return y[i] + (y[i + 1] - y[i]) * (step - x[i]) / (x[i + 1] - x[i]);
  });
}

// Returns the mean of the runs of several seeds, with their smallest and largest values as a band.
function meanOf(parts) {
  if (parts.length === 1) return {x: parts[0].x, y: parts[0].y};
  const all = [...new Set(parts.flatMap(({x}) => x))].sort((a, b) => a - b);
  const columns = parts.map((part) => valuesAt(part, all));
  const rows = all.map((step, i) => [step, columns.map((column) => column[i]).filter((y) => y !== null)]);
  const used = rows.filter(([, ys]) => ys.length), steps = used.map(([step]) => step), values = used.map(([, ys]) => ys);
  return {x: steps, y: values.map((v) => v.reduce((a, b) => a + b, 0) / v.length),
    low: values.map((v) => Math.min(...v)), high: values.map((v) => Math.max(...v))};
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
    const half = halfWindow(s.x.length);
    const value = (u, v, si, i) => number(own(s, u, i));
    if (half) {
      add(s, s.y, {...hidden, width: 1, stroke: faded(s.hue, 0.3)});
      const ys = log ? s.y.map((y) => y > 0 ? y : null) : s.y;
      add(s, smoothed(ys, half, log), {points: {show: false}, value});
    } else {
      add(s, s.y, {value});
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

function setZoom(range) {
  zoom = range;
  $('#zoom_out').hidden = !zoom;
  for (const {made, steps} of plots) made.setScale('x', {min: (zoom || steps)[0], max: (zoom || steps)[1]});
}

function addChart(chart, parent, steps) {
  const {tables, series, bands} = layers(chart);
  const plot = make('div', {class: 'plot'});
  const scale = chart.scale === 'log' ? `${chart.unit}, log` : chart.unit;
  const unit = plain([scale, chart.title === chart.metric ? '' : chart.metric].filter((text) => text).join(' · '));
  const box = make('figure', {class: `chart ${chart.scale}`}, make('h4', {}, plain(chart.title)),
    make('p', {class: 'unit'}, unit), plot);
  if (chart.note) box.append(make('p', {class: 'note'}, chart.note));
  parent.append(box);
  const axis = {stroke: () => css('--faint'), font: '11px system-ui, sans-serif', ticks: {show: false}};
  const isPower = (t) => Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-6;
  const filter = (u, ticks) => chart.scale === 'log' && ticks.at(-1) > 20 * ticks[0]
    ? ticks.map((t) => isPower(t) ? t : null) : ticks;
  const grid = {stroke: () => css('--rule'), width: 1, filter};
  const select = (u) => {
    if (u.select.width < 8) return;
    const first = u.posToVal(u.select.left, 'x'), last = u.posToVal(u.select.left + u.select.width, 'x');
    u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    setZoom([first, last]);
  };
  const options = {
    width: plot.clientWidth || 340, height: HEIGHT, bands,
    series: [{label: 'update', value: (u, x) => String(x ?? u.data[0].at(-1))}, ...series],
    scales: {x: {time: false, range: (u, low, high) => low === null ? steps : [low, high]},
      y: {distr: chart.scale === 'log' ? 3 : 1, range: rangeY(chart.scale)}},
    axes: [
      {...axis, grid: {show: false}, size: 24, space: 60, incrs: WHOLE_STEPS},
      {...axis, grid, size: 48, space: 24, values: (u, ticks) => ticks.map(tickLabel)},
    ],
    cursor: {sync: {key: 'report', setSeries: false}, drag: {x: true, y: false, setScale: false}, points: {size: 5},
      bind: {dblclick: () => () => setZoom(null)}},
    hooks: {setSelect: [select]},
    legend: {markers: {width: 0, fill: (u, i) => i ? series[i - 1].stroke() : ''}},
  };
  const made = new uPlot(options, uPlot.join(tables), plot);
  const range = zoom || steps;
  made.setScale('x', {min: range[0], max: range[1]});
  plots.push({made, plot, steps});
}

function showCurves() {
  const charts = mergedCharts(), body = $('#curves .sections');
  const height = body.offsetHeight;
  body.style.minHeight = `${height}px`;  // the page does not jump while the charts are made again
  plots.forEach(({made}) => made.destroy());
  plots = [];
  body.replaceChildren();
  $('#curves').hidden = !charts.length;
  if (!charts.length) return;
  const all = charts.flatMap((chart) => chart.series.flatMap((s) => [s.x[0], s.x.at(-1)]));
  const steps = [Math.min(...all), Math.max(...all)];
  if (steps[0] === steps[1]) steps.splice(0, 2, steps[0] - 1, steps[1] + 1);
  for (const section of new Set(charts.map((chart) => chart.section))) {
    const members = charts.filter((chart) => chart.section === section);
    const grid = make('div', {class: 'charts'});
    if (section === 'Other series') {
      const details = make('details', {}, make('summary', {}, `Other series (${members.length})`), grid);
      const fill = () => { if (!grid.childElementCount) members.forEach((chart) => addChart(chart, grid, steps)); };
      details.addEventListener('toggle', () => { otherIsOpen = details.open; if (details.open) fill(); });
      body.append(details);
      details.open = otherIsOpen;
    } else {
      body.append(make('h3', {}, section), grid);
      members.forEach((chart) => addChart(chart, grid, steps));
    }
  }
  body.style.minHeight = '';
}
