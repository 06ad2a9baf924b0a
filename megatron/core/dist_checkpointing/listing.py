"""``.metadata``: which tensor lies where. Believed field by field, never unpickled.

The file is a pickle of torch's ``Metadata``. It is read into inert records (``pickled.py``); then
each field is checked and torch's own objects are made from it:

* a tensor has a dtype, a size, and chunks that cover it, each element exactly once;
* each chunk has one place: a bare file name and a range of bytes within that file, that is large
  enough and no other chunk's;
* nothing else: no entry that isn't a tensor, no transform, no place without a chunk.

Cost: 50 to 80 us a chunk, four times what unpickling takes: some seconds for 200 tensors in 256
chunks each. Memory: torch's objects once more while it is read.
"""

import itertools
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.coverage import coverage_problem
from megatron.core.dist_checkpointing.directory import checked_file
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.pickled import Name, PickleError, Record, read_records

_TORCH = "torch.distributed.checkpoint.metadata."
_METADATA = f"{_TORCH}Metadata"
_TENSOR = f"{_TORCH}TensorStorageMetadata"
_PROPERTIES = f"{_TORCH}TensorProperties"
_CHUNK = f"{_TORCH}ChunkStorageMetadata"
_INDEX = f"{_TORCH}MetadataIndex"
_ABOUT = f"{_TORCH}StorageMeta"
_FORMAT = f"{_TORCH}_MEM_FORMAT_ENCODING"
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_LAYOUT = "torch.serialization._get_layout"
_SIZE = "torch.Size"
_PATHS = ("pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib.Path")
_DTYPES = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_KNOWN = {
    *(_METADATA, _TENSOR, _PROPERTIES, _CHUNK, _INDEX, _ABOUT, _FORMAT, _PLACE, _LAYOUT, _SIZE),
    *_PATHS,
    *_DTYPES,
}
_LARGEST = 2**63 - 1


