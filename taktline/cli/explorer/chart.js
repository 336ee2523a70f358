"use strict";
// The chart of a timeline, on a canvas and as files.

const AXIS = 26; // pixels for the times below the lanes
const paints = new Map();

/** The colour of an action and of the letters on it: lighter for a rank's later stages. */
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
  if (!small) pen.fillText("peak", width - 6, ranks * lane + 15);
  cards.get(name).boxes = count;
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
    backward_weight=${divided(weight)},${link}
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
