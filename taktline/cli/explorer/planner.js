"use strict";
// Schedules and their simulation, as in taktline/plan: a test holds that both agree.
// An action is {kind, stage, microbatch}, with `joined` if it runs as one with the next.

const range = (count) => Array.from({ length: count }, (_, number) => number);

/** The stages of each rank: in a loop, or in a V. */
const loop = (ranks, perRank) => range(ranks).map((r) => range(perRank).map((c) => r + c * ranks));
const vee = (ranks) => range(ranks).map((r) => [r, 2 * ranks - 1 - r]);

// ---- The ways in which schedules are written down: by slot, by phase, under a limit ----------

const row = (kind, stage, numbers) => numbers.map((microbatch) => ({ kind, stage, microbatch }));

/** Merge sequences that take one slot after the other, each from a slot of its own on. */
function inSlots(...parts) {
  const slots = [];
  for (const [actions, first] of parts) {
    actions.forEach((action, at) => (slots[first + at] ??= []).push(action));
  }
  return slots.flat();
}

/** Micro-batches in rounds of at least so many, as even as can be, larger ones first. */
function rounds(microbatches, atLeast) {
  const count = Math.max(1, Math.floor(microbatches / atLeast));
  const size = Math.floor(microbatches / count), larger = microbatches % count;
  let next = 0;
  return range(count).map((at) => range(size + (at < larger ? 1 : 0)).map(() => next++));
}

/** A rank's stages in turn, each for one round of micro-batches before the next takes over. */
const inRounds = (kind, stages, turns) =>
  turns.flatMap((numbers) => stages.flatMap((stage) => row(kind, stage, numbers)));

/** Spell out phases, [how often, pattern]; leave out the micro-batches that there are not. */
function play(phases, stages, microbatches) {
  const actions = [], halves = [], ofChunk = stages.map(() => []);
  const forwards = stages.map(() => 0), backwards = stages.map(() => 0);
  const weights = stages.map(() => 0);
  let oldest = 0;
  for (const [times, pattern] of phases) {
    const words = pattern.replaceAll("&", "& ").split(" ");
    for (let time = 0; time < times; time++) {
      for (const word of words) {
        const kind = word[0], chunk = Number(word[1]), joined = word.endsWith("&");
        let action = { kind, stage: stages[chunk], microbatch: 0, joined };
        if (kind === "F") action.microbatch = forwards[chunk]++;
        else if (kind !== "W") action.microbatch = backwards[chunk]++;
        else action = { ...(word === "W" ? halves[oldest++] : ofChunk[chunk][weights[chunk]++]), kind };
        if (kind === "I") ofChunk[chunk].push(action), halves.push(action);
        actions.push(action);
      }
    }
  }
  return actions.filter((action) => action.microbatch < microbatches);
}

/** Two stages per rank in a V with at most `limit` activations: what is due first in a pattern. */
function limited(ranks, microbatches, limit) {
  if (limit >= 2 * ranks) return SCHEDULES.zbv.actions(ranks, 2, microbatches);
  const period = 6, turn = 3, last = 2 * ranks - 1, unit = Math.max(1, ranks - 1);
  const up = unit + Math.max(0, 3 * limit - 2 * ranks - 4 - turn);
  const atLoss = unit * ranks + up * (ranks - 1) + unit * (1 + turn);
  const actions = range(ranks).map(() => []), weights = range(ranks).map(() => []);
  const [forwards, backwards, live] = range(3).map(() => new Int32Array(2 * ranks));
  const before = (a, b) => a.due - b.due || a.tie - b.tie;
  const queues = range(ranks).map((rank) => [
    { due: unit * rank, tie: 3, kind: "F", stage: rank },
    { due: unit * ranks + up * (ranks - 1 - rank), tie: 2, kind: "F", stage: last - rank },
    { due: atLoss + unit * rank, tie: 1, kind: "I", stage: last - rank },
    { due: atLoss + unit * ranks + up * (ranks - 1 - rank), tie: 0, kind: "I", stage: rank },
  ].sort(before));

  const ready = (kind, stage) => {
    if (kind === "I") {
      const number = backwards[stage];
      return forwards[stage] > number && (stage === last || backwards[stage + 1] > number);
    }
    return live[stage] + live[last - stage] < limit && (stage >= ranks || live[stage] < limit - 1) &&
      (stage === 0 || forwards[stage - 1] > forwards[stage]);
  };
  /** The place in the rank's queue of what to run now; -1 for a W, null for nothing. */
  const choose = (rank, reach) => {
    const queue = queues[rank], pending = weights[rank].length > 0;
    for (let place = 0; place < queue.length; place++) {
      if (place && (pending || queue[place].due - queue[0].due > reach)) break;
      if (ready(queue[place].kind, queue[place].stage)) return place;
    }
    return pending ? -1 : null;
  };
  const run = (rank, place) => {
    if (place < 0) {
      const action = weights[rank].shift();
      live[action.stage]--;
      actions[rank].push(action);
      return;
    }
    const [chosen] = queues[rank].splice(place, 1), { kind, stage } = chosen;
    const microbatch = kind === "F" ? forwards[stage]++ : backwards[stage]++;
    if (microbatch + 1 < microbatches) {
      queues[rank].push({ ...chosen, due: chosen.due + period * unit });
      queues[rank].sort(before);
    }
    if (kind === "F") live[stage]++;
    else weights[rank].push({ kind: "W", stage, microbatch });
    actions[rank].push({ kind, stage, microbatch });
  };

  let moved = true;
  while (queues.some((queue) => queue.length) || weights.some((pending) => pending.length)) {
    const reach = moved ? period * unit : Infinity;
    const choices = range(ranks).map((rank) => choose(rank, reach));
    choices.forEach((place, rank) => { if (place !== null) run(rank, place); });
    moved = choices.some((place) => place !== null);
  }
  return actions;
}

