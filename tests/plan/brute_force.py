"""A second opinion on plans, written without any of the code under test: slow, plain and on texts.

It knows an action as (stage, kind, micro-batch) and runs a plan by trying all ranks in turn until
nothing moves any more.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence

Leaf = tuple[int, str, int | None]
Ranks = Sequence[Sequence[str]]


def leaves(text: str) -> list[Leaf]:
    """The plain actions in one cell."""
    found = re.findall(r"(\d+)([A-Z]+(?:_[A-Z]+)*)(\d*)", text.replace(")OVERLAP_F_B", ")"))
    return [(int(s), kind, int(m) if m else None) for s, kind, m in found]


def is_valid(
    ranks: Ranks, rank_of: Sequence[int], microbatches: int, lowered: bool, blocking: bool
) -> bool:
    """Whether every action is there once, on its rank, and all ranks can run to their end."""
    return (
        _complete(ranks, rank_of, microbatches, lowered)
        and _channels_agree(ranks, rank_of)
        and _shards_in_order(ranks)
        and _runs(ranks, rank_of, lowered, blocking)
    )


def _complete(ranks: Ranks, rank_of: Sequence[int], microbatches: int, lowered: bool) -> bool:
    all_leaves = [leaf for cells in ranks for cell in cells for leaf in leaves(cell)]
    for rank, cells in enumerate(ranks):
        for cell in cells:
            for stage, _, _ in leaves(cell):
                if stage >= len(rank_of) or rank_of[stage] != rank:
                    return False
    count = Counter(all_leaves)
    kinds = {kind for _, kind, _ in count}
    expected: Counter[Leaf] = Counter()
    for stage in range(len(rank_of)):
        for number in range(microbatches):
            expected[stage, "F", number] = 1
            if kinds & {"B", "I", "W"}:
                halves = count[stage, "I", number] or count[stage, "W", number]
                for kind in "IW" if halves else "B":
                    expected[stage, kind, number] = 1
                if lowered and stage > 0 and rank_of[stage] != rank_of[stage - 1]:
                    expected[stage, "SEND_B", number] = expected[stage - 1, "RECV_B", number] = 1
            if lowered and stage > 0 and rank_of[stage] != rank_of[stage - 1]:
                expected[stage, "RECV_F", number] = expected[stage - 1, "SEND_F", number] = 1
        if "REDUCE_GRAD" in kinds:
            expected[stage, "REDUCE_GRAD", None] = 1
    shards = {leaf: n for leaf, n in count.items() if leaf[1] in ("UNSHARD", "RESHARD")}
    return count == expected + Counter(shards)


def _channels_agree(ranks: Ranks, rank_of: Sequence[int]) -> bool:
    sent: dict[tuple[int, int, str], list[tuple[int, int | None]]] = defaultdict(list)
    received: dict[tuple[int, int, str], list[tuple[int, int | None]]] = defaultdict(list)
    for rank, cells in enumerate(ranks):
        for cell in cells:
            for stage, kind, number in leaves(cell):
                if kind.startswith("SEND"):
                    to = stage + 1 if kind == "SEND_F" else stage - 1
                    sent[rank, rank_of[to], kind[-1]].append((to, number))
                if kind.startswith("RECV"):
                    source = stage - 1 if kind == "RECV_F" else stage + 1
                    received[rank_of[source], rank, kind[-1]].append((stage, number))
    return sent == received


def _shards_in_order(ranks: Ranks) -> bool:
    sharded = any("SHARD" in cell for cells in ranks for cell in cells)
    for cells in ranks:
        ready: set[int] = set()
        reduced: set[int] = set()
        for cell in cells:
            for stage, kind, _ in leaves(cell):
                if kind == "UNSHARD":
                    if stage in ready:
                        return False
                    ready.add(stage)
                elif kind == "RESHARD":
                    if stage not in ready:
                        return False
                    ready.remove(stage)
                elif kind == "REDUCE_GRAD":
                    reduced.add(stage)
                elif kind in "FBIW":
                    if sharded and stage not in ready:
                        return False
                    if kind in "BW" and stage in reduced:
                        return False
    return True


def _runs(ranks: Ranks, rank_of: Sequence[int], lowered: bool, blocking: bool) -> bool:
    done: set[Leaf] = set()
    run = 0
    for _, cell in _as_they_can(ranks, done, rank_of, lowered, blocking):
        done.update(cell)
        run += 1
    return run == sum(map(len, ranks))


def _as_they_can(
    ranks: Ranks, done: Container[Leaf], rank_of: Sequence[int], lowered: bool, blocking: bool
) -> Iterator[tuple[int, list[Leaf]]]:
    """(rank, leaves) of each cell, once what it needs is done; whoever asks adds to what is."""
    at = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, cells in enumerate(ranks):
            while at[rank] < len(cells):
                cell = leaves(cells[at[rank]])
                if not all(_ready(leaf, done, rank_of, lowered, blocking) for leaf in cell):
                    break
                yield rank, cell
                at[rank] += 1
                moved = True


def _ready(
    leaf: Leaf, done: Container[Leaf], rank_of: Sequence[int], lowered: bool, blocking: bool
) -> bool:
    stage, kind, number = leaf

    def backward(of: int) -> bool:
        return (of, "B", number) in done or (of, "I", number) in done

    def arrived(source: int, direction: str, direct: bool) -> bool:
        if lowered and rank_of[source] != rank_of[stage]:
            sent, posted = (
                (source, f"SEND_{direction}", number),
                (stage, f"RECV_{direction}", number),
            )
            return sent in done and posted in done
        return direct

    if kind == "F":
        return stage == 0 or arrived(stage - 1, "F", (stage - 1, "F", number) in done)
    if kind in ("B", "I"):
        return (stage, "F", number) in done and (
            stage == len(rank_of) - 1 or arrived(stage + 1, "B", backward(stage + 1))
        )
    if kind == "W":
        return (stage, "I", number) in done
    if kind == "SEND_F":
        posted = (stage + 1, "RECV_F", number) in done
        return (stage, "F", number) in done and (posted or not blocking)
    if kind == "SEND_B":
        posted = (stage - 1, "RECV_B", number) in done
        return backward(stage) and (posted or not blocking)
    return True


def finish_times(
    ranks: Ranks, rank_of: Sequence[int], duration: Mapping[str, Sequence[float]], latency: float
) -> dict[Leaf, float]:
    """When each action of a compute plan ends; a pair's duration is that of its halves together."""
    end: dict[Leaf, float] = {}
    clock = [0.0] * len(ranks)
    for rank, cell in _as_they_can(ranks, end, rank_of, lowered=False, blocking=False):
        arrivals = [
            end[needed] + latency * (rank_of[needed[0]] != rank)
            for stage, kind, number in cell
            for needed in _sources(stage, kind, number)
            if needed in end
        ]
        start = max([clock[rank], *arrivals])
        clock[rank] = start + sum(duration[kind][stage] for stage, kind, _ in cell)
        end.update(dict.fromkeys(cell, clock[rank]))
    return end


