"use strict";
// What people see of the planner: the settings, the table, and all of it put together.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const NAMES = Object.keys(data.schedules);

const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
const plain = (x, digits = 5) => String(Number(x.toPrecision(digits)));
const percent = (x) => (100 * Math.max(0, x)).toFixed(1) + "%";
const counted = (number, word) => `${number} ${word}${number === 1 ? "" : word.endsWith("h") ? "es" : "s"}`;

const batches = (x) => `${plain(x)} micro-batch${x === 1 ? "" : "es"}`;

function element(tag, props = {}, ...children) {
  const made = Object.assign(document.createElement(tag), props);
  made.append(...children);
  return made;
}
function drawn(tag, attributes, ...children) {
  const made = document.createElementNS($("plot").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Round numbers from 0 to `end`, about `most` of them. */
function ticks(end, most) {
  const rough = end / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * 0.999);
  return range(Math.floor((end / step) * (1 + 1e-9)) + 1).map((number) => number * step);
}

// ---- The settings, kept in the address ------------------------------------------------------

const settings = {};
const view = { from: 0, to: 1 }; // of the longest makespan
let chosen = [];

function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const { name, min, max, step, value } of data.settings) {
    const number = Number(asked.get(name) ?? value);
    const steps = Math.round((clamp(Number.isFinite(number) ? number : value, min, max) - min) / step);
    settings[name] = Number((min + steps * step).toPrecision(12));
  }
  const names = asked.has("show") ? asked.get("show").split(",") : data.chosen;
  chosen = [...new Set(names)].filter((name) => NAMES.includes(name));
}
function writeAddress() {
  const changed = data.settings.filter(({ name, value }) => settings[name] !== value);
  const words = changed.map(({ name }) => `${name}=${settings[name]}`);
  if (chosen.join() !== data.chosen.join()) words.unshift(`show=${chosen.join()}`);
  const address = location.href.split("#")[0] + (words.length ? "#" + words.join("&") : "");
  if (address !== location.href) history.replaceState(null, "", address);
}

// ---- Planning: every schedule, each plan made once -------------------------------------------

const plans = new Map();
let timelines = new Map();

function plan() {
  const { ranks, stages_per_rank: each, microbatches, memory } = settings;
  timelines = new Map(NAMES.map((name) => {
    const key = [name, ranks, data.open.includes(name) ? each : 0, microbatches].join();
    if (!plans.has(key) && plans.size > 200) plans.clear();
    if (!plans.has(key)) plans.set(key, build(name, ranks, each, microbatches));
    const timeline = simulate(plans.get(key), settings);
    timeline.over = memory > 0 && timeline.peak > memory;
    return [name, timeline];
  }));
}

// ---- The table and the advice -----------------------------------------------------------------

function table() {
  const all = [...timelines.values()];
  const fitting = all.filter((timeline) => !timeline.over);
  const best = (what) => Math.min(...(fitting.length ? fitting : all).map(what)) + 1e-9;
  const columns = [
    [(t) => t.bubble, (t) => percent(t.bubble)],
    [(t) => t.makespan, (t) => plain(t.makespan)],
    [(t) => t.peak, (t) => plain(t.peak)],
  ].map(([value, text]) => ({ value, text, best: best(value) }));
  for (const [name, timeline] of timelines) {
    const row = $("rows").children[NAMES.indexOf(name)];
    row.className = timeline.over ? "over" : "";
    row.querySelector("input").checked = chosen.includes(name);
    columns.forEach(({ value, text, best }, at) => {
      row.cells[at + 1].textContent = text(timeline);
      row.cells[at + 1].className = !timeline.over && value(timeline) <= best ? "best" : "";
    });
  }
  const quickest = fitting.filter((t) => t.makespan <= columns[1].best);
  const least = Math.min(...quickest.map((t) => t.peak)) + 1e-9;
  const choice = quickest.filter((t) => t.peak <= least);
  $("advice").replaceChildren(...(choice.length
    ? ["Choose ", element("b", { textContent: choice.map((t) => t.plan.name).join(" or ") }),
       `: the quickest${settings.memory ? " that fits" : ""}, with ${percent(choice[0].bubble)} bubble and ` +
       `${batches(choice[0].peak)} in memory.`]
    : [`No schedule keeps within ${batches(settings.memory)}: more ranks or smaller micro-batches need less.`]));
  if (data.found && data.settings.every(({ name, value }) => settings[name] === value)) {
    $("advice").append(` The best plan that was found for these settings: ${percent(data.found.bubble)} bubble, ` +
      `makespan ${plain(data.found.makespan)}, ${batches(data.found.peak)} in memory.`);
  }
}

