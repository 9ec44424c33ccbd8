"use strict";
// A chart on the page: its figure, axes, legend and cursor. uPlot draws it, and is told of nothing but new data while
// the lines stay the same ones, so nothing jumps. All charts over time share the cursor, and what is zoomed in on.

const charts = new Map();
const LEFT = 62, RIGHT = 48; // the same in all charts, so that instants stand below each other
const STEPS_S = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
const LOWEST_S = 1e-6; // where a logarithmic axis shows 0

function isShown(id, {label}) {
  return !chosen.hidden.has(`${id}/${label}`);
}

// ---- Scales

function wholeTime() {
  const end = Math.max(picture.columns.at(-1)?.end_s ?? 0, picture.window_s ?? 1);
  if (picture.state !== "running") return [0, end];
  const step = STEPS_S.find((each) => each >= end / 12) ?? 86400; // while it grows, it does so in steps
  return [0, Math.ceil(end / step) * step];
}

function zoom(range) {
  chosen.zoom = range;
  for (const {u} of charts.values()) u?.setData(u.data);
}

function zoomBy(factor, middle) {
  const [low, high] = chosen.zoom ?? wholeTime(), [first, last] = wholeTime(), half = ((high - low) * factor) / 2;
  const range = [Math.max(first, middle - half), Math.min(last, middle + half)];
  zoom(range[0] === first && range[1] === last ? null : range);
}

// The highest thing to show. A limit far above the data would flatten it, so that is named at the upper edge instead.
function highest(chart, axis, max) {
  const bounds = (chart.limits ?? []).filter((limit) => (limit.axis ?? "y") === axis).map((limit) => limit.bound);
  return Math.max(max ?? 0, ...bounds.filter((bound) => max == null || bound <= 2 * max)) || 1;
}

function linear(current, axis) {
  return (u, min, max) => [0, roundUp(highest(current(), axis, max) * 1.06)];
}

function logarithmic(current) {
  return (u, min, max) => {
    const top = highest(current(), "y", max), low = Math.min(min ?? top / 10, top);
    if (current().heat) return [low, top];
    const floor = 1 / roundUp(1 / (low * 0.9), [1, 2, 5, 10]);
    return [floor, Math.max(roundUp(top * 1.1, [1, 2, 5, 10]), floor * 10)];
  };
}

// What a chart is drawn over, where that is not time: from 0, or on a logarithmic axis from where there is something.
function acrossRange({across, bounds = []}) {
  return (u, min, max) => {
    const top = Math.max(max, ...bounds.map((limit) => limit.bound).filter((bound) => bound <= 2 * max)) || 1;
    return across.log ? [Math.max(min, across.from), top * 1.1] : [0, roundUp(top * 1.1)];
  };
}

function scalesOf(chart, current) {
  const {x, across, log, bare, shares} = chart, time = () => chosen.zoom ?? wholeTime();
  return {
    x: {time: false, distr: across?.log ? 3 : 1, range: x ? acrossRange(chart) : time},
    y: {distr: log ? 3 : 1, range: bare || shares ? [0, 1] : log ? logarithmic(current) : linear(current, "y")},
    right: {range: linear(current, "right")},
  };
}

// ---- Axes

function logSteps(decades) {
  if (decades > 1.2) return decades > 3.2 ? [1] : [1, 3];
  return decades > 0.4 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9];
}

function logSplits(u, axis, min, max) {
  const steps = logSteps(Math.log10(max / min)), splits = [];
  for (let power = Math.floor(Math.log10(min)); 10 ** power <= max * 1.001; power++) {
    splits.push(...steps.map((step) => step * 10 ** power));
  }
  return splits.filter((split) => split >= min * 0.999 && split <= max * 1.001);
}

function inOneUnit(axis) {
  return (u, splits) => {
    const [scale, unit] = unitOf(u.scales[axis].max);
    return splits.map((value) => `${number(value / scale, 4)} ${unit}`);
  };
}

