"""A trace is saved, read and refused as what it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError
from shoal.timeline import NETWORK, SCHEMA, Message, Slice, Trace

TRACE = Trace(
    title="a net, plan data",
    origin="measured",
    ranks=("rank 0", "rank 1"),
    slices=(
        Slice("step", 0, "step 7", 0.0, 1.0, "steps", 7),
        Slice("forward", 0, "conv1", 0.125, 0.5, "compute", 7),
        Slice("wait", 0, "conv1", 0.25, 0.375, "compute", 7, peers=(1,)),
        Slice("move", 0, "conv1", 0.125, 0.25, "network", 7, 4096, (1,)),
        Slice("move", 1, "conv1", 0.0, 0.5, "network", 7, 0, (0,)),
        Slice("step", 1, "step 8", 1.0, 2.0, "steps", 8),
    ),
    messages=(Message(0, 1, "conv1", 0.125, 0.5, 4096),),
)

labels = st.text(max_size=8)


@st.composite
def slices(draw: st.DrawFn) -> Slice:
    start, length = draw(st.integers(0, 10**9)), draw(st.integers(0, 10**9))
    return Slice(
        kind=draw(st.sampled_from(["forward", "backward", "wait", "gradients"])),
        rank=draw(st.integers(0, 2)),
        label=draw(labels),
        start=start / 1e9,
        end=(start + length) / 1e9,
        lane=draw(st.sampled_from(["steps", "compute", "network"])),
        step=draw(st.integers(0, 3)),
        bytes=draw(st.integers(0, 100)),
        peers=tuple(draw(st.lists(st.integers(0, 2), max_size=2))),
    )


@st.composite
def messages(draw: st.DrawFn) -> Message:
    sent, lasts = draw(st.integers(0, 10**9)), draw(st.integers(0, 10**9))
    ends = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return Message(*ends, draw(labels), sent / 1e9, (sent + lasts) / 1e9, draw(st.integers(0, 100)))


traces = st.builds(
    Trace,
    title=labels,
    origin=st.sampled_from(["measured", "predicted"]),
    ranks=st.just(("rank 0", "rank 1", "rank 2")),
    slices=st.lists(slices(), max_size=12).map(tuple),
    messages=st.lists(messages(), max_size=5).map(tuple),
)


@given(traces)
def test_what_is_saved_is_read(trace: Trace) -> None:
    read = Trace.from_chrome(json.loads(json.dumps(trace.to_chrome())))
    in_order = sorted(trace.slices, key=lambda piece: (piece.start, -piece.end))
    assert replace(read, slices=()) == replace(trace, slices=())
    assert list(read.slices) == in_order


@given(traces)
def test_slices_of_one_row_do_not_overlap_on_the_network(trace: Trace) -> None:
    """Perfetto draws slices of one thread that cross as if one lay in the other."""
    rows: dict[tuple[int, int], float] = {}
    for event in trace.to_chrome()["traceEvents"]:
        if event["ph"] == "X" and event["tid"] > NETWORK:
            row = event["pid"], event["tid"]
            assert event["ts"] >= rows.get(row, 0.0)
            rows[row] = round(event["ts"] + event["dur"], 3)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    TRACE.save(tmp_path / "trace.json")
    read = Trace.load(tmp_path / "trace.json")
    assert set(read.slices) == set(TRACE.slices)
    assert read.messages == TRACE.messages


def test_an_arrow_goes_from_slice_to_slice() -> None:
    events = TRACE.to_chrome()["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    for end in (event for event in events if event["ph"] in "sf"):
        assert any(
            (box["pid"], box["tid"]) == (end["pid"], end["tid"]) and box["ts"] <= end["ts"] <= box["ts"] + box["dur"]
            for box in boxes
        )


def test_one_step_begins_at_zero() -> None:
    second = TRACE.of_step(8)
    assert [(piece.start, piece.end) for piece in second.slices] == [(0.0, 1.0)]
    assert second.messages == ()
    assert TRACE.of_step(7).messages == TRACE.messages


def test_a_predicted_trace_lies_under_the_measured_one() -> None:
    below = replace(TRACE, origin="predicted", slices=TRACE.slices[:2], messages=())
    events = TRACE.beside(below)["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "rank 0", 1: "rank 1", 2: "rank 0 (predicted)", 3: "rank 1 (predicted)"}
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1, 2}


@pytest.mark.parametrize(
    "wrong",
    [
        Slice("forward", 2, "conv1", 0.0, 1.0),
        Slice("forward", 0, "conv1", 1.0, 0.5),
        Slice("wait", 0, "conv1", 0.0, 1.0, peers=(5,)),
        Message(0, 2, "conv1", 0.0, 1.0),
        Message(0, 1, "conv1", 1.0, 0.5),
    ],
    ids=str,
)
def test_what_no_run_can_have_done_is_refused(wrong: Slice | Message) -> None:
    parts: dict[str, Any] = {"slices": (wrong,)} if isinstance(wrong, Slice) else {"messages": (wrong,)}
    with pytest.raises(ValueError, match="conv1"):
        replace(TRACE, **parts)


def changed(*path: Any, to: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(TRACE.to_chrome()))
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return content


def first_slice() -> int:
    return next(n for n, event in enumerate(TRACE.to_chrome()["traceEvents"]) if event["ph"] == "X")


def last_arrow() -> int:
    return max(n for n, event in enumerate(TRACE.to_chrome()["traceEvents"]) if event["ph"] == "f")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ([], f"schema {SCHEMA!r}"),
        ({}, f"schema {SCHEMA!r}"),
        ({"otherData": 3, "traceEvents": []}, f"schema {SCHEMA!r}"),
        ({"otherData": {"schema": "shoal.trace/9"}, "traceEvents": []}, f"schema {SCHEMA!r}"),
        ({"otherData": {"schema": SCHEMA}, "traceEvents": []}, "'ranks' is missing"),
        (changed("otherData", "origin", to="guessed"), "origin 'guessed'"),
        (changed("otherData", "ranks", to=["rank 0"]), "of no rank"),
        (changed("traceEvents", to=7), "fields of a trace"),
        (changed("traceEvents", first_slice(), "cat", to="sleep"), "no slice is a 'sleep'"),
        (changed("traceEvents", first_slice(), "tid", to=0), "of thread 0"),
        (changed("traceEvents", first_slice(), "dur", to=-5.0), "ends before it begins"),
        (changed("traceEvents", first_slice(), "ts", to="soon"), "fields of a trace"),
        (changed("traceEvents", first_slice(), "pid", to=9), "of no rank"),
        (changed("traceEvents", first_slice(), "args", to={}), "'label' is missing"),
        (changed("traceEvents", last_arrow(), "ts", to=0.0), "arrives before it is sent"),
        (changed("traceEvents", last_arrow(), "id", to=77), "is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_file_is_refused_by_name(content: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"broken\.json") as refused:
        Trace.load(path)
    assert why in refused.value.problem
    assert "--trace" in refused.value.remedy


@pytest.mark.parametrize("text", ["", "{", "\x00"])
def test_a_file_that_is_no_json_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"broken\.json"):
        Trace.load(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json"):
        Trace.load(tmp_path / "nowhere.json")