function makeTable() {
  $("rows").append(...NAMES.map((name) => {
    const box = element("input", { type: "checkbox", onchange: () => choose(name, box.checked) });
    const label = element("label", { title: data.schedules[name] }, box, name);
    return element("tr", {}, element("td", {}, label), ...range(3).map(() => element("td")));
  }));
}

// ---- Putting the page together ------------------------------------------------------------------

function choose(name, on) {
  chosen = on ? [...chosen.filter((other) => other !== name), name] : chosen.filter((other) => other !== name);
  redraw();
}
function place(name, at) {
  chosen = chosen.filter((other) => other !== name);
  chosen.splice(at, 0, name);
  redraw();
}

function makeSettings() {
  for (const { name, label, min, max, step } of data.settings) {
    const inputs = ["range", "number"].map((type) => element("input", { type, name, min, max, step }));
    inputs[1].setAttribute("aria-label", label);
    for (const input of inputs) {
      input.addEventListener("input", () => {
        if (input.value === "" || !input.validity.valid) return;
        settings[name] = Number(input.value);
        redraw(everything, input);
      });
      input.addEventListener("change", () => redraw());
    }
    $("settings").append(element("label", { className: "setting" }, element("span", { textContent: label }), ...inputs));
  }
  $("settings").addEventListener("submit", (event) => event.preventDefault());
}

/** Show all settings, but leave alone the field that is being typed into. */
function everything(typed) {
  for (const input of $("settings").elements) {
    if (input !== typed) input.value = settings[input.name];
  }
  plan();
  table();
  plot();
  charts();
  $("command").textContent = command();
  writeAddress();
}

// One redraw a frame, of as much as was asked for.
let waiting = null, took = 0;
function redraw(what = everything, typed = null) {
  if (!waiting) {
    requestAnimationFrame(() => {
      const begun = performance.now(), { what, typed } = waiting;
      waiting = null;
      what(typed);
      took = performance.now() - begun;
    });
  }
  waiting = { what: waiting && waiting.what === everything ? everything : what, typed };
}

$("link").addEventListener("click", async () => {
  const done = await navigator.clipboard?.writeText(location.href).then(() => true, () => false);
  $("link").textContent = done ? "Copied" : "It is in the address bar";
  setTimeout(() => { $("link").textContent = "Copy link"; }, 2000);
});
$("reset").addEventListener("click", () => {
  history.replaceState(null, "", location.href.split("#")[0]);
  Object.assign(view, { from: 0, to: 1 });
  readAddress();
  redraw();
});
$("in").addEventListener("click", () => zoom(1 / 1.5));
$("out").addEventListener("click", () => zoom(1.5));
$("fit").addEventListener("click", () => look(0, 1));
const toggled = (event) => {
  const name = event.target.closest?.("[data-name]")?.dataset.name;
  if (name) choose(name, !chosen.includes(name));
  return Boolean(name);
};
$("plot").addEventListener("click", toggled);
$("plot").addEventListener("keydown", (event) => {
  if ((event.key === "Enter" || event.key === " ") && toggled(event)) event.preventDefault();
});
addEventListener("hashchange", () => { readAddress(); redraw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
new ResizeObserver(() => redraw()).observe(document.body);
$("legend").append(...Object.entries(data.meanings).map(([kind, meaning]) => {
  const swatch = element("i");
  swatch.style.background = data.colours[kind];
  return element("li", {}, swatch, `${meaning} (${kind})`);
}), element("li", {}, "lighter: a rank’s later stages"));
makeTable();
makeSettings();
readAddress();
everything();

// For tests and scripts.
window.explorer = {
  settings: () => ({ ...settings }),
  chosen: () => [...chosen],
  view: () => [view.from, view.to],
  boxes: () => chosen.map((name) => cards.get(name).boxes),
  took: () => took,
  text: (kind, name) => DOWNLOADS[kind][0](name),
  frontier: () => frontier([...timelines.values()]).map((timeline) => timeline.plan.name),
};
