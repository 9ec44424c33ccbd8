"use strict";
// What the charts show: each function here makes a chart of the picture, for one scenario or for all of them (""), or
// null where there is no data. A chart is lines, and what belongs to them:
//   lines    see `line`
//   x        what it is drawn over, where that is not time; across: what that axis says, and whether it is of latencies
//   bounds   limits on what it is drawn over; rest: the place that the legend tells of while nobody points
//   seconds  latencies, whose unit is chosen by their size; log: on a logarithmic axis
//   unit     of the left axis otherwise; right: whether there is a right axis
//   limits   to be drawn in
//   note(i)  what is said of a column beside its values
//   paint    what uPlot does not draw (paint.js); stacked: lines are parts of a whole; bare: without axes

const NEEDED = {p50: 2, p95: 20, p99: 100}; // samples without which a percentile is no more than the maximum

// A label, a value or null per column, how it looks (color, width, dash, box, hatched), the axis that it is on, and
// text(i), which is what the legend says of a column. A `key` says nothing; a `silent` one is not in the legend.
function line(label, values, look, text = (value) => number(value)) {
  return {label, values, width: 2, dash: [], axis: "y", text: (i) => text(values[i], i), ...look};
}

function present(chart) {
  return chart.lines.some((each) => each.values.some((value) => value != null)) ? chart : null;
}

function scopeOf(column, scenario) {
  const scopes = column.scopes ?? {};
  return Object.hasOwn(scopes, scenario) ? scopes[scenario] : null; // a scenario may be called `constructor`
}

function scopesOf(scenario) {
  return picture.columns.map((column) => scopeOf(column, scenario));
}

function limitsOn(metrics, scenario, statistic) {
  return picture.limits.filter((limit) => metrics.includes(limit.metric) && typeof limit.bound === "number" &&
    (!statistic || limit.statistic === statistic) && (!scenario || limit.scope === scenario));
}

function samples(scope, metric) {
  return scope?.[metric]?.count ?? 0;
}

// ---- Latencies

function percentile(scopes, metric, name, look, label = name) {
  const few = (i) => samples(scopes[i], metric) < (NEEDED[name] ?? 0);
  const text = (value, i) => duration(value) + (value != null && few(i) ? "*" : "");
  return line(label, scopes.map((scope) => scope?.[metric]?.[name] ?? null), look, text);
}

function latencies(scopes, metric, lines, limits) {
  return {lines, limits, note: (i) => `n ${count(samples(scopes[i], metric))}`, seconds: true, log: chosen.log};
}

function ttftChart(scenario) {
  const scopes = scopesOf(scenario);
  const lines = [
    percentile(scopes, "ttft", "p50", {color: "p50", width: 1.5}),
    percentile(scopes, "ttft", "p95", {color: "p95", width: 2.5}),
    percentile(scopes, "ttft", "p99", {color: "p99", width: 1.5, dash: [6, 3]}),
  ];
  return present(latencies(scopes, "ttft", lines, limitsOn(["ttft"], scenario)));
}

function scenariosChart() {
  if (picture.scenarios.length < 2) return null;
  const lines = picture.scenarios.map((name, order) => {
    const scopes = scopesOf(name), dash = [[], [6, 3], [2, 2]][Math.floor(order / 8) % 3];
    const look = {color: `c${order % 8}`, dash};
    const each = percentile(scopes, "ttft", "p95", look, name);
    return {...each, text: (i) => `${each.text(i)} (n ${count(samples(scopes[i], "ttft"))})`};
  });
  return present({lines, limits: limitsOn(["ttft"], "", "p95"), seconds: true, log: chosen.log});
}

function itlChart(scenario) {
  const scopes = scopesOf(scenario), right = !chosen.log, axis = right ? "right" : "y"; // it would flatten the others
  const lines = [
    percentile(scopes, "itl", "p50", {color: "p50", width: 1.5}),
    percentile(scopes, "itl", "p99", {color: "p99", dash: [6, 3]}),
    percentile(scopes, "itl", "max", {color: "longest", width: 1.5, dash: [2, 3], axis}, "longest gap"),
  ];
  const longest = limitsOn(["itl_max"], scenario).map((limit) => ({...limit, axis}));
  return present({...latencies(scopes, "itl", lines, [...limitsOn(["itl"], scenario), ...longest]), right});
}

// A cell of a heat map goes from one of these to the next, as the picture has it.
function heatEdge(k) {
  return 1e-6 * 10 ** (k / 10);
}

function sum(values) {
  return values.reduce((before, value) => before + value, 0);
}

// The cell that the smallest 2 % end in: tokens that came together have gaps of nearly 0, which would stretch the axis.
function lowestCell(heats) {
  const numbers = new Map();
  for (const [k, value] of heats.flat()) numbers.set(k, (numbers.get(k) ?? 0) + value);
  let left = 0.02 * sum([...numbers.values()]);
  return [...numbers.keys()].sort((one, other) => one - other).find((k) => (left -= numbers.get(k)) < 0);
}

