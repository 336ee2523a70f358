"use strict";
// What people see of the planner: settings, table, plot and charts.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const NAMES = Object.keys(data.schedules);
const AXIS = 26;

const clamp = (x, low, high) => Math.max(low, Math.min(high, x));
const plain = (x, digits = 5) => String(Number(x.toPrecision(digits)));
const percent = (x) => (100 * Math.max(0, x)).toFixed(1) + "%";
const counted = (number, word) => `${number} ${word}${number === 1 ? "" : word.endsWith("h") ? "es" : "s"}`;

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
       `${plain(choice[0].peak)} of memory.`]
    : [`No schedule keeps within ${settings.memory}: more ranks or smaller micro-batches need less.`]));
}

function makeTable() {
  $("rows").append(...NAMES.map((name) => {
    const box = element("input", { type: "checkbox", onchange: () => choose(name, box.checked) });
    const label = element("label", { title: data.schedules[name] }, box, name);
    return element("tr", {}, element("td", {}, label), ...range(3).map(() => element("td")));
  }));
}

// ---- The plot: bubble over memory, and the frontier that no schedule is better than ------------

function plot() {
  const svg = $("plot"), { width, height } = svg.getBoundingClientRect();
  const left = 44, bottom = height - 34, right = width - 12, top = 10;
  const all = [...timelines.values()];
  const most = Math.max(settings.memory, ...all.map((t) => t.peak)) * 1.06;
  const worst = Math.max(0.05, ...all.map((t) => t.bubble)) * 1.08;
  const x = (memory) => left + (memory / most) * (right - left);
  const y = (bubble) => bottom - (Math.max(0, bubble) / worst) * (bottom - top);
  const parts = [];
  for (const tick of ticks(worst * 100, 5)) {
    parts.push(drawn("line", { class: "grid", x1: left, x2: right, y1: y(tick / 100), y2: y(tick / 100) }));
    parts.push(drawn("text", { x: left - 8, y: y(tick / 100) + 4, "text-anchor": "end" }, plain(tick) + "%"));
  }
  for (const tick of ticks(most, 6)) {
    parts.push(drawn("text", { x: x(tick), y: bottom + 17, "text-anchor": "middle" }, plain(tick)));
  }
  parts.push(drawn("text", { x: right, y: height - 2, "text-anchor": "end" }, "peak memory, in activations of a micro-batch"));
  parts.push(drawn("text", { x: left + 6, y: top + 4 }, "bubble"));
  if (settings.memory) {
    const at = x(settings.memory);
    parts.push(drawn("line", { class: "limit", x1: at, x2: at, y1: top, y2: bottom }));
  }
  const edge = frontier(all);
  const steps = edge.map((t, at) => `${at ? `H${x(t.peak)}V` : `M${x(t.peak)},`}${y(t.bubble)}`);
  if (edge.length) parts.push(drawn("path", { class: "frontier", d: steps.join("") }));

  // Labels keep clear of points and of each other: each goes down until there is room.
  const taken = all.map((t) => ({ line: y(t.bubble) + 4, from: x(t.peak) - 5, to: x(t.peak) + 5 }));
  for (const timeline of all.toSorted((a, b) => b.bubble - a.bubble || a.peak - b.peak)) {
    const { name } = timeline.plan, on = chosen.includes(name), long = name.length * 6.6;
    const cx = x(timeline.peak), cy = y(timeline.bubble), before = cx + long + 10 > right;
    const from = before ? cx - long - 8 : cx + 8;
    let line = cy + 4;
    while (taken.some((box) => Math.abs(box.line - line) < 13 && box.from < from + long && from < box.to)) line += 13;
    taken.push({ line, from, to: from + long });
    const words = `${name}: bubble ${percent(timeline.bubble)}, memory ${plain(timeline.peak)}`;
    const point = drawn("a", {
      class: `${on ? "on" : ""} ${timeline.over ? "over" : ""}`, tabindex: 0, role: "checkbox", "aria-checked": on,
      "aria-label": words, "data-name": name,
    },
      drawn("title", {}, words), drawn("circle", { cx, cy, r: 4.5 }),
      drawn("text", { x: before ? cx - 8 : cx + 8, y: line, "text-anchor": before ? "end" : "start" }, name));
    parts.push(point);
  }
  const focused = document.activeElement?.dataset?.name;
  svg.replaceChildren(...parts);
  if (focused) svg.querySelector(`[data-name="${focused}"]`)?.focus();
}

