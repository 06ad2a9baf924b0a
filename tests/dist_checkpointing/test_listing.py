"""What a ``.metadata`` of a stranger, or a damaged one, may do: nothing but be refused."""

import dataclasses
import io
import itertools
import os
import pathlib
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron.core.dist_checkpointing import (
    CheckpointError,
    SaveFolder,
    iteration_folder,
    make_pieces,
    read_pieces,
    write_checkpoint,
)
from megatron.core.dist_checkpointing.coverage import coverage_problem
from megatron.core.dist_checkpointing.listing import read_metadata_safely
from tests.utils.ranks import run_ranks

NAME = "model.weight"


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        NAME: torch.randn(6, 4, generator=generator),
        "model.other": torch.randn(6, 4, generator=generator),
        "step": torch.tensor(3.0),
    }


def save(rank: int, world: int, root: str) -> None:
    group = dist.new_group(backend="gloo")
    write_checkpoint(SaveFolder(Path(root)), 1, make_pieces(tensors().items(), {}), {}, group=group)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("sound")
    run_ranks(1, save, str(root))
    yield iteration_folder(root, 1)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / sound.name))


def refused(folder: Path, *words: str) -> str:
    """Reading the listing fails with an error that names the file and the ``words``."""
    with pytest.raises(CheckpointError) as caught:
        read_metadata_safely(folder / ".metadata")
    for word in (str(folder), *words):
        assert word in str(caught.value), caught.value
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def edited(folder: Path, edit: Callable[[Metadata], object]) -> Path:
    metadata = read_metadata_safely(folder / ".metadata")
    edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def chunk(metadata: Any, **changes: Any) -> Any:
    chunks = metadata.state_dict_metadata[NAME].chunks
    chunks[0] = dataclasses.replace(chunks[0], **changes)


def place(metadata: Any, **changes: Any) -> Any:
    index = next(index for index in metadata.storage_data if index.fqn == NAME)
    metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **changes)


def fields(metadata: Any, **changes: Any) -> Any:
    vars(metadata).update(changes)


def entry(metadata: Any, **changes: Any) -> Any:
    vars(metadata.state_dict_metadata[NAME]).update(changes)


def no_place(metadata: Any) -> None:
    metadata.storage_data = {i: p for i, p in metadata.storage_data.items() if i.fqn != NAME}


def test_a_sound_listing(sound: Path) -> None:
    metadata = read_metadata_safely(sound / ".metadata")
    assert set(metadata.state_dict_metadata) == set(tensors())
    assert {index.fqn for index in metadata.storage_data} == set(tensors())
    real = pickle.loads((sound / ".metadata").read_bytes())
    assert metadata.state_dict_metadata == real.state_dict_metadata
    assert metadata.storage_data == real.storage_data