// ---- The schedules: the actions of each rank ------------------------------------------------

const one = (write) => ({
  place: (ranks) => loop(ranks, 1),
  actions: (ranks, _, m) => range(ranks).map((rank) => write(rank, range(m), ranks - 1)),
});
const several = (write) => ({
  place: loop,
  actions: (ranks, perRank, m) =>
    loop(ranks, perRank).map((stages, rank) => {
      const turns = rounds(m, ranks);
      return write(rank, stages, turns, (perRank - 1) * turns[0].length, ranks - 1);
    }),
});
const inVee = (phases, fills) => ({
  place: vee,
  actions: (ranks, _, m) =>
    vee(ranks).map((stages, rank) => play(phases(rank, ranks, Math.max(m, fills(ranks))), stages, m)),
});
const underLimit = (limit) => ({
  place: vee,
  actions: (ranks, _, m) => limited(ranks, m, 2 * limit(ranks)),
});

const SCHEDULES = {
  gpipe: one((rank, all) => [...row("F", rank, all), ...row("B", rank, all)]),
  "1f1b": one((rank, all, last) =>
    inSlots([row("F", rank, all), 0], [row("B", rank, all), last - rank])),
  interleaved_1f1b: several((rank, stages, turns, warmup, last) =>
    inSlots(
      [inRounds("F", stages, turns), 0],
      [inRounds("B", stages.toReversed(), turns), warmup + 2 * (last - rank)],
    )),
  looped_bfs: several((rank, stages, turns) => [
    ...inRounds("F", stages, [turns.flat()]),
    ...inRounds("B", stages, [turns.flat()]).reverse(),
  ]),
  zb_h1: one((rank, all, last) =>
    inSlots([row("F", rank, all), 0], [row("I", rank, all), last - rank], [row("W", rank, all), last])),
  zb_h2: one((rank, all, last) =>
    inSlots(
      [row("F", rank, all), 0],
      [row("I", rank, all), 2 * (last - rank)],
      [row("W", rank, all), 2 * last],
    )),
  interleaved_zero_bubble: several((rank, stages, turns, warmup, last) =>
    inSlots(
      [inRounds("F", stages, turns), 0],
      [inRounds("I", stages.toReversed(), turns), warmup + last - rank],
      [inRounds("W", stages.toReversed(), turns), warmup + last],
    )),
  zbv: inVee((rank, ranks, count) => [
    [2 * (ranks - rank) - 1, "F0"],
    [rank, "F1 F0"],
    [ranks - rank, "F1 I1 W1"],
    [count - 2 * ranks + 1 + rank, "F0 I0 W0 F1 I1 W1"],
    [ranks - rank - 1, "I0 W0 F1 I1 W1"],
    [rank, "I0 I1"],
    [ranks - rank, "I0 W0"],
    [rank, "W1"],
    [rank, "W0"],
  ], (ranks) => 2 * ranks - 1),
  dualpipev: inVee((rank, ranks, count) => {
    const toTurn = ranks - 1 - rank, half = (rank + 1) >> 1, atTurn = toTurn === 0 ? 1 : 0;
    return [
      [2 * toTurn, "F0"],
      [rank + 1, "F0 F1"],
      [toTurn, "I1 W F1"],
      [atTurn, "F0 B1 F1&B0"],
      [count - 2 * ranks + rank + 1 - atTurn, "F0&B1 F1&B0"],
      [toTurn, "B1 F1&B0"],
      [half, "B1 B0"],
      [rank % 2 ? 0 : 1, "B1 I0"],
      [half, "I1 I0"],
      [toTurn, "W I0"],
      [rank + 1, "W"],
    ];
  }, (ranks) => 2 * ranks),
  v_half: underLimit((ranks) => (ranks + 2) >> 1),
  v_min: underLimit((ranks) => Math.floor((ranks + 4) / 3)),
};

