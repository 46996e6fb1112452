"""What one training step sends, read off the program: the same numbers that the transport counts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.lowering.factors import Factors
from shoal.lowering.owners import FROM_OWNERS, TO_OWNERS
from shoal.lowering.placement import Placed, sharers
from shoal.lowering.program import Compute, Fetch, Program, Settle
from shoal.moves import Layout, Move
from shoal.partition import volume
from shoal.traffic import Sent, ring_bytes

GRADIENTS = "gradients"
"""The label of gradient sums, whose buckets span layers; everything else is labelled with its layer."""
INPUT = "input"
"""The label of the sum of an input's gradient, where every rank passed the whole input."""
SUMMED_BYTES = 4
"""What rules sum over parts, they sum in float32 at least."""


@dataclass
class Bucket:
    """Parameters whose gradients are summed together."""

    ranks: tuple[int, ...]
    names: list[str] = field(default_factory=list)
    bytes: int = 0


def fill_buckets(shards: Iterable[tuple[str, tuple[int, ...], str, int]], limit: int) -> list[Bucket]:
    """Neighbours with the same ranks and type share a bucket, which is closed when it has `limit` bytes.

    A gradient that large has a bucket of its own, and so need not be copied into one.
    `shards`: (name, ranks, type, bytes) in the order in which backward finishes them.
    """
    closed: list[Bucket] = []
    opened: dict[tuple[tuple[int, ...], str], Bucket] = {}
    for name, ranks, dtype, size in shards:
        if len(ranks) < 2 or not size:
            continue
        if size >= limit:
            closed.append(Bucket(ranks, [name], size))
            continue
        bucket = opened.setdefault((ranks, dtype), Bucket(ranks))
        bucket.names.append(name)
        bucket.bytes += size
        if bucket.bytes >= limit:
            closed.append(opened.pop((ranks, dtype)))
    return [*closed, *opened.values()]


def step_traffic(
    program: Program,
    rank: int,
    *,
    trainable: Sequence[str],
    homes: Mapping[str, Layout],
    uses: Mapping[str, Layout] | None = None,
    itemsize: Mapping[str, int],
    dtypes: Mapping[str, str],
    bucket_bytes: int,
    inputs: frozenset[str] = frozenset(),
    local_statistics: bool = False,
    again: range = range(0),
    factors: Mapping[str, Factors] | None = None,
    accumulated: bool = False,
    learning: frozenset[str] | None = None,
    laps: Sequence[tuple[Program, range]] = (),
) -> dict[str, Sent]:
    """What `rank` sends in one forward and backward pass, by layer. Layers that send nothing are left out.

    `trainable`: states in the order in which backward finishes them; `homes`: where states live, and
    `uses`: what layers read of them, where that is more; `itemsize`: bytes of one element of every value and state;
    `inputs`: those whose gradient is wanted; `again`: the instructions whose forward pass is run a second time;
    `factors`: of weights whose gradients are not summed, but found from these; `accumulated`: but for a pass on top of
    gradients of others, in which they are summed, each by itself; `learning`: all states that learn, where some of them
    step before the end, so that nothing is summed; `laps`: what runs behind the program's outputs, each with what of
    it is run a second time.
    """
    factors = factors or {}
    learning = frozenset(trainable) if learning is None else learning
    flowing = program.needing_grad(learning, inputs)
    by_label: dict[str, Sent] = {}
    _note_pass(by_label, program, rank, flowing, itemsize, again, local_statistics)
    for lap, twice in laps:
        features = frozenset(name for name in lap.graph.inputs if name in flowing)
        back = lap.needing_grad(learning, features)
        _note_pass(by_label, lap, rank, back, itemsize, twice, local_statistics)
    shards: list[tuple[str, tuple[int, ...], str, int]] = []
    alone: list[tuple[str, tuple[int, ...], str, int]] = []
    for name in trainable:
        box, own = homes[name][rank], factors.get(name)
        if box is None:
            continue
        if own is not None and not accumulated:
            peers = len(own.peers(rank)) if own.elements(rank) else 0
            _note(by_label, own.layer, Sent(peers * own.elements(rank) * itemsize[name], peers))
            continue
        shard = (name, sharers(homes[name])[box], dtypes[name], volume(box) * itemsize[name])
        (shards if own is None else alone).append(shard)
    for bucket in [*fill_buckets(shards, bucket_bytes), *fill_buckets(alone, 1)]:
        size = ring_bytes(bucket.bytes, len(bucket.ranks), bucket.ranks.index(rank))
        _note(by_label, GRADIENTS, Sent(size, 1))
    for name, use in (uses or {}).items():
        box, mine = use[rank], homes[name][rank]
        if box is not None and mine is not None and mine != box:
            others = use.count(box) - 1
            _note(by_label, FROM_OWNERS, Sent(others * volume(mine) * itemsize[name], others))
            if name in trainable:
                _note(by_label, TO_OWNERS, Sent((volume(box) - volume(mine)) * itemsize[name], others))
    for name, spec in program.graph.inputs.items():
        if name in flowing & program.copies and program.ranks > 1:
            _note(by_label, INPUT, Sent(ring_bytes(spec.elements * itemsize[name], program.ranks, rank), 1))
    return by_label


def _note_pass(
    by_label: dict[str, Sent],
    program: Program,
    rank: int,
    flowing: frozenset[str],
    itemsize: Mapping[str, int],
    again: range,
    local_statistics: bool,
) -> None:
    """What layers and the moves between them send, forward and backward."""
    for index, instruction in enumerate(program.instructions):
        runs = 1 + (index in again)
        match instruction:
            case Fetch(identity=True):
                pass
            case Fetch(value=value) | Settle(value=value):
                sent = _moved(instruction.moves, rank, itemsize[value], runs, back=value in flowing)
                _note(by_label, instruction.label, sent)
            case Compute(placed=placed):
                name, reads = placed.layer.name, placed.layer.reads
                back = name in flowing if placed.copies else any(read in flowing for read in reads)
                _note(by_label, name, _summed(placed, rank, itemsize[name], runs, back, local_statistics))


def _note(by_label: dict[str, Sent], label: str, sent: Sent) -> None:
    if sent.messages:
        by_label[label] = by_label.get(label, Sent()) + sent


def _moved(moves: tuple[Move, ...], rank: int, itemsize: int, runs: int, *, back: bool) -> Sent:
    forward = [move for move in moves if move.src == rank != move.dst] * runs
    backward = [move for move in moves if back and move.dst == rank != move.src]
    mine = forward + backward
    return Sent(sum(volume(move.box) for move in mine) * itemsize, len(mine))


def _summed(placed: Placed, rank: int, itemsize: int, runs: int, back: bool, local: bool) -> Sent:
    part = placed.parts[rank]
    sent = Sent()
    if part is None:
        return sent
    parts = dict(placed.cut.degrees)
    for summed in placed.rule.sums(placed.op, part, placed.cut_letters, parts, local=local):
        ranks = placed.group(rank, summed.over)
        passes = summed.forward * runs + (summed.backward and back)
        if len(ranks) > 1 and passes:
            size = ring_bytes(summed.elements * max(itemsize, SUMMED_BYTES), len(ranks), ranks.index(rank))
            sent += Sent(size * passes, passes)
    return sent