function inPercent(u, splits) {
  return splits.map((share) => `${number(100 * share)} %`);
}

function axesOf({across, seconds, log, unit, right, bare, shares}) {
  const font = "11px system-ui, sans-serif", plain = (u, splits) => splits.map((value) => number(value, 4));
  const axis = (more) => ({
    stroke: color("muted"), font, labelFont: font, labelSize: 16, labelGap: 0, gap: 6, space: 28,
    grid: {stroke: color("grid"), width: 1}, ticks: {show: false}, ...more,
  });
  const decades = {splits: logSplits, filter: (u, splits) => splits, values: (u, splits) => splits.map(duration)};
  if (bare) return [axis({show: false}), axis({size: LEFT, values: () => [], grid: {show: false}})];
  const left = {
    ...(seconds ? {size: LEFT, values: inOneUnit("y")} : {size: LEFT - 16, label: unit, values: plain}),
    ...(log ? decades : {}),
    ...(shares ? {size: LEFT, label: null, values: inPercent} : {}),
  };
  const time = {incrs: STEPS_S, values: (u, splits) => splits.map(clock)};
  const over = across && !across.time && {
    label: across.label, values: across.seconds ? inOneUnit("x") : plain, ...(across.log ? decades : {}),
  };
  const values = seconds ? inOneUnit("right") : plain;
  const beside = {scale: "right", side: 1, size: RIGHT, grid: {show: false}, values};
  return [axis({space: 60, size: 26, ...(over || time)}), axis(left), ...(right ? [axis(beside)] : [])];
}

// ---- Lines

// Points between two gaps, which no line shows.
function alone(u, index, shown) {
  const values = u.data[index], isAlone = (i) => values[i] != null && values[i - 1] == null && values[i + 1] == null;
  return shown ? null : [...values.keys()].filter(isAlone);
}

function seriesOf({id, lines, paint, drawn, stacked}) {
  const few = {size: 5, space: 14, fill: color("panel"), filter: alone}, nowhere = {...few, show: false};
  const nothing = {paths: () => null, points: {show: false}};
  const series = lines.map((each) => ({
    scale: each.axis, show: isShown(id, each), auto: !stacked, stroke: color(each.color ?? "text"), dash: each.dash,
    width: each.width, ...(drawn ? {points: nowhere} : paint ? nothing : {points: each.axis === "y" ? few : nowhere}),
  }));
  return [{}, ...series, ...(stacked ? [{scale: "y", ...nothing}] : [])]; // the last is all together, for the axis
}

function swatch({color: name, dash, box, hatched}) {
  const made = element("i", {class: ["swatch", box && "box", hatched && "hatched"].filter(Boolean).join(" ")});
  made.style.setProperty("--swatch", `var(--${name})`);
  if (!box) made.style.borderTopStyle = dash.length ? (dash[0] > 3 ? "dashed" : "dotted") : "solid";
  return made;
}

function whenOf({start_s, end_s, steady}) {
  return [`${clock(start_s)}–${clock(end_s)}`, steady === false && "warm-up"];
}