/** The timelines that no other beats in both, from the least memory on. */
function frontier(all) {
  let least = Infinity;
  return all.toSorted((a, b) => a.peak - b.peak || a.bubble - b.bubble).filter((timeline) => {
    const better = timeline.bubble < least - 1e-9;
    if (better) least = timeline.bubble;
    return better;
  });
}

/** Round numbers from 0 to `end`, about `most` of them. */
function ticks(end, most) {
  const rough = end / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= rough * 0.999);
  return range(Math.floor((end / step) * (1 + 1e-9)) + 1).map((number) => number * step);
}

// ---- The charts -------------------------------------------------------------------------------

/** The colour of an action and of the letters on it: lighter for a rank's later stages. */
const paints = new Map();
function paint(kind, chunk, chunks) {
  const key = kind + chunk + "/" + chunks;
  if (!paints.has(key)) {
    const white = (0.45 * chunk) / Math.max(1, chunks - 1);
    const rgb = [1, 3, 5].map((at) => parseInt(data.colours[kind].slice(at, at + 2), 16));
    const mixed = rgb.map((c) => Math.round(c + (255 - c) * white));
    const [r, g, b] = mixed.map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    const dark = 1.05 / (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) >= 4;
    const colour = "#" + mixed.map((c) => c.toString(16).padStart(2, "0")).join("");
    paints.set(key, { colour, ink: dark ? "#ffffff" : "#1a222b" });
  }
  return paints.get(key);
}
const spell = ({ kind, stage, microbatch }) => `${stage}${kind}${microbatch}`;
const longest = () => Math.max(...chosen.map((name) => timelines.get(name).makespan), 1e-9);

/** Where things are in a chart of this width. */
function measures(timeline, width) {
  const { ranks } = timeline.plan, small = width < 560;
  const left = small ? 26 : 58, right = small ? 38 : 78;
  const lane = ranks <= 8 ? 30 : ranks <= 16 ? 22 : 15;
  return { left, right, lane, plot: width - left - right, height: ranks * lane + AXIS, small };
}

/** Call `box` for every part of an action that is drawn: a pair has its two halves in one place. */
function boxes(timeline, lane, box) {
  const { rows, stagesOf } = timeline.plan;
  rows.forEach((row, rank) => row.forEach((action, at) => {
    const second = at > 0 && row[at - 1].joined, half = second || action.joined;
    const chunk = stagesOf[rank].indexOf(action.stage), top = rank * lane + 1.5;
    box({
      rank, at, action, from: timeline.start[rank][at], to: timeline.end[rank][at],
      top: second ? top + (lane - 3) / 2 : top, tall: half ? (lane - 3) / 2 : lane - 3,
      ...paint(action.kind, chunk, stagesOf[rank].length),
    });
  }));
}

