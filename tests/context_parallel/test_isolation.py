"""Documents are isolated to the bit, in every layout, communication and backend."""

import random
import zlib

import pytest
import torch

from megatron.core.context_parallel import make_layout
from tests.utils.ranks import run_ranks
from tools import attention_grid
from tools.attention_grid import LAYOUTS, Case, make_groups, run_case

COMMS = {
    (1, 1): ("auto",),
    (2, 1): ("a2a",),
    (1, 3): ("p2p", "all_gather"),
    (2, 2): ("a2a+p2p", "a2a+all_gather"),
}


def leaks(rank: int, world: int, split: tuple[int, int], cases: list[Case]) -> list[str]:
    """Names of tensors whose other documents changed when one document's tokens did."""
    groups = make_groups(*split)
    plain = attention_grid.case_tensors
    found = []
    for case in cases:
        rng = random.Random(case.seed)
        bounds = case.bounds()
        changed = torch.zeros(len(bounds), case.length, dtype=torch.bool)
        for row, edges in enumerate(bounds):
            which = rng.randrange(len(edges) - 1)
            changed[row, edges[which] : edges[which + 1]] = True

        def other(given: Case, changed: torch.Tensor = changed) -> tuple[torch.Tensor, ...]:
            noise = torch.Generator().manual_seed(given.seed + 1)
            return tuple(
                torch.where(
                    changed[:, :, None, None],
                    torch.randn(x.shape, generator=noise, dtype=torch.float64).to(x.dtype) * 100,
                    x,
                )
                for x in plain(given)
            )

        before = run_case(case, groups)
        attention_grid.case_tensors = other
        after = run_case(case, groups)
        attention_grid.case_tensors = plain
        at = make_layout(case.layout, case.length, case.ring, case.ulysses, bounds).positions(
            *divmod(rank, case.ulysses)
        )
        same = ~changed[:, at]
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), before, after, strict=True):
            if name == "lse":
                x, y = x.transpose(1, 2), y.transpose(1, 2)
            if not torch.equal(x[same], y[same]):
                found.append(f"{name} of {case}")
    return found


@pytest.mark.parametrize("split", COMMS)
def test_bits_of_other_documents_stay(split: tuple[int, int]) -> None:
    ulysses, ring = split
    cases = [
        Case(
            ulysses, ring, layout, comm, (4, 2), 48, (packing, "random"), window, dtype, backend,
            seed=zlib.crc32(f"{layout}{comm}{backend}{packing}{window}".encode()) % 1000,
        )
        for layout in LAYOUTS
        for comm in COMMS[split]
        for backend, packing, window, dtype in (
            ("flash", "random", None, "float32"), ("flash", "beside_edges", 7, "float64"),
            ("flash", "ones", None, "float32"), ("reference", "random", 5, "float32"),
        )
    ]  # fmt: skip
    for found in run_ranks(ulysses * ring, leaks, split, cases):
        assert not found
