"""Checkpoints on the disk: parts that come together in any box, folders that are whole or absent, what is refused."""

import errno
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from shoal.config import TrainConfig
from shoal.errors import CheckpointError, MessageError, PeerError
from shoal.files import remove_drafts
from shoal.partition import cut
from shoal.replicas.bundle import packed, unpacked
from shoal.training.checkpoints.carry_over import check_settings, renumbered, settings_saved
from shoal.training.checkpoints.disk_file import DiskFile
from shoal.training.checkpoints.folder import Checkpoint, CheckpointFolder, Draft
from shoal.training.checkpoints.staging import Staging, fresh_memory, room_for
from shoal.training.checkpoints.tensor_files import (
    Crc32,
    Part,
    Place,
    SavedTensors,
    blocks_of,
    bytes_of,
    seal_of,
    view_of,
    write_blocks,
)
from shoal.training.numbering import Done, Numbering
from shoal.units import Period

WHOLE = torch.arange(42, dtype=torch.float64).view(7, 6)


def in_parts(rows: int, columns: int) -> list[Part]:
    boxes = product(cut(7, rows), cut(6, columns))
    return [Part(WHOLE[a.start : a.stop, b.start : b.stop].clone(), Place((a, b), (7, 6))) for a, b in boxes]


def test_every_box_comes_together_from_every_cut(tmp_path: Path) -> None:
    for rows, columns in ((1, 1), (3, 1), (1, 4), (2, 3), (7, 6)):
        paths = []
        for number, part in enumerate(in_parts(rows, columns)):
            path = tmp_path / f"{rows}-{columns}-{number}.safetensors"
            seal = write_blocks(path, blocks_of({"w": part}))
            assert seal == seal_of(path, seal.kind)
            paths.append(path)
        saved = SavedTensors(paths)
        assert saved.shape("w") == (7, 6)
        assert torch.equal(saved.read("w"), WHOLE)
        for box in product(cut(7, 2), cut(6, 5)):
            assert torch.equal(saved.read("w", box), WHOLE[box[0].start : box[0].stop, box[1].start : box[1].stop])
        if len(paths) > 1:
            with pytest.raises(CheckpointError, match="not all parts of 'w'"):
                SavedTensors(paths[1:]).read("w")


def of_every_type() -> dict[str, Tensor]:
    return {
        "count": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3).bfloat16(),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "pages": torch.randn(3, 5000),
    }


def test_files_are_safetensors_of_every_type(tmp_path: Path) -> None:
    tensors = of_every_type()
    path = tmp_path / "t.safetensors"
    path.write_bytes(bytes_of({name: Part.of(tensor) for name, tensor in tensors.items()}))
    by_package, by_us = load_file(path), SavedTensors([path])
    for name, tensor in tensors.items():
        assert torch.equal(by_package[name], tensor)
        assert torch.equal(by_us.read(name), tensor)
    with pytest.raises(CheckpointError, match=r"'z' is of type torch\.complex64"):
        bytes_of({"z": Part.of(torch.zeros(2, dtype=torch.complex64))})


def test_copies_go_into_the_same_memory_and_to_the_disk_as_they_are(tmp_path: Path) -> None:
    """Also where the second needs more memory, or less."""
    staging, path = Staging(), tmp_path / "t.safetensors"
    addresses = []
    for round_ in range(4):
        kinds = {
            kind: {name: Part.of(tensor + 0) for name, tensor in of_every_type().items()}
            for kind in ("model", "optimizer", "average")[: (1, 3, 3, 2)[round_]]
        }
        if round_ == 1:
            staging.make_room(room_for(kinds))
        copies = staging.take(kinds)
        addresses.append(copies["model"]["count"].tensor.data_ptr())
        for kind, parts in kinds.items():
            live = {name: part.tensor.clone() for name, part in parts.items()}
            for part in parts.values():
                part.tensor.zero_()  # training goes on
            seal = write_blocks(path, blocks_of(copies[kind]))
            assert (seal, path.stat().st_size) == (seal_of(path, seal.kind), seal.bytes)
            for name, tensor in load_file(path).items():
                assert torch.equal(tensor, live.pop(name))
            assert not live
    assert addresses[1] == addresses[2] == addresses[3]


