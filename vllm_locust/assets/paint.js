"use strict";
// What uPlot does not draw. Positions are in pixels of the canvas, `ratio()` of them to one of the page.

const colors = new Map();

function color(name) {
  const style = getComputedStyle(document.documentElement);
  if (!colors.has(name)) colors.set(name, style.getPropertyValue(`--${name}`).trim());
  return colors.get(name);
}

const ratio = () => uPlot.pxRatio;
const across = (u, value) => Math.round(u.valToPos(value, "x", true));
const up = (u, value, axis = "y") => Math.round(u.valToPos(value, axis, true));

function within(u, paint) {
  const {ctx, bbox} = u, {left, top, width, height} = bbox;
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  paint(ctx, {left, top, width, height, right: left + width, bottom: top + height});
  ctx.restore();
}

// The halo lets it be read over lines.
function write(ctx, text, x, y, name, align = "left") {
  ctx.save();
  ctx.font = `${11 * ratio()}px system-ui, sans-serif`;
  ctx.textAlign = align;
  ctx.textBaseline = "middle";
  ctx.lineJoin = "round";
  ctx.lineWidth = 3 * ratio();
  ctx.strokeStyle = color("panel");
  ctx.strokeText(text, x, y);
  ctx.fillStyle = color(name);
  ctx.fillText(text, x, y);
  ctx.restore();
}

// ---- In all charts over time

function paintWarmup(u) {
  if (picture.warmup_s != null) within(u, (ctx, box) => {
    const width = across(u, picture.warmup_s) - box.left;
    ctx.fillStyle = color("shade");
    ctx.fillRect(box.left, box.top, width, box.height);
    if (width > 60 * ratio() && box.height > 60) write(ctx, "warm-up", box.left + 6, box.bottom - 8 * ratio(), "muted");
  });
}

function paintMarks(u) {
  within(u, (ctx, box) => {
    ctx.strokeStyle = color("mark");
    ctx.lineWidth = ratio();
    for (const {at_s} of happenings()) ctx.stroke(new Path2D(`M${across(u, at_s) + 0.5} ${box.top} v${box.height}`));
  });
}

// Dashed, with their texts, each below the one before; one that lies above the chart is named at its upper edge.
function paintLimits(u, limits) {
  within(u, (ctx, box) => {
    const height = 13 * ratio();
    let free = Infinity;
    ctx.strokeStyle = color("limit");
    ctx.lineWidth = 1.5 * ratio();
    ctx.setLineDash([7 * ratio(), 4 * ratio()]);
    for (const {bound, axis, text} of [...limits].sort((one, other) => one.bound - other.bound)) {
      const y = up(u, bound, axis), above = y < box.top;
      if (!above) ctx.stroke(new Path2D(`M${box.left} ${y} h${box.width}`));
      free = Math.min(Math.max(y - height / 2, box.top + height / 2), free - height);
      write(ctx, above ? `↑ ${text}` : text, box.left + 6, free, "limit");
    }
  });
}

// Limits on what a distribution is drawn over: the line of a percentile is to pass on the left of its dot, or above it.
function paintBounds(u, {bounds}) {
  within(u, (ctx, box) => {
    ctx.strokeStyle = ctx.fillStyle = color("limit");
    ctx.lineWidth = 1.5 * ratio();
    for (const [order, {bound, statistic, text}] of bounds.entries()) {
      const x = across(u, bound), percentile = /^p(\d+(?:\.\d+)?)$/.exec(statistic ?? "");
      ctx.setLineDash([7 * ratio(), 4 * ratio()]);
      ctx.stroke(new Path2D(`M${x} ${box.top} v${box.height}`));
      const dot = new Path2D();
      if (percentile) dot.arc(x, up(u, percentile[1] / 100), 4 * ratio(), 0, 2 * Math.PI);
      ctx.fill(dot);
      const isRight = x > box.left + box.width * 0.6, beside = (isRight ? -8 : 8) * ratio();
      write(ctx, text, x + beside, box.bottom - (10 + 14 * order) * ratio(), "limit", isRight ? "right" : "left");
    }
  });
}

// ---- Outcomes and fidelity