function chart(name) {
  const timeline = timelines.get(name), canvas = cards.get(name).canvas, width = canvas.clientWidth;
  const { left, right, lane, plot, height, small } = measures(timeline, width);
  const ratio = devicePixelRatio || 1, style = getComputedStyle(document.body);
  const colour = (variable) => style.getPropertyValue(variable);
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = `12px ${colour("--sans")}`;
  pen.textBaseline = "middle";
  const { ranks } = timeline.plan, all = longest(), from = view.from * all, span = (view.to - view.from) * all;
  const x = (time) => left + ((time - from) / span) * plot;

  pen.fillStyle = colour("--lane");
  const end = Math.min(left + plot, x(timeline.makespan));
  if (end > left) range(ranks).forEach((rank) => pen.fillRect(left, rank * lane + 1.5, end - left, lane - 3));
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, plot, height);
  pen.clip();
  pen.textAlign = "center";
  let count = 0;
  const reached = new Float64Array(ranks).fill(-1);
  boxes(timeline, lane, ({ rank, action, from, to, top, tall, colour, ink }) => {
    const a = x(from), b = x(to);
    if (b < left || a > left + plot) return;
    count++;
    if (b < reached[rank] + 0.5) return; // nothing of it can be seen
    reached[rank] = tall < lane - 3 ? reached[rank] : b;
    pen.fillStyle = colour;
    pen.fillRect(a, top, Math.max(0.6, b - a - (b - a > 4 ? 1 : 0)), tall);
    if (b - a > 7 * String(action.microbatch).length + 5 && tall >= 12) {
      pen.fillStyle = ink;
      pen.fillText(action.microbatch, (a + b) / 2, top + tall / 2 + 0.5);
    }
  });
  pen.restore();

  // Ranks on the left, their memory on the right, time below.
  pen.textAlign = "right";
  const scale = Math.max(settings.memory, ...chosen.map((name) => timelines.get(name).peak));
  range(ranks).forEach((rank) => {
    const middle = (rank + 0.5) * lane;
    pen.fillStyle = colour("--muted");
    pen.fillText(small ? rank : `rank ${rank}`, left - 8, middle);
    const peak = timeline.peaks[rank], over = settings.memory && peak > settings.memory;
    if (!small) {
      pen.globalAlpha = 0.3;
      pen.fillStyle = colour(over ? "--bad" : "--accent");
      pen.fillRect(left + plot + 8, middle - lane / 2 + 3, (peak / scale) * (right - 12), lane - 6);
      pen.globalAlpha = 1;
    }
    pen.fillStyle = colour(over ? "--bad" : "--muted");
    pen.fillText(plain(peak, 3), width - 6, middle);
  });
  pen.fillStyle = colour("--faint");
  pen.textAlign = "center";
  for (const tick of ticks(from + span, plot / 90 * ((from + span) / span))) {
    if (tick < from) continue;
    pen.fillRect(x(tick), ranks * lane, 1, 4);
    pen.fillText(plain(tick), x(tick), ranks * lane + 15);
  }
  pen.textAlign = "right";
  if (!small) pen.fillText("memory", width - 6, ranks * lane + 15);
  cards.get(name).boxes = count;
}

const cards = new Map();

function makeCard(name) {
  const canvas = element("canvas", { tabIndex: 0 });
  canvas.setAttribute("role", "img");
  const facts = element("p", { className: "facts" });
  const button = (text, label, onclick) => {
    const made = element("button", { type: "button", textContent: text, onclick });
    made.setAttribute("aria-label", label);
    made.title = label;
    return made;
  };
  const grip = button("⠿", `Drag ${name} to another place`, () => {});
  grip.className = "grip";
  const up = button("↑", `Move ${name} up`, () => place(name, chosen.indexOf(name) - 1));
  const root = element("section", { className: "card" },
    element("div", { className: "about" }, grip, element("h2", { textContent: name }), facts,
      element("div", { className: "tools" },
        ...Object.keys(DOWNLOADS).map((kind) => button(kind, `Download ${name} as ${kind}`, () => download(kind, name))),
        up, button("×", `Take ${name} away`, () => choose(name, false)))),
    canvas);
  root.dataset.name = name;
  const card = { root, canvas, facts, up, boxes: 0 };
  listen(name, card, grip);
  return card;
}

function charts() {
  for (const name of chosen) if (!cards.has(name)) cards.set(name, makeCard(name));
  const roots = chosen.map((name) => cards.get(name).root), there = [...$("cards").children];
  if (roots.length !== there.length || roots.some((root, at) => root !== there[at])) {
    const focused = document.activeElement;
    $("cards").replaceChildren(...roots);
    focused.focus({ preventScroll: true });
  }
  const first = timelines.get(chosen[0]);
  chosen.forEach((name, at) => {
    const timeline = timelines.get(name), card = cards.get(name), { ranks, rankOf, microbatches } = timeline.plan;
    const change = timeline.makespan / first.makespan - 1;
    const pace = at === 0 ? "" : Math.abs(change) < 0.0005 ? ` (as ${chosen[0]})`
      : ` (${percent(Math.abs(change))} ${change < 0 ? "less" : "more"} than ${chosen[0]})`;
    const summary = [
      `${counted(ranks, "rank")} × ${counted(rankOf.length / ranks, "stage")} × ${counted(microbatches, "micro-batch")}`,
      "bubble ", percent(timeline.bubble), "makespan ", plain(timeline.makespan) + pace, "peak memory ", plain(timeline.peak),
    ];
    const bold = (text) => element("b", { textContent: text });
    card.facts.replaceChildren(summary[0], " · ", summary[1], bold(summary[2]), " · ", summary[3], bold(summary[4]),
      " · ", summary[5], bold(summary[6]),
      ...(timeline.over ? [" · ", element("span", { className: "bad", textContent: "over the limit" })] : []));
    card.canvas.setAttribute("aria-label", `Chart of ${name}: ${card.facts.textContent}`);
    card.up.disabled = at === 0;
    chart(name);
  });
}

