"""What is measured, how it is kept, and what is made of it where a tile was not measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.cluster import Cluster, Device, Efficiency, Level
from shoal.errors import InputError
from shoal.execution.laying import Captured, capture_modes
from shoal.files import cache_folder
from shoal.finding.auto import choose_plan, cost_model, measured_speeds, newcomers, racers, timings_about
from shoal.operators.registry import rule_for
from shoal.partition import Cut
from shoal.planning.costs import first_part
from shoal.planning.find import find
from shoal.planning.stages import cuts_of, stages_of
from shoal.profiling.kernels import kernel_key
from shoal.profiling.measured import Measured
from shoal.profiling.profile import tiles_to_time
from shoal.timings import InStep, Timings
from shoal.transport import Transport

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def captured() -> Captured:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(64, 8),
    )
    return capture_modes(net, (8, 3, 8, 8), nn.functional.cross_entropy)


@pytest.mark.usefixtures("here")
def test_every_tile_of_one_axis_is_timed_and_kept(captured: Captured) -> None:
    transport = Transport()
    heard: list[str] = []
    timings = measured_speeds(captured, transport, progress=lambda _done, _of, what: heard.append(what))
    graph = captured.graphs[True]
    model = cost_model(captured, Measured(timings), 1)
    wanted = [tile[0] for tile in tiles_to_time(stages_of(graph, 1), model.flowing(), "float32")]
    assert set(wanted) <= timings.kernels.keys()
    assert all(forward > 0 and min(backward) >= 0 for forward, *backward in timings.kernels.values())
    linear = next(times for name, times in timings.kernels.items() if "linear" in name)
    assert min(linear) > 0  # both gradients, each by itself
    (shown,) = timings.in_step.values()
    kinds = {f"{layer.op} {which}" for layer in graph.layers for which in ("forward", "backward")}
    assert kinds <= shown.factors.keys()  # of real steps: every layer was noted, both ways
    assert min(shown.factors.values()) > 0
    assert shown.between is not None
    assert shown.update_per_byte is not None
    assert shown.update_per_byte > 0
    assert "links" in heard
    assert timings.cluster.levels == ()
    again: list[str] = []
    assert measured_speeds(captured, transport, progress=lambda _d, _o, what: again.append(what)) == timings
    assert again == [""]  # nothing was left to measure


@pytest.mark.usefixtures("here")
def test_timings_of_a_network_are_told_from_those_of_others_in_the_cache(captured: Captured) -> None:
    other = capture_modes(nn.Sequential(nn.Linear(5, 4)), (8, 5), nn.functional.cross_entropy)
    alone = timings_about(other, 1, measured_speeds(other, Transport()))
    measured_speeds(captured, Transport())
    both = measured_speeds(other, Transport())
    assert len(both.kernels) > len(alone.kernels) > 0
    assert timings_about(other, 1, both) == alone


@pytest.mark.usefixtures("here")
def test_alone_the_choice_is_the_whole_network(captured: Captured) -> None:
    chosen = choose_plan(captured, Transport())
    assert not chosen.remembered
    assert chosen.race == ()
    assert {str(cut) for _, cut in chosen.plan.layers} == {"1"}
    assert choose_plan(captured, Transport()).remembered
    assert not choose_plan(captured, Transport(), fresh=True).remembered


def timings_of(kernels: dict[str, tuple[float, float, float]], ranks: int = 4) -> Timings:
    device = Device(
        name="a device",
        memory=1 << 30,
        flops=1e9,
        memory_bandwidth=1e9,
        efficiency=Efficiency(peak_fraction=1.0, half=0.0, launch=0.0),
        source="made up",
    )
    level = Level(name="host", size=ranks, bandwidth=1e9, latency=1e-4, source="made up")
    return Timings(Cluster(name="made up", device=device, levels=(level,)), ranks, 1, kernels)


def test_a_cut_along_two_axes_is_composed(captured: Captured) -> None:
    graph = captured.graphs[True]
    op = stages_of(graph, 4)[0].ops[0]
    rule = rule_for(op)

    def key(text: str) -> str:
        cut = Cut.parse(text)
        letters = frozenset(letter for letter, _ in cut.degrees)
        return kernel_key(op, rule, first_part(op, cut), letters, "float32", input_grad=False)

    speeds = Measured(timings_of({key("1"): (8.0, 16.0, 0.0), key("n2"): (4.0, 9.0, 0.0), key("h2"): (5.0, 8.0, 0.0)}))

    def asked(text: str) -> tuple[float, float]:
        cut = Cut.parse(text)
        letters = frozenset(letter for letter, _ in cut.degrees)
        found = speeds.kernel(op, rule, first_part(op, cut), letters, input_grad=False)
        return found.forward, found.backward

    assert asked("n2") == (4.0, 9.0)
    assert asked("n2h2") == pytest.approx((4.0 * 5 / 8, 9.0 / 2))
    assert asked("c2") == pytest.approx((4.0, 8.0))  # not measured: in proportion to its work
    with pytest.raises(InputError, match="no measurement of layer"):
        Measured(timings_of({})).kernel(op, rule, first_part(op, Cut()), frozenset(), input_grad=False)


def test_timings_survive_a_file_and_refuse_others(tmp_path: Path) -> None:
    timings = replace(timings_of({"conv": (0.1, 0.2, 0.3)}), in_step={"net": InStep({"conv forward": 1.5}, 0.1)})
    timings.save(tmp_path / "t.json")
    assert Timings.load(tmp_path / "t.json") == timings
    (tmp_path / "bad.json").write_text('{"schema": "shoal.timings/0"}')
    for name in ("bad.json", "missing.json"):
        with pytest.raises(InputError, match=name):
            Timings.load(tmp_path / name)


@pytest.mark.usefixtures("here")
def test_a_damaged_cache_is_measured_again(captured: Captured) -> None:
    choose_plan(captured, Transport())
    files = list(cache_folder().iterdir())
    assert {path.name.split("-")[0] for path in files} == {"timings", "plan", "race"}
    for path in files:
        path.write_text("{")
    assert not choose_plan(captured, Transport()).remembered


def test_who_races(captured: Captured) -> None:
    kernels: dict[str, tuple[float, float, float]] = {}
    graph = captured.graphs[True]
    for stage in stages_of(graph, 2):
        for op in stage.ops:
            for cut in cuts_of(op, 2):
                letters = frozenset(letter for letter, _ in cut.degrees)
                for grad in (True, False):
                    name = kernel_key(op, rule_for(op), first_part(op, cut), letters, "float32", input_grad=grad)
                    kernels[name] = (1.0 / cut.parts, 0.5 / cut.parts, 0.5 / cut.parts)
    found = find(cost_model(captured, Measured(timings_of(kernels, 2)), 2))
    entrants = racers(found, None)
    assert "auto" in entrants
    assert all(plan.ranks == 2 for plan in entrants.values())
    assert len({plan.layers for plan in entrants.values()}) == len(entrants)
    assert torch.isfinite(torch.tensor([one.seconds for one in found.fixed])).all()
    assert newcomers(found, entrants, None) == {}
    rest = newcomers(found, {name: plan for name, plan in entrants.items() if name != "auto"}, None)
    assert [(name, plan.name, plan.layers) for name, plan in rest.items()] == [
        ("again", "again", entrants["auto"].layers)
    ]


def test_a_tile_that_ran_takes_what_it_took_and_its_kind_the_rest(captured: Captured) -> None:
    graph = captured.graphs[True]
    op = stages_of(graph, 4)[0].ops[0]
    rule, cut = rule_for(op), Cut.parse("n2")
    part, letters = first_part(op, cut), frozenset("n")
    key = kernel_key(op, rule, part, letters, "float32", input_grad=True)
    timings = replace(timings_of({key: (8.0, 4.0, 12.0)}), layer_overhead=2.0)
    factors = {f"{key} forward": 3.0, f"{op.layer.op} forward": 9.0, f"{op.layer.op} backward": 0.5}
    speeds = Measured(timings, in_step=InStep(factors=factors, between=7.0, update_per_byte=5.0))
    time = speeds.kernel(op, rule, part, letters, input_grad=True)
    assert time.forward == pytest.approx(3 * (8 + 1) - 1)  # half of the layer's overhead is in each pass
    assert time.backward == pytest.approx(0.5 * (16 + 1) - 1)
    assert time.to_weights == pytest.approx(3 * time.to_input)
    assert (speeds.step_overhead, speeds.update_per_byte) == (7.0, 5.0)
    assert (Measured(timings).step_overhead, Measured(timings).update_per_byte) == (0.0, 0.0)