@pytest.mark.parametrize("where", ["a disk", "a file system without a direct way"])
@pytest.mark.parametrize("lengths", [(8192, 4096), (4096, 100, 4096), (5000, 4096), (3,), (), (12288 + 7,)])
def test_files_hold_what_was_written_directly_or_not(
    where: str, lengths: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[bool] = []
    turn = DiskFile._turn

    def turned(self: DiskFile, *, direct: bool) -> None:
        if direct and where != "a disk":
            raise OSError(errno.EINVAL, "no such way")
        turn(self, direct=direct)
        ways.append(direct)

    monkeypatch.setattr(DiskFile, "_turn", turned)
    memory = fresh_memory(sum(lengths) + 4096).random_(0, 256)
    view, begin = view_of(memory), 0
    with DiskFile(tmp_path / "file") as file:
        for length in lengths:
            file.write(view[begin : begin + length])
            begin += length
    assert file.size == begin
    assert (tmp_path / "file").read_bytes() == bytes(view[:begin])
    if where != "a disk":
        assert not any(ways)


@given(st.binary(max_size=3 * 4096 + 50), st.data())
def test_a_checksum_depends_on_the_bytes_alone_and_finds_what_changed(content: bytes, data: st.DataObject) -> None:
    """However they come. It is that of zip files, so that other tools can check a file too."""
    in_pieces, left = Crc32(), content
    while left:
        length = data.draw(st.integers(1, len(left)))
        in_pieces.update(left[:length])
        left = left[length:]
    assert int(in_pieces.hexdigest(), 16) == zlib.crc32(content)
    if content:
        changed, place = bytearray(content), data.draw(st.integers(0, len(content) - 1))
        changed[place] ^= data.draw(st.integers(1, 255))
        whole = Crc32()
        whole.update(bytes(changed))
        assert whole.hexdigest() != in_pieces.hexdigest()


@pytest.mark.parametrize(
    "place",
    [
        {"shape": [7, 6], "box": [[0, 3]]},
        {"shape": [7, 6], "box": [[0, 8], [0, 6]]},
        {"shape": [7, 6], "box": [[-1, 2], [0, 6]]},
        {"shape": [7, 6], "box": [[0, 2], [0, 6]]},
        {"shape": 7, "box": []},
        [],
    ],
)
def test_places_that_cannot_be_are_refused(place: object, tmp_path: Path) -> None:
    header = {
        "__metadata__": {"shoal.places": json.dumps({"w": place})},
        "w": {"dtype": "F64", "shape": [3, 6], "data_offsets": [0, 144]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(144))
    with pytest.raises(CheckpointError, match=r"w\.safetensors' is not a file of tensors"):
        SavedTensors([path])


def make(folder: CheckpointFolder, steps: int) -> Checkpoint:
    draft = Draft(folder, "save", 7)
    draft.write_parts("model.safetensors", {"w": Part.of(WHOLE)})
    draft.write_json("state.json", {"steps": steps})
    return draft.commit(steps)


def flip(checkpoint: Checkpoint) -> str:
    path = checkpoint.path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return "model.safetensors has another checksum than manifest.json says"


def shorten(checkpoint: Checkpoint) -> str:
    path = checkpoint.path / "state.json"
    size = path.stat().st_size
    path.write_bytes(b"{")
    return f"state.json is not of {size} bytes"


def remove(checkpoint: Checkpoint) -> str:
    (checkpoint.path / "model.safetensors").unlink()
    return "model.safetensors is missing"


def without_manifest(checkpoint: Checkpoint) -> str:
    (checkpoint.path / "manifest.json").unlink()
    return "manifest.json is missing"


def of_another_version(checkpoint: Checkpoint) -> str:
    (checkpoint.path / "manifest.json").write_text(json.dumps({"schema": "shoal.checkpoint/9", "files": {}}))
    return "it was written by another version: its schema is 'shoal.checkpoint/9', not 'shoal.checkpoint/6'"


def of_files_elsewhere(checkpoint: Checkpoint) -> str:
    manifest = {"schema": "shoal.checkpoint/5", "files": {"../x": {"bytes": 1, "sha256": ""}}}
    (checkpoint.path / "manifest.json").write_text(json.dumps(manifest))
    return "manifest.json names files elsewhere"


def with_an_unlisted_state(checkpoint: Checkpoint) -> str:
    path = checkpoint.path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["state.json"]
    path.write_text(json.dumps(manifest))
    return "manifest.json does not list state.json"


def with_a_pipe(checkpoint: Checkpoint) -> str:
    (checkpoint.path / "manifest.json").unlink()
    os.mkfifo(checkpoint.path / "manifest.json")
    return "manifest.json is missing"


def nested_without_end(checkpoint: Checkpoint) -> str:
    (checkpoint.path / "manifest.json").write_text("[" * 200_000)
    return (
        "manifest.json cannot be read: maximum recursion depth exceeded while decoding a JSON array from a unicode "
        "string"
    )


DAMAGES = [
    *(flip, shorten, remove, without_manifest, of_another_version, of_files_elsewhere, with_an_unlisted_state),
    *(with_a_pipe, nested_without_end),
]


def test_checkpoints_of_the_version_before_are_read_and_checked(tmp_path: Path) -> None:
    """Their manifests had the SHA-256 of every file."""
    checkpoint = make(CheckpointFolder(tmp_path / "checkpoints"), 5)
    files = {
        name: {
            "bytes": (checkpoint.path / name).stat().st_size,
            "sha256": hashlib.sha256((checkpoint.path / name).read_bytes()).hexdigest(),
        }
        for name in checkpoint.files()
    }
    manifest = {"schema": "shoal.checkpoint/5", "steps": 5, "files": files}
    (checkpoint.path / "manifest.json").write_text(json.dumps(manifest))
    assert checkpoint.damage() is None
    assert torch.equal(checkpoint.tensors("model").read("w"), WHOLE)
    assert flip(checkpoint) == checkpoint.damage()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_one_before_used(damage: Callable[[Checkpoint], str], tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    older, newer = make(folder, 5), make(folder, 9)
    assert folder.newest_whole() == (newer, [])
    why = damage(newer)
    assert newer.damage() == why
    assert folder.newest_whole() == (older, [f"checkpoint {str(newer.path)!r} is damaged: {why}."])


def test_the_newest_are_kept_and_equal_steps_sort_by_age(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert (folder.all(), folder.newest_whole()) == ([], (None, []))
    for steps in (9, 10, 10, 100_000_000):
        make(folder, steps)
    names = ["step-00000009", "step-00000010", "step-00000010-2", "step-100000000"]
    assert [checkpoint.path.name for checkpoint in folder.all()] == names
    assert [path.name for path in folder.set_aside_after(folder.all()[2])] == ["left-step-100000000"]
    folder.keep(1)
    assert [checkpoint.path.name for checkpoint in folder.all()] == ["step-00000010-2"]
    assert sorted(path.name for path in folder.path.iterdir()) == ["left-step-100000000", "step-00000010-2"]


def test_steps_that_are_counted_anew_are_newer(tmp_path: Path) -> None:
    """A run that goes on with batches twice as large has done half the steps."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    for steps in (500, 250, 280, 280, 140, 501):
        made = make(folder, steps)
        folder.keep(2)
        assert folder.newest_whole() == (made, [])
        assert made.steps == steps
    assert [checkpoint.path.name for checkpoint in folder.all()] == ["step-00000140.3", "step-00000501.3"]


@given(st.lists(st.integers(0, 4), max_size=12))
def test_whatever_steps_come_after_each_other_the_last_is_the_newest(steps: list[int]) -> None:
    with TemporaryDirectory() as name:
        folder = CheckpointFolder(Path(name))
        made = []
        for count in steps:
            path = folder.free_path(count)
            path.mkdir()
            made.append(Checkpoint(path))
        assert folder.all() == made
        assert [checkpoint.steps for checkpoint in made] == steps


def test_drafts_of_killed_runs_are_removed_and_never_found(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    draft = Draft(folder, "save-1", 5)
    draft.write_parts("model.safetensors", {"w": Part.of(WHOLE)})
    assert folder.all() == []
    remove_drafts(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ranks_hand_their_files_over(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    first, second = in_parts(2, 1)
    drafts = [Draft(folder, "save-1", 5) for _ in range(2)]
    drafts[1].write_parts("model-rank1.safetensors", {"w": second})
    drafts[0].write_parts("model.safetensors", {"w": first})
    drafts[0].write_json("state.json", {})
    with pytest.raises(PeerError, match=r"ranks 1 did not write their part of a checkpoint within 0\.05 seconds"):
        drafts[0].take_over([1], timeout=0.05)
    drafts[1].hand_over(1)
    drafts[0].take_over([1], timeout=5)
    checkpoint = drafts[0].commit(3)
    assert checkpoint.damage() is None
    assert torch.equal(checkpoint.tensors("model").read("w"), WHOLE)
    assert sorted(checkpoint.files()) == ["model-rank1.safetensors", "model.safetensors", "state.json"]


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (3, 2), (2, 3), (4, 4), (6, 4)])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("samples", [3, 12, 13, 17])
def test_what_is_done_is_counted_anew_without_losing_a_sample(
    sizes: tuple[int, int], in_order: bool, samples: int
) -> None:
    """Beside sets of samples: a batch counts as done only if all its samples are, and what is not is done again.

    Also where the last batch of an epoch is smaller, or all there is.
    """
    before, now = (Numbering(size, samples) for size in sizes)

    def trained(numbering: Numbering, done: Done) -> set[int]:
        numbers = set(range(done.handed)) - set(done.again)
        assert all(0 < numbering.of_batch(number) <= numbering.size for number in numbers)
        return {
            sample for number in numbers for sample in range(numbering.before(number), numbering.before(number + 1))
        }

    for handed in range(13):
        for again in ((), (0,), (1, 3), (2, 5)):
            done = Done(handed, tuple(number for number in again if number < handed))
            renewed, repeated = renumbered(done, before, now, in_order=in_order)
            there, here = trained(before, done), trained(now, renewed)
            assert here <= there, "nothing counts that was not done"
            assert repeated == len(there) - len(here)
            assert (before.of_done(done), now.of_done(renewed)) == (len(there), len(here))
            assert not (in_order and renewed.again)
            if not in_order and not done.again:
                assert repeated < now.size


def test_a_position_is_one_of_samples() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"replicas": 4, "exchange": "allreduce"},
        {"replicas": 4, "exchange": "downpour"},
    ]
    for last, per_epoch in (("drop", [2, 2, 8]), ("keep", [3, 3, 10])):
        configs = [TrainConfig.parse({"batch": 64, "accumulate": 2, "last_batch": last, **kind}) for kind in kinds]
        ways = [Numbering.of(config, 290) for config in configs]
        assert [way.size for way in ways] == [128, 128, 32]
        assert [way.per_epoch for way in ways] == per_epoch
        assert {way.samples for way in ways} == {290 if last == "keep" else 256}


def test_settings_that_the_state_depends_on_are_refused() -> None:
    before = settings_saved(TrainConfig(batch=64))
    check_settings(before, TrainConfig(batch=64, epochs=9, plan="model", workers=4, exchange="gossip", replicas=2))
    with pytest.raises(CheckpointError, match=r"the run was made with lr = 0\.05, now it is 0\.1"):
        check_settings(before, TrainConfig(batch=64, lr=0.1))


def test_files_travel_in_one_message() -> None:
    files = {"model.safetensors": b"abc", "empty.json": b"", "rank-0.json": b"{}"}
    message = packed(files)
    assert {name: bytes(content) for name, content in unpacked(memoryview(message)).items()} == files
    for wrong in (b"", message[:-1], message + b"x", packed({"../x": b"1"}), packed({".x": b"1"}), b"\xff" * 9):
        with pytest.raises(MessageError):
            unpacked(memoryview(wrong))


@pytest.mark.parametrize("text", ["0", "0steps", "-1", "1.5epochs", "steps", "3 parsecs", "", 1.5, True, None])
def test_periods_that_are_none(text: object) -> None:
    with pytest.raises(ValueError, match="such as 500steps, 1epoch or 10min"):
        Period.parse(text)