function heatChart(metric, scenario) {
  const heats = scopesOf(scenario).map((scope) => scope?.[metric]?.heat ?? []), lowest = lowestCell(heats);
  const cells = heats.map((heat) => {
    const under = sum(heat.filter(([k]) => k <= lowest).map(([, value]) => value));
    return new Map([...(under ? [[lowest, under]] : []), ...heat.filter(([k]) => k > lowest)]);
  });
  const totals = cells.map((each) => sum([...each.values()]));
  const edge = (pick, more) => cells.map((each) => (each.size ? heatEdge(pick(...each.keys()) + more) : null));
  const lines = [line("from", edge(Math.min, 0), {silent: true}), line("to", edge(Math.max, 1), {silent: true})];
  const note = (i) => `n ${count(totals[i] ?? 0)}`;
  return present({lines, cells, totals, lowest, note, seconds: true, log: true, heat: true, paint: paintHeat});
}

// ---- Distributions

// The share of samples that took at most so long. What is higher and further left is better.
function distributionChart(metric, scenario) {
  const {at_s: x, shares} = picture.distributions?.[metric] ?? {at_s: [], shares: {}};
  const several = picture.scenarios.length > 1, names = several ? picture.scenarios : [];
  const looks = [["", {color: "text", width: 1.5, dash: several ? [6, 3] : []}],
    ...names.map((name, order) => [name, {color: `c${order % 8}`}])];
  const lines = looks.filter(([name]) => Object.hasOwn(shares, name) && (!scenario || name === scenario))
    .map(([name, look]) => line(name || "all", shares[name], look, (share) => `${number(100 * share, 4)} %`));
  const bounds = limitsOn([metric], scenario), rest = lines.at(0)?.values.findIndex((share) => share >= 0.95) ?? 0;
  const from = x[Math.max(0, x.findIndex((_, i) => lines.some(({values}) => values[i] >= 0.005)) - 1)];
  const note = (i) => `at most ${duration(x[i])}`, across = {seconds: true, log: chosen.log, from};
  return present({lines, x, across, bounds, rest, note, shares: true, paint: paintBounds, drawn: true});
}

// ---- Rates and counts

// Not all of a column that may still change has been reported, nor by all workers: rates and streams would seem to fall.
function goesOn({index}) {
  return picture.state === "running" && index >= (picture.next ?? Infinity);
}

function gauge(name) {
  return picture.columns.map((column) => (goesOn(column) ? null : column[name] ?? null));
}

// Nothing of a scenario in a column is a rate of zero; a rate that there is not stays absent.
function rate(scopes, name) {
  return scopes.map((scope, i) => (goesOn(picture.columns[i]) ? null : scope ? scope[name] ?? null : 0));
}

function loadChart(scenario) {
  const scopes = scopesOf(scenario), {columns} = picture, all = scenario ? ", all scenarios" : "";
  const peak = (i) => (columns[i]?.in_flight_peak == null ? "" : `, peak ${count(columns[i].in_flight_peak)}`);
  const aside = {axis: "right", width: 1.5};
  const offered = line("offered", rate(scopes, "offered_per_s"), {color: "offered", width: 1.5, dash: [5, 4]});
  const lines = [
    ...(scopes.some((scope) => scope?.offered_per_s != null) ? [offered] : []),
    line("sent", rate(scopes, "sent_per_s"), {color: "sent", width: 1.5}),
    line("completed", rate(scopes, "ok_per_s"), {color: "done", width: 2.5}),
    line(`streams in flight${all}`, gauge("in_flight"), {color: "streams", dash: [6, 3], ...aside},
      (value, i) => number(value) + peak(i)),
    line(`users${all}`, gauge("users"), {color: "users", dash: [2, 3], ...aside}, count),
  ];
  return present({lines, limits: limitsOn(["request_per_s"], scenario), unit: "requests/s", right: true});
}

function tokensChart(scenario) {
  const scopes = scopesOf(scenario);
  const lines = [
    line("output", rate(scopes, "output_tokens_per_s"), {color: "output", width: 2.5}),
    line("input", rate(scopes, "input_tokens_per_s"), {color: "input", dash: [6, 3]}),
  ];
  return present({lines, limits: limitsOn(["output_tokens_per_s", "input_tokens_per_s"], scenario), unit: "tokens/s"});
}

// In the order in which they are stacked; neighbours are told apart best, so the likeliest come first.
const OUTCOMES = ["ok", "cancelled", "stream_error", "http_5xx", "connection_lost", "first_token_timeout", "empty",
  "truncated", "http_429", "connect_failed", "http_4xx", "token_timeout", "idle_timeout", "total_timeout", "malformed",
  "not_streamed", "redirected"];

