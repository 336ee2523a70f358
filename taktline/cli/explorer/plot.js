"use strict";
// The plot: bubble over memory, and the frontier of those that no other beats in both.

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
  parts.push(drawn("text", { x: right, y: height - 2, "text-anchor": "end" }, "peak memory, in micro-batches"));
  parts.push(drawn("text", { x: left + 6, y: top + 4 }, "bubble"));
  if (settings.memory) {
    const at = x(settings.memory);
    parts.push(drawn("line", { class: "limit", x1: at, x2: at, y1: top, y2: bottom }));
  }
  const edge = frontier(all);
  const steps = edge.map((t, at) => `${at ? `H${x(t.peak)}V` : `M${x(t.peak)},`}${y(t.bubble)}`);
  if (edge.length) parts.push(drawn("path", { class: "frontier", d: steps.join("") }));

  // Labels keep clear of points, of each other and of the frontier: to the right, or where there is room.
  const lines = edge.slice(1).flatMap((t, at) => {
    const [x1, y1, x2, y2] = [x(edge[at].peak), y(edge[at].bubble), x(t.peak), y(t.bubble)];
    return [{ x1, x2, y1, y2: y1 }, { x1: x2, x2, y1, y2 }];
  });
  const taken = all.map((t) => ({ line: y(t.bubble) + 4, from: x(t.peak) - 5, to: x(t.peak) + 5 }));
  for (const timeline of all.toSorted((a, b) => b.bubble - a.bubble || a.peak - b.peak)) {
    const { name } = timeline.plan, on = chosen.includes(name), long = name.length * 6.6;
    const cx = x(timeline.peak), cy = y(timeline.bubble);
    const free = ({ from, line }) => from > left && from + long < right + 2 && line > top + 8 && line < bottom + 6
      && !taken.some((box) => Math.abs(box.line - line) < 13 && box.from < from + long && from < box.to)
      && !lines.some((part) => part.x1 < from + long && from < part.x2 && part.y1 < line + 3 && line - 11 < part.y2);
    const spots = range(40).flatMap((at) =>
      [cx + 8, cx - long - 8].map((from) => ({ from, line: cy + 4 + 13 * (at % 2 ? -(at + 1) / 2 : at / 2) })));
    const { from, line } = spots.find(free) ?? spots[0], before = from < cx;
    taken.push({ line, from, to: from + long });
    const words = `${name}: bubble ${percent(timeline.bubble)}, memory ${batches(timeline.peak)}`;
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
