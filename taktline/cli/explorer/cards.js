"use strict";
// The charts that were chosen, each on a card: to zoom, to move through, to drag to another place.

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
      "bubble ", percent(timeline.bubble), "makespan ", plain(timeline.makespan) + pace, "peak memory ", batches(timeline.peak),
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