EDITS = {
    "half": (lambda m: chunk(m, sizes=torch.Size([3, 4])), NAME),
    "empty": (lambda m: entry(m, chunks=[]), NAME),
    "outside": (lambda m: chunk(m, offsets=torch.Size([10**6, 0])), NAME),
    "twice": (lambda m: m.state_dict_metadata[NAME].chunks.append(
        m.state_dict_metadata[NAME].chunks[0]), "stored twice"),
    "huge": (lambda m: entry(m, size=torch.Size([10**9, 10**9])), NAME),
    "a list for a size": (lambda m: entry(m, size=[6, 4]), NAME),
    "text for chunks": (lambda m: entry(m, chunks="abc"), NAME),
    "no properties": (lambda m: entry(m, properties=None), NAME),
    "another field": (lambda m: entry(m, evil=1), "evil"),
    "not a dtype": (lambda m: vars(m.state_dict_metadata[NAME].properties).update(dtype=7), NAME),
    "no places": (lambda m: fields(m, storage_data=None), "list of places"),
    "no tensors": (lambda m: fields(m, state_dict_metadata=None), "list of tensors"),
    "numbers": (lambda m: fields(m, state_dict_metadata={1: 2}), "int"),
    "numbers by name": (lambda m: fields(m, state_dict_metadata={NAME: 2}), NAME),
    "planner": (lambda m: fields(m, planner_data={"a": 1}), "planner"),
    "version": (lambda m: fields(m, version=1), "version"),
    "about": (lambda m: fields(m, storage_meta=m.state_dict_metadata[NAME]), "storage_meta"),
    "a parent": (lambda m: place(m, relative_path="../x/__0_0.distcp"), "../x/__0_0.distcp"),
    "absolute": (lambda m: place(m, relative_path="/etc/passwd"), "/etc/passwd"),
    "dots": (lambda m: place(m, relative_path=".."), "'..'"),
    "a number for a file": (lambda m: place(m, relative_path=5), "in no file"),
    "a missing file": (lambda m: place(m, relative_path="x.distcp"), "x.distcp is missing"),
    "negative": (lambda m: place(m, length=-5), "outside of the"),
    "far": (lambda m: place(m, offset=10**15), "outside of the"),
    "text": (lambda m: place(m, offset="0"), "outside of the"),
    "fraction": (lambda m: place(m, length=1.5), "instruction"),
    "true": (lambda m: place(m, length=True), NAME),
    "shared": (lambda m: place(m, offset=0, length=2000), "in the same bytes"),
    "too short": (lambda m: place(m, length=95), "than 95 bytes can hold"),
    "transform": (lambda m: place(m, transform_descriptors=["zip"]), "transform"),
    "no place": (no_place, "of no file"),
    "only a place": (lambda m: m.state_dict_metadata.pop(NAME), "place"),
    "bytes": (lambda m: m.state_dict_metadata.update(x=BytesStorageMetadata()), "Bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_listing_is_refused(folder: Path, name: str) -> None:
    edit, word = EDITS[name]
    refused(edited(folder, edit), word)


def nested(depth: int, inner: bytes = b"") -> bytes:
    return b"\x80\x04" + b"]" * depth + inner + b"a" * (depth - 1) + b"."


PICKLES = {
    "nothing": b"",
    "a number": pickle.dumps(5),
    "a list": pickle.dumps([1, 2]),
    "protocol 2": pickle.dumps({"a": 1}, protocol=2),
    "cut": pickle.dumps({"a": [1, 2]})[:-3],
    "deep lists": nested(10**6),
    "deep keys": b"\x80\x04}" + b")" + b"\x85" * 10**6 + b"Ns.",
    "a long text": b"\x80\x04X\xff\xff\xff\x7fabc.",
    "a longer text": b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.",
    "a far memory": b"\x80\x04Nr\xff\xff\xff\xff.",
    "nothing remembered": b"\x80\x04h\x00.",
    "an empty stack": b"\x80\x04\x94.",
    "extension": b"\x80\x04\x82\x01.",
    "persistent": b"\x80\x04Pabc\n.",
    "not text": b"\x80\x04\x8c\x02\xff\xfe.",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("name", PICKLES)
def test_other_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(PICKLES[name])
    refused(folder)


class Call:
    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


@pytest.mark.parametrize("function", [os.system, eval, torch.load, torch.nn.Linear, Path.unlink])
def test_calls_are_refused(folder: Path, function: Any) -> None:
    mark = folder / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Call(function, (f"touch {mark}",))))
    refused(folder, "refused")
    assert not mark.exists()


@pytest.mark.parametrize("build", [b"N}\x8c\x07is_fileNs\x86b", b"}\x8c\x07is_fileNsb"])
def test_classes_are_not_patched(folder: Path, build: bytes) -> None:
    """A state given to a class sets attributes on it, in a real unpickler."""
    whole = (folder / ".metadata").read_bytes()[2:]
    path = b"\x8c\x07pathlib\x8c\x09PosixPath\x93"
    (folder / ".metadata").write_bytes(b"\x80\x04" + path + build + b"0" + whole)
    before = dict(vars(pathlib.PosixPath))
    refused(folder)
    assert dict(vars(pathlib.PosixPath)) == before


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_links_out_of_the_folder_are_refused(folder: Path, name: str) -> None:
    outside = folder.parent / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    refused(folder, f"{folder / name} is a link", str(outside))
    (folder / name).unlink()
    shutil.copy(outside, folder / "inside")
    (folder / name).symlink_to("inside")
    read_metadata_safely(folder / ".metadata")


def test_a_linked_folder_is_followed(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    read_metadata_safely(link / ".metadata")


def replaced(folder: Path, value: Any) -> None:
    """Put another file's content in the place of the weight."""
    stream = io.BytesIO()
    torch.save(value, stream)
    shard = folder / "__0_0.distcp"
    start = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + stream.getvalue())
    edited(folder, lambda m: place(m, offset=start, length=len(stream.getvalue())))


def read(rank: int, world: int, folder: str, values: dict[str, Any]) -> str:
    group = dist.new_group(backend="gloo")
    live = tensors() | values
    with pytest.raises(CheckpointError) as caught:
        read_pieces(Path(folder), make_pieces(live.items(), {}), group=group)
    return str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        Call(os.system, ("touch /tmp/should-not-exist-evil",)),
        torch.zeros(6, 4, dtype=torch.int32),
        torch.zeros(1, 1),
        torch.zeros(1).expand(6, 4),
        {"weight": torch.zeros(6, 4)},
        torch.nn.Parameter(torch.zeros(6, 4)),
    ],
    ids=["call", "int32", "small", "expanded", "dict", "parameter"],
)
def test_other_things_in_place_of_a_tensor(folder: Path, value: Any) -> None:
    replaced(folder, value)
    (text,) = run_ranks(1, read, str(folder), {})
    assert NAME in text and "__0_0.distcp" in text
    assert "weights_only" not in text and "unsafe" not in text
    assert not Path("/tmp/should-not-exist-evil").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_a_stored_dtype_must_be_the_runs(sound: Path, dtype: torch.dtype) -> None:
    (text,) = run_ranks(1, read, str(sound), {NAME: torch.zeros(6, 4, dtype=dtype)})
    assert NAME in text and "float32" in text and str(dtype).removeprefix("torch.") in text