function outcomeLook(kind, order) {
  if (order < 2) return {color: kind, box: true};
  return {color: `f${(order - 2) % 8}`, box: true, hatched: Math.floor((order - 2) / 8) % 2 === 1};
}

function outcomesChart(scenario) {
  const counts = scopesOf(scenario).map((scope) => new Map(Object.entries(scope?.outcomes ?? {})));
  const seen = new Set(counts.flatMap((each) => [...each].filter(([, ended]) => ended).map(([kind]) => kind)));
  const kinds = [...new Set([...OUTCOMES, ...seen])]; // one that is not known here gets the next look
  const lines = kinds.map((kind, order) => {
    const ended = counts.map((each) => each.get(kind) ?? 0);
    const perSecond = picture.columns.map((each, i) => (goesOn(each) ? null : ended[i] / (each.end_s - each.start_s)));
    return line(kind, perSecond, outcomeLook(kind, order), (value, i) => `${count(ended[i])} (${number(value)}/s)`);
  });
  const shown = lines.filter(({label}) => seen.has(label));
  return present({lines: shown, unit: "requests/s", stacked: true, paint: paintStack});
}

function fidelityText(told) {
  if (!told) return "unknown";
  const found = told.limited ? "limited by the generator" : "measured the server";
  return told.text && told.text !== found ? `${found}: ${told.text}` : found;
}

function fidelityChart() {
  const told = picture.columns.map((column) => column.fidelity), known = told.map((each) => (each ? 0 : null));
  const lines = [
    line("measured the server", known, {color: "ok", box: true, key: true}),
    line("limited by the generator", known, {color: "limited", box: true, hatched: true, key: true}),
  ];
  return present({lines, note: (i) => fidelityText(told[i]), paint: paintFidelity, bare: true});
}

// ---- Stages

function stageName({stage, value}) {
  return value == null ? `stage ${stage}` : `stage ${stage}: ${count(value)}`;
}

// What is said of several limits is what is said of the worst one.
function stageState({limits}) {
  const states = (limits ?? []).map((limit) => limit.state);
  return ["missed", "inconclusive", "met"].find((state) => states.includes(state)) ?? "no limit";
}

function stagesChart(scenario) {
  const throughput = (stage) => stage.rates.request_per_s;
  const stages = picture.stages.filter((stage) => stage.rates?.request_per_s != null && stage.ttft?.p95 != null)
    .sort((one, other) => throughput(one) - throughput(other));
  const at = (value, i) =>
    `${duration(value)} at ${number(throughput(stages[i]))} requests/s, ${stageState(stages[i])}`;
  const lines = [line("TTFT p95", stages.map((stage) => stage.ttft.p95), {color: "p95"}, at)];
  const limits = limitsOn(["ttft"], scenario, "p95"), note = (i) => stageName(stages[i]);
  return present({
    lines, limits, note, stages, x: stages.map(throughput), across: {label: "completed requests/s"}, seconds: true,
    log: chosen.log, paint: paintStages,
  });
}

// What belongs to an instant: a thin line in all charts over time.
function happenings() {
  const stages = picture.stages.map((stage) => ({at_s: stage.since_s, text: stageName(stage)}));
  const end = picture.warming_up ? "end of the warm-up, at the latest" : "end of the warm-up";
  const warmup = {at_s: picture.warmup_s, text: end};
  return [warmup, ...stages, ...picture.marks].filter(({at_s}) => at_s != null);
}

// In the order in which an engineer looks. `every`: one chart for all scenarios, whichever is chosen.
const CHARTS = [
  {id: "ttft", place: "charts", title: "Time to first token", of: ttftChart},
  {id: "scenarios", place: "charts", title: "TTFT p95 by scenario", of: scenariosChart, every: true},
  {id: "itl", place: "charts", title: "Inter-token latency", of: itlChart},
  {id: "load", place: "charts", title: "Requests and streams", of: loadChart},
  {id: "tokens", place: "charts", title: "Tokens", of: tokensChart},
  {id: "outcomes", place: "charts", title: "Outcomes of requests", of: outcomesChart, height: 132},
  {id: "fidelity", beside: "outcomes", title: "Fidelity", of: fidelityChart, every: true, height: 18},
  {id: "ttft-heat", place: "heat", title: "TTFT heat map", of: (scenario) => heatChart("ttft", scenario)},
  {id: "itl-heat", place: "heat", title: "ITL heat map", of: (scenario) => heatChart("itl", scenario)},
  {id: "ttft-shares", place: "heat", title: "TTFT: share of requests",
    of: (scenario) => distributionChart("ttft", scenario)},
  {id: "itl-shares", place: "heat", title: "ITL: share of gaps", of: (scenario) => distributionChart("itl", scenario)},
  {id: "e2el-shares", place: "heat", title: "End-to-end latency: share of requests",
    of: (scenario) => distributionChart("e2el", scenario)},
  {id: "stages", place: "heat", title: "Stages: throughput and TTFT p95", of: stagesChart, every: true},
];