def _sources(stage: int, kind: str, number: int | None) -> list[Leaf]:
    if kind == "F":
        return [(stage - 1, "F", number)]
    if kind in "BI":
        return [(stage + 1, "B", number), (stage + 1, "I", number)]
    return []


State = tuple[tuple[int, ...], ...]


def least_times(
    rank_of: Sequence[int],
    microbatches: int,
    duration: Mapping[str, Sequence[float]],
    latency: float,
    activation: Sequence[float],
    kept: Sequence[float],
    memory: Sequence[float],
) -> tuple[float, float]:
    """The least makespan and the least longest span of a rank, over all plans with F, I and W.

    Micro-batches are alike, so they pass each stage in turn. What was done so far is how many F, I
    and W of each stage; of the ways to it, only those count that no other beats in every clock of a
    rank and in every time at which a result was there.
    """
    stages, ranks = len(rank_of), len(memory)
    begins = [
        sum(
            duration["F"][s] + latency * (rank_of[s] != rank_of[s + 1])
            for s in range(rank_of.index(rank))
        )
        for rank in range(ranks)
    ]
    # (counts of F, I, W by stage) → [(clock of each rank, ends of F and of I of each stage)]
    fronts: dict[State, list[tuple[float, ...]]] = {((0, 0, 0),) * stages: [(0.0,) * ranks]}
    ends_of: dict[State, list[dict[Leaf, float]]] = {((0, 0, 0),) * stages: [{}]}
    for _ in range(3 * stages * microbatches):
        following: dict[State, list[tuple[tuple[float, ...], dict[Leaf, float]]]] = {}
        for state, clocks_of in fronts.items():
            for clocks, ends in zip(clocks_of, ends_of[state], strict=True):
                for stage in range(stages):
                    for kind, name in enumerate("FIW"):
                        moved = _moved(
                            state, stage, kind, rank_of, microbatches, activation, kept, memory
                        )
                        if moved is None:
                            continue
                        number, rank = state[stage][kind], rank_of[stage]
                        source = (stage + (-1, 1, 0)[kind], name, number)
                        there = 0.0
                        if name != "W" and 0 <= source[0] < stages:
                            if source not in ends:
                                continue
                            there = ends[source] + latency * (rank_of[source[0]] != rank)
                        end = max(clocks[rank], there) + duration[name][stage]
                        new = tuple(end if r == rank else c for r, c in enumerate(clocks))
                        known = {leaf: at for leaf, at in ends.items() if leaf != source}
                        beyond = stage + (1, -1, 0)[kind]
                        if name != "W" and 0 <= beyond < stages:
                            known[stage, name, number] = end
                        following.setdefault(moved, []).append((new, known))
        fronts, ends_of = {}, {}
        for state, ways in following.items():
            best = _unbeaten(ways)
            fronts[state] = [clocks for clocks, _ in best]
            ends_of[state] = [ends for _, ends in best]
    ((_, finals),) = fronts.items()
    return (
        min(max(clocks) for clocks in finals),
        min(max(c - b for c, b in zip(clocks, begins, strict=True)) for clocks in finals),
    )