def read_other_shape(rank: int, world: int, folder: str) -> tuple[str, str]:
    group = dist.new_group(backend="gloo")
    live = tensors() | {NAME: torch.zeros(5, 4)}
    with pytest.raises(CheckpointError) as caught:
        read_pieces(Path(folder), make_pieces(live.items(), {}), group=group)
    return type(caught.value).__name__, str(caught.value)


def test_a_mismatch_of_all_ranks_is_one(sound: Path) -> None:
    """Told apart from damage, over ranks too: no older checkpoint would fit either."""
    for kind, text in run_ranks(2, read_other_shape, str(sound)):
        assert kind == "CheckpointMismatch"
        assert text.count("has shape (6, 4)") == 1 and "ranks 0, 1: " in text


def test_coverage_agrees_with_counting() -> None:
    """Random boxes in small tensors: covered exactly once means a problem of None."""
    draw = random.Random(5)
    seen = set()
    for _ in range(3000):
        size = [draw.randint(1, 3) for _ in range(draw.randint(0, 3))]
        if draw.random() < 0.6:  # a grid: covered, unless something is changed below
            cuts = [sorted({0, n, draw.randint(0, n)}) for n in size]
            axes = [list(zip(cut, cut[1:], strict=False)) for cut in cuts]
            boxes = [([a for a, _ in c], [b - a for a, b in c]) for c in itertools.product(*axes)]
            if draw.random() < 0.3:
                boxes.append(draw.choice(boxes))
            elif draw.random() < 0.3:
                boxes.remove(draw.choice(boxes))
        else:
            starts = [[draw.randint(0, n - 1) for n in size] for _ in range(draw.randint(1, 3))]
            boxes = [(s, [draw.randint(1, n - a) for a, n in zip(s, size)]) for s in starts]
        count = torch.zeros(size, dtype=torch.int64)
        for offsets, sizes in boxes:
            count[tuple(slice(a, a + n) for a, n in zip(offsets, sizes))] += 1
        exact = bool((count == 1).all())
        assert (coverage_problem(size, boxes) is None) == exact, (size, boxes)
        seen.add(exact)
    assert seen == {True, False}
    assert coverage_problem([4], [([2], [3])]) == "a piece of shape 3 at 2 lies outside of it"
    assert coverage_problem([4], [([0], [4]), ([4], [0])]) is None
