"""All ranks read the same corpora, and a resumed stage the ones it began with, or none trains.

A rank whose node has an older copy of a data file would train on other rows without a word.
Compared is what the files hold (``Corpus.identity``), not where they lie. Cost: one all-reduce
of 16 bytes whenever a part is opened; names are gathered only if something differs.
"""

from collections.abc import Collection
from typing import Any

import torch.distributed as dist

from megatron.core.datasets import DocumentSource
from megatron.core.parallel_state import assert_same_over_ranks

FREE_WITH = ("data_path", "long_document_upsampling", "split", "mock_data", "tokenizer_model")
"""Names in ``--allow-changed`` that let the documents of a begun stage be others."""


def check_same_documents(
    source: DocumentSource, state: dict[str, Any], allowed: Collection[str]
) -> None:
    """Refuse a stage that was begun on other documents: files replaced under the same name.

    Args:
        source: what the stage would read now.
        state: saved position in the data.
        allowed: names in ``--allow-changed``.

    Raises:
        ValueError: if a blend of other documents, or of other shares of them, was being read.
    """
    now = [[component.name, float(component.weight)] for component in source.components]
    before = state["stream"]["blend"]
    if not before or before == now or not set(FREE_WITH).isdisjoint(allowed):
        return
    lost = {name for name, _ in before} - {name for name, _ in now}
    labels = [component.label or component.name for component in source.components]
    raise ValueError(
        f"--data-path: the checkpoint's stage was begun on other documents ({len(lost)} of "
        f"{len(before)} parts are gone) than the files hold now ({', '.join(labels)}); put the "
        "files of that time back, or write the new ones under another name and pass "
        "--allow-changed data_path"
    )


def compare_data(source: DocumentSource | None, part: str) -> None:
    """Check that every rank opened the same documents for ``part``. Collective.

    Raises:
        ValueError: on every rank, naming the files and the ranks.
    """
    contents = None
    if source is not None:
        contents = [(component.name, component.weight) for component in source.components]
    try:
        assert_same_over_ranks({part: contents})
        return
    except ValueError:
        pass
    mine = {} if source is None else {c.name: c.identity for c in source.corpora}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, files in enumerate(by_rank):
        groups.setdefault(tuple(sorted(files.items())), []).append(rank)
    common = max(groups, key=lambda files: len(groups[files]))
    lines = []
    for files, ranks in groups.items():
        named = [
            f"{path} ({identity})"
            for path, identity in files
            if files is common or (path, identity) not in common
        ]
        who = ", ".join(map(str, ranks[:16])) + (" and more" if len(ranks) > 16 else "")
        lines.append(f"ranks {who}: {', '.join(named[:4]) or 'no file that others lack'}")
    raise ValueError(
        f"ranks read different {part} data; copy the same .bin and .idx files to all nodes (the "
        "number is a fingerprint of what a file holds):\n  " + "\n  ".join(lines)
    )
