"""Clusters as values: what their levels mean, how they save, what they refuse."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster import Cluster, Device, Efficiency, Level, Tile, presets
from shoal.errors import InputError
from shoal.units import parse_quantity, show_quantity

KINDS = ["bytes", "bytes/s", "seconds", "FLOP", "FLOP/s"]
DEVICE = Device(
    name="toy",
    memory=2**30,
    flops=1e12,
    memory_bandwidth=1e11,
    efficiency=Efficiency(peak_fraction=0.5, half=1e6, launch=1e-5),
    source="made up",
)


def level(size: int, *, shared: bool = False) -> Level:
    return Level(name=f"of {size}", size=size, bandwidth=1e9, latency=1e-5, shared=shared, source="made up")


def toy(*sizes: int) -> Cluster:
    return Cluster(name="toy", device=DEVICE, levels=tuple(map(level, sizes)))


def test_the_presets_are_those_of_the_issue() -> None:
    hosts_of_papers = {"p100-4x4": 16, "titan-4": 4, "k20-8": 8, "k80-minotauro-16x4": 64}
    others = {"ethernet-1g": 16, "ethernet-10g": 16, "h100-8x32": 256, "internet": 64}
    assert {name: Cluster.load(name).ranks for name in presets()} == hosts_of_papers | others


@pytest.mark.parametrize("name", presets())
def test_a_preset_reads_back_from_its_file(name: str, tmp_path: Path) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    for some in {cluster, *(cluster.first(ranks) for ranks in (1, 2, 3, 4))}:
        some.save(tmp_path / "cluster.yaml")
        assert Cluster.load(tmp_path / "cluster.yaml") == some


@pytest.mark.parametrize("name", presets())
def test_inner_links_of_a_preset_are_not_slower_per_rank(name: str) -> None:
    levels = Cluster.load(name).levels
    sharers = [1, *(inner.size for inner in levels)]
    rates = [one.bandwidth / (count if one.shared else 1) for one, count in zip(levels, sharers, strict=False)]
    assert rates == sorted(rates, reverse=True)


def test_the_numbers_of_a_preset_are_in_base_units() -> None:
    cluster = Cluster.load("p100-4x4")
    assert cluster.device.memory == 16 * 2**30
    assert cluster.device.flops == 10.6e12
    assert cluster.device.efficiency.launch == 5e-6
    assert [one.bandwidth for one in cluster.levels] == [20e9, 12.5e9]
    assert [one.shared for one in cluster.levels] == [False, True]


@given(st.floats(0, 1e300, allow_subnormal=False), st.sampled_from(KINDS))
def test_a_quantity_reads_back_from_its_text(value: float, kind: str) -> None:
    assert parse_quantity(show_quantity(value, kind), kind) == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        *(
            ("56Gb/s", "bytes/s"),
            ("5 parsec", "seconds"),
            ("16GiB/s", "bytes"),
            ("16gib", "bytes"),
            ("1FLOP/s", "FLOP"),
        ),
        *((text, "bytes") for text in ("", "GiB", "1gib", "-1GiB", "1,5GiB", "inf", "nan", "1e9999B", "1 2B", "0x10B")),
        *((value, "bytes") for value in (True, None, [16], {"B": 1})),
    ],
)
def test_what_is_not_a_quantity_is_refused_by_its_value(value: object, kind: str) -> None:
    with pytest.raises(ValueError, match="is not a number of") as refusal:
        parse_quantity(value, kind)
    assert repr(value) in str(refusal.value)


def test_the_level_of_two_ranks_is_the_innermost_that_holds_both() -> None:
    cluster = toy(2, 4, 12)
    assert [cluster.level_of(0, rank) for rank in range(12)] == [None, 0, 1, 1, *[2] * 8]
    assert cluster.level_of(7, 6) == 0
    assert cluster.level_of(3, 4) == 2
    for a, b in [(0, 12), (-1, 0)]:
        with pytest.raises(ValueError, match="is not one of the 12"):
            cluster.level_of(a, b)


@given(st.integers(1, 24), st.data())
def test_the_first_ranks_have_the_levels_that_they_had(ranks: int, data: st.DataObject) -> None:
    cluster = toy(2, 6, 24)
    first = cluster.first(ranks)
    a, b = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, ranks - 1))
    assert first.ranks == ranks
    assert first.level_of(a, b) == cluster.level_of(a, b)
    assert first.device == cluster.device


def test_levels_that_are_not_reached_are_left_out() -> None:
    cluster = toy(2, 6, 24)
    sizes = {ranks: [one.size for one in cluster.first(ranks).levels] for ranks in (1, 2, 3, 6, 7, 24)}
    assert sizes == {1: [], 2: [2], 3: [2, 3], 6: [2, 6], 7: [2, 6, 7], 24: [2, 6, 24]}
    assert cluster.first(24) is cluster
    assert cluster.first(1).ranks == 1


@pytest.mark.parametrize("ranks", [0, -1, 25])
def test_more_ranks_than_there_are_is_refused_with_the_way_out(ranks: int) -> None:
    with pytest.raises(InputError, match=rf"has 24 ranks; {ranks} were asked for(.|\n)*1 to 24(.|\n)*docs/clusters.md"):
        toy(2, 24).first(ranks)


def test_a_kernel_reaches_half_of_its_best_at_half() -> None:
    efficiency = Efficiency(peak_fraction=0.8, half=1e6, launch=0)
    assert efficiency.fraction(1e6) == pytest.approx(0.4)
    assert efficiency.fraction(1e12) == pytest.approx(0.8, rel=1e-5)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_a_tile_is_filled_at_most_and_best_by_whole_tiles(rows: int, columns: int) -> None:
    tile = Tile(rows=128, columns=32)
    assert 0 < tile.filled(rows, columns) <= 1
    assert tile.filled(rows, columns) == pytest.approx(tile.filled(columns, rows))
    assert tile.filled(128 * rows, 32 * columns) == 1
    assert tile.filled(128 * rows, 16) == pytest.approx(0.5)


def test_narrow_products_are_less_efficient_where_tiles_are_known() -> None:
    plain = Efficiency(peak_fraction=0.8, half=0, launch=0)
    tiled = plain.model_copy(update={"tile": Tile(rows=128, columns=32)})
    assert plain.fraction(1e6, (128, 8)) == plain.fraction(1e6) == tiled.fraction(1e6) == pytest.approx(0.8)
    assert tiled.fraction(1e6, (128, 8)) == pytest.approx(0.2)
    tiny = Efficiency(peak_fraction=1.0, half=1e9, launch=0, tile=tiled.tile)
    assert 1 / tiny.fraction(1.0, (1, 1)) == pytest.approx(1e9, rel=1e-4)  # what a small kernel costs is not padded


def content() -> dict[str, Any]:
    rate = {"bandwidth": "10GB/s", "latency": "5us", "source": "made up"}
    return {
        "schema": "shoal.cluster/1",
        "name": "mine",
        "device": {
            "name": "toy",
            "memory": "1GiB",
            "flops": "1TFLOP/s",
            "memory_bandwidth": "100GB/s",
            "source": "made up",
            "efficiency": {"peak_fraction": 0.5, "half": "1MFLOP", "launch": 0},
        },
        "levels": [{"name": "host", "size": 4, **rate}, {"name": "switch", "size": 8, "shared": True, **rate}],
    }


REFUSED = [
    (("schema",), "shoal.cluster/9", "schema = 'shoal.cluster/9'"),
    (("schema",), None, "schema = None"),
    (("name",), "", "name = ''"),
    (("device",), "P100", "device = 'P100'"),
    (("device", "memory"), "16 parsec", "device.memory: '16 parsec' is not a number of bytes"),
    (("device", "memory"), 0, r"device.memory = 0"),
    (("device", "memory"), 0.5, "device.memory = 0.5"),
    (("device", "flops"), -1, "device.flops = -1"),
    (("device", "flops"), float("inf"), "device.flops = inf"),
    (("device", "memory_bandwidth"), True, "device.memory_bandwidth: True"),
    (("device", "source"), "", "device.source = ''"),
    (("device", "efficiency", "peak_fraction"), 1.5, "device.efficiency.peak_fraction = 1.5"),
    (("device", "efficiency", "halve"), 1, "device.efficiency.halve is not a field(.|\n)*Did you mean 'half'"),
    (("device", "colour"), 1, "device.colour is not a field(.|\n)*Known: name, memory"),
    (("levels",), 4, "levels = 4"),
    (("levels", 1, "bandwidth"), "56Gb/s", r"levels\[1\].bandwidth: '56Gb/s'"),
    (("levels", 0, "latency"), "-5us", r"levels\[0\].latency: '-5us'"),
    (("levels", 0, "size"), 1, r"levels\[0\].size = 1"),
    (("levels", 0, "size"), True, r"levels\[0\].size = True"),
    (("levels", 0, "shared"), "perhaps", r"levels\[0\].shared = 'perhaps'"),
    (("levels", 0, "bandwith"), 1, r"levels\[0\].bandwith is not a field(.|\n)*Did you mean 'bandwidth'"),
    (("levels", 1, "size"), 4, r"levels\[1\].size = 4 is not a multiple"),
    (("ranks",), 8, "ranks is not a field(.|\n)*Known: name, device, levels"),
]


@pytest.mark.parametrize(("place", "value", "named"), REFUSED, ids=[f"{place}-{value}" for place, value, _ in REFUSED])
def test_a_bad_file_is_refused_by_its_name_field_and_value(
    tmp_path: Path, place: tuple[str | int, ...], value: object, named: str
) -> None:
    wrong = content()
    inner: Any = wrong
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(wrong))
    with pytest.raises(InputError, match=f"mine.yaml': {named}"):
        Cluster.load(path)


@pytest.mark.parametrize(
    "place", [("device",), ("device", "memory"), ("device", "source"), ("levels", 0, "source"), ("levels", 1, "size")]
)
def test_a_missing_field_is_refused_by_its_name(place: tuple[str | int, ...]) -> None:
    wrong = content()
    inner: Any = wrong
    for step in place[:-1]:
        inner = inner[step]
    del inner[place[-1]]
    name = "levels" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place[1:])
    name = name if place[0] == "levels" else ".".join(map(str, place))
    with pytest.raises(InputError) as refusal:
        Cluster.parse(wrong)
    assert refusal.value.problem == f"{name} is missing."


def test_levels_inside_hold_whole_groups_and_the_outermost_may_end_in_a_part() -> None:
    three = content()
    three["levels"] = [{**three["levels"][0], "size": size} for size in (4, 6, 12)]
    with pytest.raises(InputError, match=r"levels\[1\].size = 6 is not a multiple"):
        Cluster.parse(three)
    two = deepcopy(three)
    del two["levels"][2]
    assert Cluster.parse(two).ranks == 6


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- 1\n", "not list"),
        ("", "not NoneType"),
        ("a: [", "line 1, column 5 is not YAML"),
        ("a: 1\nb: {c: 1, d: 2,\n  c: 2}\n", "line 3, column 3 is not YAML: 'c' stands twice"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=named):
        Cluster.load(path)


def test_the_table_in_the_documentation_has_the_numbers_of_the_files() -> None:
    text = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    for name in presets():
        cluster = Cluster.load(name)
        device, best = cluster.device, cluster.device.efficiency
        speeds = (show_quantity(device.flops, "FLOP/s"), show_quantity(device.memory_bandwidth, "bytes/s"))
        curve = (f"{best.peak_fraction}", show_quantity(best.half, "FLOP"), show_quantity(best.launch, "seconds"))
        row = (f"`{name}`", device.name, show_quantity(device.memory, "bytes"), *speeds, *curve, device.source)
        assert f"| {' | '.join(row)} |" in text
        for one in cluster.levels:
            rate = (show_quantity(one.bandwidth, "bytes/s"), show_quantity(one.latency, "seconds"))
            cells = (f"`{name}`", one.name, str(one.size), *rate, "shared" if one.shared else "own", one.source)
            assert f"| {' | '.join(cells)} |" in text


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no cluster 'p100-4'(.|\n)*Did you mean 'p100-4x4'"):
        Cluster.load("p100-4")


@pytest.mark.parametrize("path", ["none.yaml", "folder/none", "./p100-4x4"])
def test_a_path_that_is_not_there_is_refused_with_the_names(path: str) -> None:
    with pytest.raises(InputError, match=r"no cluster file (.|\n)*p100-4x4"):
        Cluster.load(path)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Cluster.load(tmp_path)


def test_a_file_without_suffix_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toy(2, 4).save("mine")
    assert Cluster.load("mine") == toy(2, 4)
