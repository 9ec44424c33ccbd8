"use strict";
// The page: draws a picture, which is one JSON document about a run (vllm_locust/picture.py tells its shape). A saved
// page has it inline, a live one asks Locust for it. Names and messages in it are somebody else's: they become text,
// never markup, and never a key of an object. Null is no sample: a gap, never a zero.

// ---- The document

const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children); // a string becomes a text node
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text; // what stays keeps its selection, and is not read out again
}

// ---- What the reader has chosen

const chosen = {scenario: "", log: false, zoom: null, hidden: new Set()};

function readChoices() {
  const kept = new URLSearchParams(location.hash.slice(1));
  Object.assign(chosen, {scenario: kept.get("scenario") ?? "", log: kept.get("axis") === "log"});
}

function choose(change) {
  Object.assign(chosen, change);
  const kept = new URLSearchParams({axis: chosen.log ? "log" : "linear"});
  if (chosen.scenario) kept.set("scenario", chosen.scenario);
  history.replaceState(null, "", `#${kept}`);
  if (picture) drawControls();
  drawCharts();
}

// The chosen scenario where this run has it, else all of them.
function shownScenario() {
  return picture.scenarios.includes(chosen.scenario) ? chosen.scenario : "";
}

// ---- Light and dark: Locust keeps its own under the same key, and a browser may forbid a page to keep anything

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function keptTheme() {
  try {
    return localStorage.theme ?? null;
  } catch {
    return null;
  }
}

function keepTheme(theme) {
  try {
    localStorage.theme = theme;
  } catch {
    // then it lasts as long as the page
  }
  setTheme(theme);
}

function followTheme() {
  setTheme(keptTheme() ?? (systemDark.matches ? "dark" : "light"));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  setText(byId("theme"), theme === "dark" ? "Light theme" : "Dark theme");
  colors.clear();
  drawCharts();
}

