"""The simulator beside closed forms, and what holds of every plan that it plays."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import isnan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cluster import Cluster, Level
from shoal.lowering.tasks import Bytes, Moved, StepOptions, Summed, Task, Tasks
from shoal.partition import Box, Span
from shoal.planning.costs import CostModel
from shoal.planning.price import price, tasks_of
from shoal.planning.resolve import resolve
from shoal.planning.stages import stages_of
from shoal.simulating.collectives import shape_of, sharing_of, sum_phases
from shoal.simulating.durations import Durations, sent_bytes
from shoal.simulating.flows import flows_of
from shoal.simulating.links import Agenda, Links
from shoal.simulating.play import Noise, Played, play
from shoal.simulating.simulate import simulate, trace_of
from tests.unit.test_costs import Simple, model_of, table_cost
from tests.unit.test_moves import anything, disjoint, sizes
from tests.unit.test_transfers import DEVICE, cluster_of

pytestmark = pytest.mark.usefixtures("one_thread")


def level(size: int, **fields: Any) -> Level:
    given: dict[str, Any] = {"bandwidth": 1e6, "latency": 0.0, **fields}
    return Level(name=f"of {size}", size=size, source="made up", **given)


def speeds_on(*levels: Level) -> Simple:
    cluster = Cluster(name="made up", device=DEVICE, levels=levels)
    return Simple(cluster, layer_overhead=0.0, step_overhead=0.0, copy_per_byte=0.0)


@cache
def program_for(ranks: int) -> Tasks:
    model = model_of("chain", ranks)
    return tasks_of(model, resolve("data", model.graph, ranks).cuts)


def listed(ranks: int, *tasks: Task) -> Tasks:
    """Tasks of one's own; what program they would be of does not matter."""
    whole = program_for(ranks)
    return Tasks(whole.program, StepOptions({}, 1), tasks, (), frozenset())


def played(speeds: Simple, ranks: int, *tasks: Task, noise: Noise | None = None, steps: int = 1) -> Played:
    return play(Durations(listed(ranks, *tasks), speeds), noise=noise, steps=steps)


def computing(ranks: int, seconds: float) -> Task:
    """Seconds on every rank, as bytes that the optimizer steps over."""
    return Task("update", "", tuple(range(ranks)), Bytes((round(seconds * 1e9),) * ranks))


def sum_of(size: int, *groups: tuple[int, ...], waits: bool = False) -> Task:
    ranks = tuple(sorted(rank for group in groups for rank in group))
    return Task("sum", "gradients", ranks, Summed(groups, (size,) * len(groups)), waits=waits)


def sending(ranks: int, size: int, src: int, dst: int) -> Task:
    have: list[Box | None] = [None] * ranks
    need: list[Box | None] = [None] * ranks
    have[src], need[dst] = (Span(0, size),), (Span(0, size),)
    return Task("move", "", (src, dst), Moved(tuple(have), tuple(need), False, 1))


# Closed forms


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_sends_two_times_p_minus_one_over_p(ranks: int) -> None:
    large = 1_000_000
    result = played(speeds_on(level(ranks)), ranks, sum_of(large, tuple(range(ranks))))
    assert result.seconds == pytest.approx(2 * (ranks - 1) / ranks * large / 1e6)


def test_the_algorithm_depends_on_the_size() -> None:
    cluster = speeds_on(level(8, latency=1e-3, bandwidth=1e6)).cluster
    shape, alone = shape_of(range(8), cluster), (1,)
    (small,) = sum_phases(8, shape, alone, cluster)
    (large,) = sum_phases(1e7, shape, alone, cluster)
    assert small.latency == pytest.approx(3e-3)  # log2 of the ranks
    assert large.latency == pytest.approx(14e-3)  # a ring's messages


def test_a_hierarchical_sum_uses_every_ranks_own_link_to_other_hosts() -> None:
    inner, outer = level(4, bandwidth=1e9), level(16, bandwidth=1e6)
    cluster = speeds_on(inner, outer).cluster
    phases = sum_phases(1e6, shape_of(range(16), cluster), (1, 1), cluster)
    expected = 1.5 * 1e6 / 1e9 + 1.5 * (1e6 / 4) / 1e6
    assert sum(phase.seconds(cluster, (1, 1)) for phase in phases) == pytest.approx(expected)


def test_groups_of_a_host_share_its_card() -> None:
    """Four ranks on two hosts: two groups that each reach over both take twice as long as one of them."""
    speeds = speeds_on(level(2, bandwidth=1e9), level(4, shared=True))
    one = played(speeds, 4, sum_of(1_000_000, (0, 2)))
    both = played(speeds, 4, sum_of(1_000_000, (0, 2), (1, 3)))
    within = played(speeds, 4, sum_of(1_000_000, (0, 1), (2, 3)))
    assert one.seconds == pytest.approx(1.0)
    assert both.seconds == pytest.approx(2.0)
    assert within.seconds == pytest.approx(1e-3)
    assert sharing_of([(0, 2), (1, 3)], speeds.cluster) == (1, 2)
    assert sharing_of([(0, 1), (2, 3)], speeds.cluster) == (1, 1)