// ---- Zoom, move, point, drag ------------------------------------------------------------------

function look(from, span) {
  span = clamp(span, 0.005, 1);
  view.from = clamp(from, 0, 1 - span);
  view.to = view.from + span;
  redraw(charts);
}
const zoom = (factor, at = 0.5) => {
  const span = view.to - view.from, wide = clamp(span * factor, 0.005, 1);
  look(view.from + at * (span - wide), wide);
};

function listen(name, { root, canvas }, grip) {
  let held = null;
  const along = (event) => {
    const frame = canvas.getBoundingClientRect(), { left, plot } = measures(timelines.get(name), frame.width);
    return clamp((event.clientX - frame.left - left) / plot, 0, 1);
  };
  // The wheel alone scrolls the page, as everywhere.
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!sideways && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const span = view.to - view.from;
    if (sideways) look(view.from + ((event.deltaX || event.deltaY) / canvas.clientWidth) * span, span);
    else zoom(Math.exp(clamp(event.deltaY * 0.01, -0.7, 0.7)), along(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.clientX, from: view.from };
    if (event.pointerType !== "touch" || view.to - view.from < 1) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held && event.buttons) {
      const span = view.to - view.from, { plot } = measures(timelines.get(name), canvas.clientWidth);
      if (span < 1) look(held.from - ((event.clientX - held.x) / plot) * span, span);
    }
    tip(name, event);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { held = null; });
  canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  canvas.addEventListener("dblclick", (event) => zoom(event.shiftKey ? 2 : 0.5, along(event)));
  canvas.addEventListener("keydown", (event) => {
    const span = view.to - view.from;
    const action = {
      "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), "0": () => look(0, 1), Home: () => look(0, 1),
      ArrowLeft: () => look(view.from - 0.15 * span, span), ArrowRight: () => look(view.from + 0.15 * span, span),
    }[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });
  // A chart that is dragged by its grip goes where the pointer is.
  grip.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    root.classList.add("dragged");
    const move = (event) => {
      const at = chosen.filter((other) => {
        const frame = cards.get(other).root.getBoundingClientRect();
        return other !== name && frame.top + frame.height / 2 < event.clientY;
      }).length;
      if (at !== chosen.indexOf(name)) place(name, at);
    };
    const drop = () => {
      root.classList.remove("dragged");
      removeEventListener("pointermove", move);
      for (const end of ["pointerup", "pointercancel"]) removeEventListener(end, drop);
    };
    addEventListener("pointermove", move);
    for (const end of ["pointerup", "pointercancel"]) addEventListener(end, drop);
  });
}

function tip(name, event) {
  const timeline = timelines.get(name), frame = cards.get(name).canvas.getBoundingClientRect();
  const { left, plot, lane } = measures(timeline, frame.width);
  const rank = Math.floor((event.clientY - frame.top) / lane), row = timeline.plan.rows[rank];
  const share = (event.clientX - frame.left - left) / plot;
  const time = (view.from + share * (view.to - view.from)) * longest();
  const starts = timeline.start[rank], ends = timeline.end[rank];
  const hits = row && share >= 0 && share <= 1 ? range(row.length).filter((at) => starts[at] <= time && time < ends[at]) : [];
  $("tip").hidden = !hits.length;
  if (!hits.length) return;
  const words = hits.map((at) => `${spell(row[at])}, ${data.meanings[row[at].kind]}`).join(" + ");
  $("tip").textContent = `${words}: ${plain(starts[hits[0]])} – ${plain(ends[hits[0]])}`;
  $("tip").style.left = `${clamp(event.clientX + 14, 0, innerWidth - $("tip").offsetWidth - 4)}px`;
  $("tip").style.top = `${clamp(event.clientY + 18, 0, innerHeight - $("tip").offsetHeight - 4)}px`;
}