def _moved(
    state: State,
    stage: int,
    kind: int,
    rank_of: Sequence[int],
    microbatches: int,
    activation: Sequence[float],
    kept: Sequence[float],
    memory: Sequence[float],
) -> State | None:
    """The state after one more action of a kind, if order and memory allow it."""
    counts = list(state[stage])
    counts[kind] += 1
    if counts[kind] > (microbatches, counts[0], counts[1])[kind]:
        return None
    moved = (*state[:stage], tuple(counts), *state[stage + 1 :])
    held = sum(
        (f - i) * activation[s] + (i - w) * kept[s]
        for s, (f, i, w) in enumerate(moved)
        if rank_of[s] == rank_of[stage]
    )
    return moved if held <= memory[rank_of[stage]] else None


def _unbeaten(
    ways: list[tuple[tuple[float, ...], dict[Leaf, float]]],
) -> list[tuple[tuple[float, ...], dict[Leaf, float]]]:
    keys = sorted(
        {(*clocks, *(at for _, at in sorted(ends.items()))): None for clocks, ends in ways}
    )
    by_key = {
        (*clocks, *(at for _, at in sorted(ends.items()))): (clocks, ends) for clocks, ends in ways
    }
    kept: list[tuple[float, ...]] = []
    for key in keys:
        if not any(all(a <= b for a, b in zip(one, key, strict=True)) for one in kept):
            kept.append(key)
    return [by_key[key] for key in kept]
