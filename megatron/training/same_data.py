"""All ranks read the same corpora, or none trains.

A rank whose node has an older copy of a data file would train on other rows without a word.
Compared is what the files hold (``Corpus.identity``), not where they lie. Cost: one all-reduce
of 16 bytes whenever a part is opened; names are gathered only if something differs.
"""

from typing import Any

import torch.distributed as dist

from megatron.core.datasets import DocumentSource
from megatron.core.parallel_state import assert_same_over_ranks


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