/** The plan of a schedule; each rank holds `perRank` stages where the schedule leaves it open. */
function build(name, ranks, perRank, microbatches) {
  const { place, actions } = SCHEDULES[name], stagesOf = place(ranks, perRank);
  const rankOf = [];
  stagesOf.forEach((stages, rank) => stages.forEach((stage) => { rankOf[stage] = rank; }));
  return { name, ranks, microbatches, stagesOf, rankOf, rows: actions(ranks, perRank, microbatches) };
}

// ---- The simulation -------------------------------------------------------------------------

/** When each action of a plan starts and ends, and what each rank keeps.
 *
 * The costs are those of a rank's whole share of the model, which its stages divide: `forward`,
 * `backward` (for the inputs), `weight`; and `comm`, the time of a message between ranks.
 */
function simulate(plan, costs) {
  const { rankOf, microbatches, rows } = plan, stages = rankOf.length, share = stages / plan.ranks;
  const lasts = { F: costs.forward / share, I: costs.backward / share, W: costs.weight / share };
  lasts.B = lasts.I + lasts.W;
  const phases = stages * microbatches;
  const done = new Float64Array(2 * phases).fill(-1), waiter = new Int32Array(2 * phases).fill(-1);
  const slot = (back, stage, microbatch) => (back ? phases : 0) + stage * microbatches + microbatch;
  const start = rows.map((row) => new Float64Array(row.length)), end = start.map((row) => row.slice());
  const reached = new Int32Array(plan.ranks), clock = new Float64Array(plan.ranks);

  /** When what an action gets from its neighbour is there; or -1 - slot if that is still to come. */
  const arrival = ({ kind, stage, microbatch }) => {
    const from = kind === "F" ? stage - 1 : stage + 1;
    if (kind === "W" || from < 0 || from >= stages) return 0;
    const source = slot(kind !== "F", from, microbatch);
    if (done[source] < 0) return -1 - source;
    return done[source] + (rankOf[from] === rankOf[stage] ? 0 : costs.comm);
  };

  const awake = range(plan.ranks);
  while (awake.length) {
    const rank = awake.pop(), row = rows[rank];
    while (reached[rank] < row.length) {
      const at = reached[rank], pair = row[at].joined ? 2 : 1;
      let from = clock[rank], time = 0, missing = 0;
      for (let half = at; half < at + pair && !missing; half++) {
        const there = arrival(row[half]);
        if (there < 0) missing = there;
        from = Math.max(from, there);
        time += lasts[row[half].kind];
      }
      if (missing) {
        waiter[-1 - missing] = rank;
        break;
      }
      clock[rank] = from + time;
      for (let half = at; half < at + pair; half++) {
        const { kind, stage, microbatch } = row[half];
        start[rank][half] = from;
        end[rank][half] = clock[rank];
        if (kind === "W") continue;
        const result = slot(kind !== "F", stage, microbatch);
        done[result] = clock[rank];
        if (waiter[result] >= 0) awake.push(waiter[result]);
      }
      reached[rank] = at + pair;
    }
  }

  const makespan = Math.max(...clock);
  const busy = microbatches * (costs.forward + costs.backward + costs.weight);
  const peaks = rows.map((row) => {
    let live = 0, peak = 0;
    for (const { kind } of row) {
      if (kind === "F") peak = Math.max(peak, ++live);
      else if (kind !== "I") live--;
    }
    return peak / share;
  });
  return { plan, start, end, makespan, bubble: 1 - busy / makespan, peaks, peak: Math.max(...peaks) };
}