def test_two_flows_take_half_of_a_link_each() -> None:
    agenda = Agenda()
    ends: list[float] = []
    links = Links(agenda)
    links.carry("link", 1.0, 1, ends.append)

    def another(_: float) -> None:
        links.carry("link", 1.0, 1, ends.append)

    agenda.note(0.5, another)
    links.carry("another", 0.25, 1, ends.append)
    agenda.run()
    assert ends == pytest.approx([0.25, 1.5, 2.0])


def test_two_sums_at_once_halve_and_two_directions_do_not() -> None:
    speeds = speeds_on(level(2))
    alone = played(speeds, 2, sending(2, 1_000_000, 0, 1))
    again = played(speeds, 2, sending(2, 1_000_000, 0, 1), sending(2, 1_000_000, 0, 1))
    back = played(speeds, 2, sending(2, 1_000_000, 0, 1), sending(2, 1_000_000, 1, 0))
    assert (alone.seconds, again.seconds, back.seconds) == pytest.approx((1.0, 2.0, 1.0))


def test_a_sum_goes_on_behind_computing_and_slows_it_by_the_contention() -> None:
    tasks = sum_of(1_000_000, (0, 1)), computing(2, 0.4)
    assert played(speeds_on(level(2)), 2, *tasks).seconds == pytest.approx(1.0)
    contended = played(speeds_on(level(2, contention=0.5)), 2, *tasks)
    assert float(contended.ends[1, 0]) == pytest.approx(0.6)
    waiting = played(speeds_on(level(2)), 2, replace(tasks[0], waits=True), tasks[1])
    assert waiting.seconds == pytest.approx(1.4)


def test_ranks_that_computed_longer_wait_longer_for_each_other() -> None:
    """Since they last met, and only where they wait: a sum of gradients goes on behind."""
    speeds = speeds_on(level(2, skew=0.1))
    meeting = replace(sum_of(8, (0, 1), waits=True), label="a layer")
    once = played(speeds, 2, computing(2, 1.0), meeting)
    twice = played(speeds, 2, computing(2, 1.0), meeting, computing(2, 3.0), sending(2, 8, 0, 1))
    behind = played(speeds, 2, computing(2, 1.0), sum_of(8, (0, 1)))
    assert once.seconds == pytest.approx(1.1, rel=1e-4)
    assert twice.seconds == pytest.approx(1.1 + 3.3, rel=1e-4)
    assert behind.seconds == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_slowest_of_exponential_delays(ranks: int) -> None:
    """The mean of the largest of P exponentials is 1 + 1/2 + ... + 1/P times theirs."""
    steps, mean = 3000, 0.01
    tasks = computing(ranks, 0.02), sum_of(8, tuple(range(ranks)), waits=True)
    result = played(speeds_on(level(ranks)), ranks, *tasks, noise=Noise(delay=mean, seed=3), steps=steps)
    expected = 0.02 + mean * sum(1 / k for k in range(1, ranks + 1))
    assert result.seconds / steps == pytest.approx(expected, rel=0.03)
    again = played(speeds_on(level(ranks)), ranks, *tasks, noise=Noise(delay=mean, seed=3), steps=steps)
    assert again.seconds == result.seconds


def test_a_slow_rank_holds_the_others_up() -> None:
    tasks = computing(4, 0.1), sum_of(8, (0, 1, 2, 3), waits=True)
    slow = played(speeds_on(level(4)), 4, *tasks, noise=Noise(speeds={2: 0.5}))
    assert slow.seconds == pytest.approx(0.2, rel=1e-3)
    assert Counter(slow.classes.tolist()) == {0: 3, 1: 1}


# What holds of every plan

PLANS = ["data", "model", "owt", "spatial", "2x2"]
CLUSTERS = [cluster_of(4), cluster_of(2, 4), cluster_of(2, 4, shared=True)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("net", ["residual", "inception"])
def test_one_task_at_a_time_and_everything_arrives(net: str, plan: str) -> None:
    for cluster in CLUSTERS:
        model = replace(model_of(net, 4), speeds=Simple(cluster))
        tasks = tasks_of(model, resolve(plan, model.graph, 4).cuts)
        durations = Durations(tasks, model.speeds)
        trace = trace_of(play(durations), plan)
        assert trace.origin == "predicted"
        for rank in range(4):
            mine = sorted((s.start, s.end) for s in trace.slices if s.rank == rank and s.lane == "compute")
            assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(mine))
        assert all(message.received > message.sent for message in trace.messages)
        moved = sum(
            size
            for task, size in zip(tasks.tasks, sent_bytes(tasks.tasks, durations), strict=True)
            if task.kind == "move"
        )
        assert sum(message.bytes for message in trace.messages) == moved
        for task in tasks.tasks:
            if isinstance(task.work, Moved):
                flows = durations.flows(task.work)
                assert flows.sent.sum() == flows.received.sum()
        assert sum(s.bytes for s in trace.slices) == sum(sent_bytes(tasks.tasks, durations))


