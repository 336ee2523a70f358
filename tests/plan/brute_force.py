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
