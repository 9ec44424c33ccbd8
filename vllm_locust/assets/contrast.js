"use strict";
// What a comparison shows (vllm_locust/contrast.py): runs of both sides over time, and the distribution of each side.

const SIDES = new Map([["base", "c0"], ["new", "c1"]]);
const DASHES = [[], [6, 3], [2, 2]]; // runs of one side

function contrastLines(scenario, name, text) {
  const runs = picture.contrast?.windows.lines[scenario] ?? [], seen = new Map();
  return runs.map((run) => {
    const number = seen.get(run.side) ?? 0;
    seen.set(run.side, number + 1);
    return line(run.label, run[name], {color: SIDES.get(run.side), dash: DASHES[number % DASHES.length]}, text);
  });
}

function contrastChart(scenario, name, more) {
  const x = picture.contrast?.windows.x_s ?? [], lines = contrastLines(scenario, name, more.seconds ? duration : (value) => number(value));
  const note = (i) => `${clock(x[i] - picture.window_s / 2)}–${clock(x[i] + picture.window_s / 2)}`;
  return present({lines, x, across: {time: true}, note, ...more});
}

// The share of samples that took at most so long, of each side. What is higher and further left is better.
function contrastShares(scenario, metric) {
  const {at_s: x, shares} = picture.contrast?.shares[metric]?.[scenario] ?? {at_s: [], shares: {}};
  const lines = [...SIDES].filter(([side]) => Object.hasOwn(shares, side))
    .map(([side, color]) => line(side, shares[side], {color}, (share) => `${number(100 * share, 4)} %`));
  const rest = lines.at(0)?.values.findIndex((share) => share >= 0.95) ?? 0;
  const from = x[Math.max(0, x.findIndex((_, i) => lines.some(({values}) => values[i] >= 0.005)) - 1)];
  const across = {seconds: true, log: chosen.log, from};
  return present({lines, x, across, rest, note: (i) => `at most ${duration(x[i])}`, shares: true, drawn: true});
}

CHARTS.push(
  {id: "contrast-ttft-shares", place: "charts", title: "TTFT: share of requests",
    of: (scenario) => contrastShares(scenario, "ttft")},
  {id: "contrast-itl-shares", place: "charts", title: "ITL: share of gaps",
    of: (scenario) => contrastShares(scenario, "itl")},
  {id: "contrast-e2el-shares", place: "charts", title: "End-to-end latency: share of requests",
    of: (scenario) => contrastShares(scenario, "e2el")},
  {id: "contrast-ttft", place: "charts", title: "TTFT p95 over time",
    of: (scenario) => contrastChart(scenario, "ttft", {seconds: true, log: chosen.log})},
  {id: "contrast-itl", place: "charts", title: "Mean ITL over time",
    of: (scenario) => contrastChart(scenario, "itl", {seconds: true, log: chosen.log})},
  {id: "contrast-tokens", place: "charts", title: "Output tokens over time",
    of: (scenario) => contrastChart(scenario, "tokens", {unit: "tokens/s"})},
);