@pytest.mark.parametrize("net", ["residual", "lenet5"])
@pytest.mark.parametrize("plan", PLANS)
def test_classes_of_ranks_change_nothing(net: str, plan: str) -> None:
    for cluster in CLUSTERS:
        model = replace(model_of(net, 4), speeds=Simple(cluster))
        durations = Durations(tasks_of(model, resolve(plan, model.graph, 4).cuts), model.speeds)
        folded = play(durations)
        apart = play(durations, noise=Noise(jitter=1e-12))
        assert apart.classes.tolist() == [0, 1, 2, 3]
        for rank in range(4):
            mine, alone = folded.ends[:, folded.classes[rank]], apart.ends[:, rank]
            assert np.array_equal(np.isnan(mine), np.isnan(alone))
            assert mine[~np.isnan(mine)] == pytest.approx(alone[~np.isnan(alone)], rel=1e-6)


@given(st.data())
@settings(max_examples=40, derandomize=True, deadline=None)
def test_flows_are_those_of_the_list_of_moves(data: st.DataObject) -> None:
    from shoal.moves import add_moves
    from shoal.partition import volume

    shape, ranks = data.draw(sizes), data.draw(st.sampled_from([2, 3, 4, 6]))
    have, need = data.draw(disjoint(shape, ranks)), data.draw(anything(shape, ranks))
    cluster = data.draw(st.sampled_from([cluster_of(ranks), *([cluster_of(2, ranks)] if ranks > 2 else [])]))
    flows = flows_of(Moved(have, need, False, 4), [level.size for level in cluster.levels])
    sent, received = np.zeros_like(flows.sent), np.zeros_like(flows.received)
    for move in add_moves(have, need):
        crossed = cluster.level_of(move.src, move.dst)
        if crossed is not None:
            sent[crossed, move.src] += volume(move.box)
            received[crossed, move.dst] += volume(move.box)
            assert flows.sources[move.dst, move.src] or not volume(move.box)
    assert np.array_equal(flows.sent, sent)
    assert np.array_equal(flows.received, received)
    assert np.array_equal(flows.back.received, sent)


@pytest.mark.parametrize("plan", PLANS)
@given(factor=st.floats(1.0, 20.0))
@settings(max_examples=8, derandomize=True, deadline=None)
def test_a_price_does_not_rise_with_the_bandwidth(plan: str, factor: float) -> None:
    model = model_of("residual", 4)
    for cluster in CLUSTERS:
        faster = cluster.model_copy(
            update={"levels": tuple(x.model_copy(update={"bandwidth": x.bandwidth * factor}) for x in cluster.levels)}
        )
        cuts = resolve(plan, model.graph, 4).cuts
        before, after = (price(replace(model, speeds=Simple(c)), cuts, plan).seconds for c in (cluster, faster))
        assert after <= before * (1 + 1e-9)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("plan", ["data", "model"])
def test_the_tables_are_the_simulator_where_nothing_overlaps(plan: str, cluster: Cluster) -> None:
    """Every task of the network waited for at once, each gradient a bucket of its own, and no labels sent around."""
    known = model_of("chain", 4)
    speeds = Simple(cluster, copy_per_byte=0.0)
    model = CostModel(known.graph, 4, speeds, known.boundary, bucket_bytes=1, losses=known.losses)
    tables = model.tables(stages_of(model.graph, 4))
    cuts = resolve(plan, model.graph, 4).cuts
    choice, foreign = tables.choice_of(cuts)
    assert not foreign
    step = tasks_of(model, cuts)
    serial = [replace(task, waits=task.resource == "network", after=()) for task in step.tasks]
    of_values = [task for task in serial if not (isinstance(task.work, Moved) and task.work.itemsize == 8)]
    result = play(Durations(replace(step, tasks=tuple(of_values)), model.speeds))
    expected = table_cost(tables, tuple(choice), 1.0) + model.speeds.step_overhead
    assert result.seconds == pytest.approx(expected, rel=1e-9)


def test_a_trace_of_many_ranks_has_one_row_for_those_that_are_alike() -> None:
    ranks = 128
    tasks = computing(ranks, 0.1), sum_of(1000, tuple(range(ranks)))
    whole = replace(program_for(2).program, ranks=ranks)
    trace = simulate(Tasks(whole, StepOptions({}, 1), tasks, (), frozenset()), speeds_on(level(ranks)))
    assert trace.ranks == ("rank 0 and 127 like it",)
    assert not isnan(trace.seconds)