class Chart {
  constructor({id, place, beside, title, of, every = false, height = 190}) {
    Object.assign(this, {id, title, of, every, height, u: null, shape: null, values: new Map()});
    this.heading = element("h2", {}, title);
    this.told = element("span", {class: "told"});
    this.plot = element("div", {class: "plot", tabindex: "0", role: "img", "aria-label": title});
    this.legend = element("ul", {class: "legend"});
    const caption = element("figcaption", {}, this.heading, this.told);
    this.figure = element("figure", {"data-chart": id, "data-columns": "0"}, caption, this.plot, this.legend);
    if (beside) charts.get(beside).figure.after(this.figure);
    else byId(place).append(element("div", {class: "cell"}, this.figure));
    this.plot.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.fit()).observe(this.plot);
  }

  draw(scenario) {
    const made = this.of(this.every ? "" : scenario), cell = this.figure.parentElement;
    this.chart = made && {id: this.id, ...made};
    this.figure.hidden = !made;
    cell.hidden = [...cell.children].every((child) => child.hidden);
    this.figure.dataset.columns = made ? this.xs().length : 0;
    if (!made) return this.forget();
    this.heading.replaceChildren(this.title, ...(scenario && !this.every ? [" ", element("small", {}, scenario)] : []));
    const looks = made.lines.map((each) => [each.label, each.color, each.axis, isShown(this.id, each)]);
    const shape = JSON.stringify([document.documentElement.dataset.theme, made.log, made.right, looks]);
    if (shape === this.shape) this.u.setData(this.data());
    else this.build(shape);
    this.tell();
  }

  xs() {
    return this.chart.x ?? picture.columns.map(({start_s, end_s}) => (start_s + end_s) / 2);
  }

  data() {
    const {id, lines, log, stacked} = this.chart, xs = this.xs();
    const lifted = (value) => (value == null ? null : Math.max(value, LOWEST_S));
    const values = lines.map((each) => (log ? each.values.map(lifted) : each.values));
    const shown = lines.filter((each) => isShown(id, each));
    return [xs, ...values, ...(stacked ? [xs.map((_, i) => sum(shown.map((each) => each.values[i])))] : [])];
  }

  build(shape) {
    this.forget();
    this.shape = shape;
    const {right, bare, heat, x, paint} = this.chart;
    const filters = {pub: (type) => type === "mousemove", sub: () => true};
    const sync = x ? {} : {key: "time", scales: ["x", null], filters};
    this.u = new uPlot({
      width: this.plot.clientWidth || 300, height: this.height, padding: [8, right ? 0 : RIGHT, bare ? 2 : 0, 0],
      legend: {show: false}, series: seriesOf(this.chart), scales: scalesOf(this.chart, () => this.chart),
      axes: axesOf(this.chart),
      cursor: {
        y: Boolean(heat), points: {show: !paint, size: 7}, drag: {x: !x, y: false, setScale: false}, sync,
        bind: {dblclick: () => () => zoom(null)},
      },
      hooks: {
        drawClear: [(u) => x || paintWarmup(u)],
        drawAxes: [(u) => paint?.(u, this.chart)],
        draw: [(u) => { if (!x) paintMarks(u); paintLimits(u, this.chart.limits ?? []); }],
        setCursor: [() => this.tell()],
        setSelect: [(u) => this.select(u)],
      },
    }, this.data(), this.plot);
    this.bubble = element("div", {class: "bubble", hidden: ""});
    this.u.over.append(this.bubble);
    this.explain();
  }

  forget() {
    this.u?.destroy();
    this.u = this.shape = null;
  }

  fit(width = this.plot.clientWidth) {
    if (this.u && width && width !== this.u.width) this.u.setSize({width, height: this.height});
  }

  // ---- The legend, which says values too

  explain() {
    const entries = this.chart.lines.filter((each) => !each.silent).map((each) => this.entry(each));
    this.legend.replaceChildren(...(this.chart.heat ? [this.scale()] : entries));
  }

  entry(each) {
    const value = element("b"), aside = each.axis === "right" ? " (right axis)" : "";
    const parts = [swatch(each), element("em", {title: each.label}, each.label + aside), value];
    this.values.set(each.label, value);
    if (each.key) return element("li", {}, element("span", {}, ...parts));
    const button = element("button", {type: "button", "aria-pressed": isShown(this.id, each)}, ...parts);
    button.addEventListener("click", () => this.toggle(each));
    return element("li", {}, button);
  }

  scale() {
    const bar = element("i", {class: "swatch box ramp"});
    bar.style.background = `linear-gradient(90deg, ${shades().join()})`;
    this.cell = element("b");
    const [none, all] = ["of a column 0 %", "100 %"].map((text) => element("em", {}, text));
    return element("li", {}, element("span", {}, none, bar, all, this.cell));
  }

  toggle(each) {
    const key = `${this.id}/${each.label}`;
    if (!chosen.hidden.delete(key)) chosen.hidden.add(key);
    this.draw(shownScenario());
    this.values.get(each.label).parentElement.focus(); // it was made anew
  }

  // ---- The cursor

  // Says the values of the column at the cursor, else of the latest one that has any.
  tell() {
    if (!this.u) return;
    const {lines, note, x, bare, heat} = this.chart, {idx} = this.u.cursor, xs = this.xs();
    const at = idx < xs.length ? idx : null; // of columns that there were, maybe
    const i = at ?? this.latest(xs);
    for (const each of lines) if (!each.key && !each.silent) setText(this.values.get(each.label), each.text(i));
    if (heat) setText(this.cell, this.cellText(at));
    const when = x || bare ? [] : [at == null && "latest", ...whenOf(picture.columns[i])];
    setText(this.told, [...when, note?.(i)].filter(Boolean).join(" · "));
    this.told.title = this.told.textContent;
    if (!x) this.tellNear();
  }

  // The last column that is whole and has a value; before there is one, the last that has a value.
  latest(xs) {
    const hasValue = (_, i) => this.chart.lines.some((each) => each.values[i] != null);
    if (this.chart.rest != null) return Math.max(0, this.chart.rest);
    const whole = this.chart.x ? -1 : xs.findLastIndex((_, i) => hasValue(_, i) && !goesOn(picture.columns[i]));
    return whole < 0 ? xs.findLastIndex(hasValue) : whole;
  }

  cellText(i) {
    const {left, top, event} = this.u.cursor, {cells, totals, lowest} = this.chart;
    if (!event || left < 0 || !totals[i]) return "";
    const k = Math.floor(10 * Math.log10(this.u.posToVal(top, "y") / LOWEST_S) + 1e-9), value = cells[i].get(k) ?? 0;
    const range = `${k <= lowest ? "0" : duration(heatEdge(k))}–${duration(heatEdge(k + 1))}`;
    return `${range}: ${count(value)} of ${count(totals[i])}, ${number((100 * value) / totals[i])} %`;
  }

  // Marks and limits that the pointer is near to.
  tellNear() {
    const {left, top, event} = this.u.cursor;
    this.bubble.hidden = !event || left < 0; // what it measures would lay the page out for each chart that only follows
    if (this.bubble.hidden) return;
    const {clientWidth} = this.u.over, isRight = left > clientWidth / 2;
    const isNear = (value, axis, position) => Math.abs(this.u.valToPos(value, axis) - position) < 6;
    const marks = happenings().filter(({at_s}) => isNear(at_s, "x", left));
    const limits = (this.chart.limits ?? []).filter(({bound, axis}) => isNear(bound, axis ?? "y", top));
    const texts = [...marks.map(({at_s, text}) => `${clock(at_s)} ${text}`), ...limits.map(({text}) => text)];
    this.bubble.hidden = !texts.length;
    setText(this.bubble, texts.join("; "));
    this.bubble.style.left = isRight ? "" : `${left + 10}px`;
    this.bubble.style.right = isRight ? `${clientWidth - left + 10}px` : "";
  }

  select(u) {
    const {left, width} = u.select, ends = [left, left + width].map((position) => u.posToVal(position, "x"));
    u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
    if (width >= 4) zoom(ends);
  }

  press(event) {
    const {key} = event, step = {ArrowLeft: -1, ArrowRight: 1}[key], factor = {"+": 0.5, "-": 2}[key];
    if (!this.u || (!step && !factor && key !== "Escape")) return;
    event.preventDefault();
    const xs = this.xs(), last = xs.length - 1;
    const at = Math.min(last, Math.max(0, (this.u.cursor.idx ?? last + 1) + (step ?? 0)));
    if (key === "Escape") zoom(null);
    if (factor && !this.chart.x) zoomBy(factor, xs[at]);
    if (step) this.u.setCursor({left: this.u.valToPos(xs[at], "x"), top: this.u.over.clientHeight / 2}, true, true);
  }
}