function switchTheme() {
  keepTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

// Paper is white, and as wide as llm.css has it.
function printed() {
  setTheme("light");
  for (const chart of charts.values()) chart.fit(660);
}

function unprinted() {
  followTheme();
  for (const chart of charts.values()) chart.fit();
}

// ---- The picture

const saved = JSON.parse(byId("picture").textContent); // null on a live page
let picture = null;

function complete(given) {
  const lists = ["scenarios", "limits", "marks", "stages", "columns"].map((name) => [name, given[name] ?? []]);
  return {...given, ...Object.fromEntries(lists), tables: given.tables ?? {}};
}

// New columns replace all from the first of them on; those of another run, or of another width, replace everything.
function merged(old, given) {
  const next = complete(given), same = old && old.run === next.run && old.every === next.every;
  const kept = same ? old.columns.filter((column) => column.index < next.from) : [];
  return {...next, columns: [...kept, ...next.columns]};
}

// What to ask for: what follows the columns that last, unless Locust has others than these by now.
function wanted() {
  return {version: picture?.version ?? "", from: picture?.next ?? 0};
}

function draw(given) {
  if (picture?.run !== given.run) chosen.zoom = null;
  picture = merged(picture, given);
  drawControls();
  drawHead();
  drawCharts();
  drawTables();
}

function drawCharts() {
  if (picture) for (const chart of charts.values()) chart.draw(shownScenario());
}

function drawControls() {
  const select = byId("scenario"), names = ["", ...picture.scenarios];
  if (names.length !== select.length || names.some((name, i) => select.options[i].value !== name)) {
    select.replaceChildren(...names.map((name) => element("option", {value: name}, name || "all")));
  }
  select.value = shownScenario();
  byId("linear").setAttribute("aria-pressed", !chosen.log);
  byId("log").setAttribute("aria-pressed", chosen.log);
}

// ---- The head

const STATES = {running: ["good", "● running"], stopped: ["muted", "■ stopped"], none: ["muted", "no run yet"],
  compared: ["muted", "comparison"]};

function drawHead() {
  const now = picture.warming_up ? ["warn", "● warming up"] : STATES[picture.state] ?? ["muted", "unknown"];
  const state = saved && picture.state === "running" ? ["muted", "saved while it ran"] : now;
  byId("state").className = `badge ${state[0]}`;
  setText(byId("state"), state[1]);
  setText(byId("name"), picture.name || "LLM");
  const age_s = picture.excerpt ? null : picture.now_s ?? picture.length_s;
  setText(byId("age"), age_s == null ? "" : clock(Math.floor(age_s)));
  const told = facts().map(([term, text]) => element("div", {}, element("dt", {}, term), element("dd", {}, text)));
  byId("facts").replaceChildren(...told);
  byId("verdicts").replaceChildren(...verdicts().map(([tone, text]) => element("li", {class: tone}, text)));
}

function facts() {
  const started = new Date(picture.started || NaN), isDate = !Number.isNaN(started.getTime());
  const about = [["target", picture.target], ["model", picture.model],
    ["started", isDate ? started.toLocaleString() : picture.started], ["part", picture.excerpt]];
  const now = [["users", count(picture.users)], ["workers", count(picture.workers)],
    ["streams in flight", count(picture.in_flight)], ["longest silence", duration(picture.silence_s)]];
  return [...about, ...(picture.state === "running" ? now : [])].filter(([, text]) => text);
}

function verdicts() {
  if (picture.state === "none") return [["muted", "Start a test in Locust: it is drawn here while it runs."]];
  if (picture.state === "compared") return picture.verdict;
  const {limited = null, text = ""} = picture.fidelity ?? {};
  const [tone, sign] = limited == null ? ["muted", "?"] : limited ? ["warn", "⚠"] : ["good", "✓"];
  const judged = (picture.verdict ?? []).map((told) => (told === "ok" ? ["good", "✓ ok"] : ["bad", `✗ ${told}`]));
  return [...(text ? [[tone, `${sign} ${text}`]] : []), ...judged];
}

// ---- Tables

const TABLES = [["differs", "What differs"], ["compared", "Figures"], ["samples", "Samples of answers"],
  ["run", "This run"], ["limits", "Limits"], ["stability", "Stability"], ["window", "Last window"],
  ["facts", "Remarks"], ["outcomes", "Outcomes"], ["failures", "Failures"], ["stages", "Stages"],
  ["slowest", "Slowest requests"], ["marks", "Marks"], ["workers", "Workers"], ["settings", "Settings"]];
const FIRST = ["differs", "compared", "run", "limits", "stability"]; // of a page that is read, not watched
const WORDS = new Map([["better", "good"], ["worse", "bad"]]); // of a comparison
const drawnTables = new Map();
const FEW_LINES = 4;

function drawTables() {
  for (const [name, title] of TABLES) {
    const table = picture.tables[name], text = JSON.stringify(table ?? null), cell = byId(`table-${name}`);
    if (drawnTables.get(name) === text) continue; // a selection in it stays
    drawnTables.set(name, text);
    cell.hidden = !table?.rows?.length;
    cell.replaceChildren(...(cell.hidden ? [] : tableOf(title, table)));
  }
}

function tableOf(title, {columns, rows, note}) {
  const align = (i) => (columns[i]?.text ? {class: "text"} : {});
  const look = (cell, i) => ({...align(i), ...(columns[i]?.title === "word" ? {class: `text ${WORDS.get(cell) ?? ""}`} : {})});
  const body = rows.map((row) => element("tr", {}, ...row.map((cell, i) => element("td", look(cell, i), folded(cell ?? ABSENT)))));
  const titles = columns.map((column, i) => element("th", {scope: "col", ...align(i)}, column.title ?? ""));
  const groups = columns.some(({group}) => group) ? [groupsOf(columns)] : [];
  const head = element("thead", {}, ...groups, element("tr", {}, ...titles));
  const table = element("table", {}, head, element("tbody", {}, ...body));
  const scroll = element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": title}, table);
  return [element("h2", {}, title), scroll, ...(note ? [element("p", {class: "note"}, note)] : [])];
}

// A cell of many lines, like a file, shows the first one until somebody opens it.
function folded(text) {
  const lines = String(text).split("\n");
  if (lines.length <= FEW_LINES) return text;
  return element("details", {}, element("summary", {}, `${lines[0]} … (${lines.length} lines)`), text);
}

// Neighbours of one group share a head.
function groupsOf(columns) {
  const groups = [];
  for (const {group = ""} of columns) {
    if (group && groups.at(-1)?.group === group) groups.at(-1).span += 1;
    else groups.push({group, span: 1});
  }
  const head = ({group, span}) => element("th", {colspan: span, class: group ? "group" : "", scope: "colgroup"}, group);
  return element("tr", {}, ...groups.map(head));
}

// ---- A live page: one request at a time, none while nobody looks

const PAUSE_MS = 2000, PATIENCE_MS = 15000;
let timer = 0, isAsking = false, asked_ms = -PAUSE_MS;

function schedule() {
  clearTimeout(timer);
  if (!isAsking && !document.hidden) timer = setTimeout(poll, Math.max(0, asked_ms + PAUSE_MS - performance.now()));
}

async function poll() {
  isAsking = true;
  asked_ms = performance.now();
  let given = null, trouble = "";
  try {
    given = await ask();
  } catch (error) {
    trouble = `cannot reach Locust: ${error.message}`;
  }
  isAsking = false;
  setText(byId("trouble"), trouble);
  byId("trouble").hidden = !trouble;
  schedule();
  if (given) draw(given);
}

async function ask() {
  const options = {redirect: "manual", cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS)};
  const response = await fetch(`llm/picture?${new URLSearchParams(wanted())}`, options); // whatever this page's path
  const wantsLogin = response.type === "opaqueredirect" || response.status === 401;
  if (wantsLogin) throw new Error("it wants a login; load this page again");
  if (!response.ok) throw new Error(`it answers ${response.status} ${response.statusText}`);
  return response.json();
}

// ---- The beginning

function listen() {
  byId("scenario").addEventListener("change", (event) => choose({scenario: event.target.value}));
  byId("linear").addEventListener("click", () => choose({log: false}));
  byId("log").addEventListener("click", () => choose({log: true}));
  byId("theme").addEventListener("click", switchTheme);
  systemDark.addEventListener("change", followTheme);
  addEventListener("storage", followTheme); // switched on Locust's own page
  addEventListener("beforeprint", printed);
  addEventListener("afterprint", unprinted);
}

function begin() {
  for (const each of CHARTS) charts.set(each.id, new Chart(each));
  for (const [name] of TABLES) {
    const place = saved && FIRST.includes(name) ? "summary" : "tables";
    byId(place).append(element("div", {class: "cell", id: `table-${name}`, hidden: ""}));
  }
  readChoices();
  listen();
  followTheme();
  if (saved) return draw(saved);
  byId("home").hidden = false;
  document.addEventListener("visibilitychange", schedule);
  schedule();
}

window.llm = {charts, draw, get picture() { return picture; }}; // for whoever looks in from outside, like a test
begin();