// ---- Downloads --------------------------------------------------------------------------------

/** The plan, as Taktline and torch read it. */
function csv(name) {
  const text = (row) => row.flatMap((action, at) => {
    if (at > 0 && row[at - 1].joined) return [];
    return [action.joined ? `(${spell(action)};${spell(row[at + 1])})OVERLAP_F_B` : spell(action)];
  });
  return timelines.get(name).plan.rows.map((row) => text(row).join() + "\n").join("");
}

function svg(name) {
  const timeline = timelines.get(name), { ranks } = timeline.plan, width = 1000;
  const { left, lane, plot, height } = measures(timeline, width), x = (time) => left + (time / timeline.makespan) * plot;
  const parts = range(ranks).map((rank) =>
    `<rect x="${left}" y="${rank * lane + 1.5}" width="${plot}" height="${lane - 3}" fill="#f1f3f5"/>` +
    `<text x="${left - 8}" y="${(rank + 0.5) * lane + 4}" text-anchor="end">rank ${rank}</text>`);
  boxes(timeline, lane, ({ action, from, to, top, tall, colour, ink }) => {
    const a = x(from), wide = x(to) - a;
    parts.push(`<rect x="${plain(a)}" y="${top}" width="${plain(Math.max(0.3, wide - 0.6))}" height="${tall}" fill="${colour}">` +
      `<title>${spell(action)}</title></rect>`);
    if (wide > 7 * String(action.microbatch).length + 5 && tall >= 12) {
      parts.push(`<text x="${plain(a + wide / 2)}" y="${top + tall / 2 + 4}" fill="${ink}" text-anchor="middle">${action.microbatch}</text>`);
    }
  });
  for (const tick of ticks(timeline.makespan, 10)) {
    parts.push(`<text x="${plain(x(tick))}" y="${ranks * lane + 18}" text-anchor="middle">${plain(tick)}</text>`);
  }
  return `<svg xmlns="${$("plot").namespaceURI}" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" ` +
    `font-family="sans-serif" font-size="12" fill="#596573">\n<title>${name}</title>\n${parts.join("\n")}\n</svg>\n`;
}

/** The lines that build the same timeline, and train with the same plan. */
function python(name) {
  const { ranks, stages_per_rank: each, microbatches, forward, backward, weight, comm } = settings;
  const share = timelines.get(name).plan.rankOf.length / ranks, divided = (x) => (share > 1 ? `${x} / ${share}` : x);
  const more = data.open.includes(name) ? `, stages_per_rank=${each}` : "";
  const link = comm ? `\n    link=Link(latency=${comm}),` : "";
  return `import taktline as tl
from taktline.plan import Costs, Link

plan = tl.build("${name}", ranks=${ranks}, microbatches=${microbatches}${more})
costs = Costs(
    forward=${divided(forward)},
    backward_input=${divided(backward)},
    backward_weight=${divided(weight)},
    activation=${divided(1)},${link}
)
timeline = tl.simulate(plan, costs)
print(timeline)

# To train with it, as a process of each rank under torchrun:
# pipe = tl.Pipeline(model, example=(x,), schedule=plan, microbatches=${microbatches}, loss_fn=loss_fn)
`.replace(comm ? "" : ", Link", "");
}

const DOWNLOADS = {
  CSV: [csv, "csv", "text/csv"], SVG: [svg, "svg", "image/svg+xml"], Python: [python, "py", "text/x-python"],
};
function download(kind, name) {
  const [write, ending, type] = DOWNLOADS[kind];
  const address = URL.createObjectURL(new Blob([write(name)], { type }));
  element("a", { href: address, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** The same in the terminal. */
function command() {
  const short = { ranks: "-r", microbatches: "-m", stages_per_rank: "-s" };
  const changed = data.settings.filter(({ name, value }) => name !== "memory" && settings[name] !== value);
  return ["taktline show", ...chosen, ...changed.map(({ name }) => `${short[name] ?? "--" + name} ${settings[name]}`)].join(" ");
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
})();