function fillOf(ctx, {color: name, hatched}) {
  if (!hatched) return color(name);
  const tile = Object.assign(document.createElement("canvas"), {width: 6, height: 6}), pen = tile.getContext("2d");
  pen.strokeStyle = color(name);
  pen.lineWidth = 2.5;
  for (const x of [-3, 3, 9]) pen.stroke(new Path2D(`M${x - 3} 6 L${x + 3} 0`));
  return ctx.createPattern(tile, "repeat");
}

// From where to where a column goes, with a gap to its neighbour where there is room.
function extent(u, {start_s, end_s}) {
  const x = across(u, start_s), width = across(u, end_s) - x;
  return [x, Math.max(1, width > 5 ? width - 1 : width)];
}

function paintStack(u, {lines, id}) {
  within(u, (ctx) => {
    const floors = picture.columns.map(() => 0);
    for (const each of lines.filter((one) => isShown(id, one))) {
      ctx.fillStyle = fillOf(ctx, each);
      picture.columns.forEach((column, i) => {
        const [x, width] = extent(u, column), bottom = up(u, floors[i]);
        floors[i] += each.values[i];
        const height = Math.max(1, bottom - up(u, floors[i])); // few are seen, too
        if (each.values[i]) ctx.fillRect(x, bottom - height, width, height);
      });
    }
  });
}

// Full and hatched where the generator was the limit, half as high where it was not, a line where nobody knows.
function paintFidelity(u, {lines}) {
  const [server, generator] = lines.map((each) => fillOf(u.ctx, each));
  within(u, (ctx, box) => picture.columns.forEach((column) => {
    const [x, width] = extent(u, column), told = column.fidelity;
    const height = Math.round(box.height * (told ? (told.limited ? 1 : 0.5) : 0.12));
    ctx.fillStyle = told ? (told.limited ? generator : server) : color("users");
    ctx.fillRect(x, box.bottom - height, width, height);
  }));
}

// ---- Heat maps

const SHADES = 48;

function shades() {
  if (!colors.has("shades")) {
    const stops = color("heat").split(/\s+/).map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    colors.set("shades", Array.from({length: SHADES + 1}, (_, step) => {
      const at = (step / SHADES) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
      return `rgb(${stops[low].map((part, i) => Math.round(part + (stops[low + 1][i] - part) * (at - low)))})`;
    }));
  }
  return colors.get("shades");
}

function shadeOf(share) {
  return shades()[Math.ceil(Math.sqrt(share) * SHADES)]; // the root lets a tail of few be seen
}

function paintHeat(u, {cells, totals}) {
  const heights = new Map();
  const height = (k) => heights.get(k) ?? heights.set(k, up(u, heatEdge(k))).get(k);
  within(u, (ctx) => cells.forEach((of, i) => {
    const {start_s, end_s} = picture.columns[i], x = across(u, start_s), width = Math.max(1, across(u, end_s) - x);
    for (const [k, value] of of) {
      ctx.fillStyle = shadeOf(value / totals[i]);
      ctx.fillRect(x, height(k + 1), width, height(k) - height(k + 1));
    }
  }));
}

// ---- Stages: dots in their order, full where limits were met, crossed where one was missed

function paintStages(u, {stages}) {
  const at = ({rates, ttft}) => [across(u, rates.request_per_s), up(u, ttft.p95)], path = new Path2D();
  for (const stage of [...stages].sort((one, other) => one.stage - other.stage)) path.lineTo(...at(stage));
  u.ctx.save();
  u.ctx.strokeStyle = color("p95");
  u.ctx.lineWidth = 1.5 * ratio();
  u.ctx.stroke(path);
  for (const stage of stages) paintStage(u.ctx, stage, ...at(stage), 5 * ratio());
  u.ctx.restore();
}

function paintStage(ctx, stage, x, y, r) {
  const state = stageState(stage), dot = new Path2D();
  dot.arc(x, y, r, 0, 2 * Math.PI);
  ctx.fillStyle = ["missed", "inconclusive"].includes(state) ? color("panel") : color("p95");
  ctx.fill(dot);
  ctx.stroke(dot);
  const cross = new Path2D(`M${x - r} ${y - r} l${2 * r} ${2 * r} m0 ${-2 * r} l${-2 * r} ${2 * r}`);
  if (state === "missed") ctx.stroke(cross);
  write(ctx, stage.value == null ? `stage ${stage.stage}` : count(stage.value), x + 1.5 * r, y - 1.5 * r, "text");
}