def read_metadata_safely(path: Path) -> Metadata:
    """Read and check a ``.metadata`` file.

    Raises:
        CheckpointError: naming the file, if it is missing or damaged, or holds anything but a
            listing of tensors that its folder's files can hold.
    """
    checked_file(path.parent, path.name)
    try:
        data = path.read_bytes()
        return _metadata(read_records(data, _KNOWN.__contains__), path.parent)
    except (PickleError, CheckpointError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:
        # A stranger's file may break what these lines take for granted, or memory.
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _metadata(record: Any, folder: Path) -> Metadata:
    keys = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
    if type(record) is not Record or record.name != _METADATA:
        raise CheckpointError("it is not a listing of tensors")
    fields = _fields(record, _METADATA, keys[:1] + keys[2:3], "the listing", keys)
    if fields.get("planner_data") is not None:
        raise CheckpointError("it has data of a planner; none is known here")
    if not isinstance(fields.get("version"), str | None):
        raise CheckpointError("its version isn't a text")
    _check_about(fields.get("storage_meta"))
    tensors = _mapping(fields["state_dict_metadata"], "list of tensors")
    places = _places(_mapping(fields["storage_data"], "list of places"), folder)
    listing: dict[str, Any] = {}
    placed = 0
    for name, entry in tensors.items():
        if type(name) is not str:
            raise CheckpointError("a tensor in it has no name")
        listing[name] = tensor = _tensor(name, entry)
        itemsize = tensor.properties.dtype.itemsize
        for chunk in tensor.chunks:
            found = places.get(MetadataIndex(name, chunk.offsets))
            if found is None:
                raise CheckpointError(f"it says of no file that {_piece(name, chunk)} is in it")
            if math.prod(chunk.sizes) * itemsize > found.length:
                raise CheckpointError(
                    f"{_piece(name, chunk)} has more elements than {found.length:,} bytes can hold"
                )
        placed += len(tensor.chunks)
    if placed != len(places):
        index = next(index for index in places if not _has(listing, index))
        raise CheckpointError(f"it has a place for {index.fqn!r}, of which it lists no such piece")
    return Metadata(
        state_dict_metadata=listing,
        storage_data=places,
        storage_meta=StorageMeta(),
        version=fields.get("version"),
    )


def _has(listing: dict[str, Any], index: MetadataIndex) -> bool:
    entry = listing.get(index.fqn)
    return entry is not None and any(chunk.offsets == index.offset for chunk in entry.chunks)


def _piece(name: str, chunk: ChunkStorageMetadata) -> str:
    return f"the piece of {name!r} at {tuple(chunk.offsets)}"


def _fields(
    record: Any,
    name: str,
    needed: Collection[str],
    what: str,
    known: Collection[str] | None = None,
) -> dict[str, Any]:
    """The state of a record of class ``name``, with the fields that it must and may have."""
    if type(record) is not Record or record.name != name:
        raise CheckpointError(f"{what} is no {name.rpartition('.')[2]}")
    fields = record.state
    if record.arguments or type(fields) is not dict:
        raise CheckpointError(f"{what} has no fields")
    for key in needed:
        if key not in fields:
            raise CheckpointError(f"{what} has no {key}")
    if len(fields) > len(needed):
        known = needed if known is None else known
        extra = [key for key in fields if key not in known]
        if extra:
            raise CheckpointError(f"{what} has an unknown field, {str(extra[0])[:100]!r}")
    return fields


def _mapping(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise CheckpointError(f"its {what} is a {type(value).__name__} instead of a mapping")
    return value


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _LARGEST


def _size(value: Any, what: str) -> torch.Size:
    """A ``torch.Size`` of non-negative numbers."""
    if (
        type(value) is not Record
        or value.name != _SIZE
        or value.state is not None
        or len(value.arguments) != 1
        or type(value.arguments[0]) is not tuple
        or len(value.arguments[0]) > 64
        or not all(map(_is_count, value.arguments[0]))
    ):
        raise CheckpointError(f"{what} is no tuple of non-negative numbers")
    return torch.Size(value.arguments[0])


def _tensor(name: str, entry: Any) -> TensorStorageMetadata:
    fields = _fields(entry, _TENSOR, ("properties", "size", "chunks"), repr(name))
    size = _size(fields["size"], f"the size of {name!r}")
    if type(fields["chunks"]) is not list:
        raise CheckpointError(f"{name!r} has no list of pieces")
    chunks = [_chunk(name, chunk) for chunk in fields["chunks"]]
    if problem := coverage_problem(size, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise CheckpointError(f"{name!r} of shape {tuple(size)} is not whole: {problem}")
    return TensorStorageMetadata(_properties(name, fields["properties"]), size, chunks)


def _chunk(name: str, record: Any) -> ChunkStorageMetadata:
    what = f"a piece of {name!r}"
    fields = _fields(record, _CHUNK, ("offsets", "sizes"), what)
    return ChunkStorageMetadata(_size(fields["offsets"], what), _size(fields["sizes"], what))


def _properties(name: str, record: Any) -> TensorProperties:
    """Dtype and, of what is deprecated, the values that a plain tensor has."""
    state = record.state if type(record) is Record and record.name == _PROPERTIES else None
    if type(state) is not tuple or len(state) != 5:
        raise CheckpointError(f"{name!r} has no properties")
    dtype, layout, requires_grad, memory_format, pinned = state
    if type(dtype) is not Name or dtype.text not in _DTYPES:
        raise CheckpointError(f"the dtype of {name!r} is none of torch's")
    if (
        not _is_call(layout, _LAYOUT, "torch.strided")
        or not any(_is_call(memory_format, _FORMAT, number) for number in range(3))
        or type(requires_grad) is not bool
        or type(pinned) is not bool
    ):
        raise CheckpointError(f"the properties of {name!r} are not those of a plain tensor")
    return TensorProperties(dtype=_DTYPES[dtype.text])


def _is_call(record: Any, name: str, argument: Any) -> bool:
    return (
        type(record) is Record
        and record.name == name
        and record.state is None
        and len(record.arguments) == 1
        and type(record.arguments[0]) is type(argument)
        and record.arguments[0] == argument
    )


def _places(records: dict[Any, Any], folder: Path) -> dict[MetadataIndex, _StorageInfo]:
    """Where each chunk lies: in a plain file of the folder, within its bytes."""
    places: dict[MetadataIndex, _StorageInfo] = {}
    bytes_of: dict[str, int] = {}
    for key, record in records.items():
        fields = _fields(key, _INDEX, ("fqn",), "a place", ("fqn", "offset", "index"))
        name, hint = fields["fqn"], fields.get("index")
        if type(name) is not str:
            raise CheckpointError("a place belongs to no tensor")
        what = f"the place of {name!r}"
        if hint is not None and not _is_count(hint):
            raise CheckpointError(f"{what} has an index that is no number")
        offset = _size(fields.get("offset"), f"the offset in {what}")
        keys = ("relative_path", "offset", "length")
        place = _fields(record, _PLACE, keys, what, (*keys, "transform_descriptors"))
        if place.get("transform_descriptors") is not None:
            raise CheckpointError(f"{name!r} needs a transform; none is known here")
        file, start, length = (place[key] for key in keys)
        if type(file) is not str:
            raise CheckpointError(f"{what} is in no file")
        if file not in bytes_of:
            bytes_of[file] = checked_file(folder, file).stat().st_size
        if not (_is_count(start) and _is_count(length) and start + length <= bytes_of[file]):
            raise CheckpointError(f"{what} lies outside of the {bytes_of[file]:,} bytes of {file}")
        index = MetadataIndex(name, offset, hint)
        if index in places:
            raise CheckpointError(f"{what} is given twice")
        places[index] = _StorageInfo(file, start, length)
    _refuse_shared_bytes(places)
    return places


def _refuse_shared_bytes(places: dict[MetadataIndex, _StorageInfo]) -> None:
    order = sorted(places.items(), key=lambda item: (item[1].relative_path, item[1].offset))
    for (first, before), (second, after) in itertools.pairwise(order):
        same_file = before.relative_path == after.relative_path
        if same_file and before.offset + before.length > after.offset:
            raise CheckpointError(
                f"{first.fqn!r} and {second.fqn!r} lie in the same bytes of {after.relative_path}"
            )


def _check_about(record: Any) -> None:
    """Who saved it, and where: of the right kinds, and not used."""
    if record is None:
        return
    keys = ("checkpoint_id", "save_id", "load_id", "modules")
    fields = _fields(record, _ABOUT, (), "its storage_meta", keys)
    where = fields.get("checkpoint_id")
    texts: tuple[Any, ...] = (fields.get("save_id"), fields.get("load_id"))
    if type(where) is Record and where.name in _PATHS and where.state is None:
        texts += where.arguments
    else:
        texts += (where,)
    modules = fields.get("modules", [])
    if type(modules) is not list or not all(isinstance(t, str | None) for t in (*texts, *modules)):
        raise CheckpointError("its storage_meta holds something other than texts")
