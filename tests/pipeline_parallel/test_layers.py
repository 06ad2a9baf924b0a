"""Layer split of plain and interleaved pipelines, and its refusals."""

import pytest

from megatron.core.pipeline_parallel import layer_ids, num_chunks


def test_plain_pipeline_cuts_consecutive_layers():
    assert layer_ids(8, 4) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert layer_ids(3, 1) == [[[0, 1, 2]]]


def test_interleaved_pipeline_deals_virtual_stages_round_robin():
    assert layer_ids(8, 4, 1) == [[[0], [4]], [[1], [5]], [[2], [6]], [[3], [7]]]
    assert layer_ids(16, 2, 4) == [
        [[0, 1, 2, 3], [8, 9, 10, 11]],
        [[4, 5, 6, 7], [12, 13, 14, 15]],
    ]
    assert num_chunks(16, 2, 4) == 2 and num_chunks(16, 2, 8) == 1 and num_chunks(16, 2) == 1


@pytest.mark.parametrize(
    ("layers", "pp", "virtual"), [(24, 4, 2), (24, 4, 3), (24, 2, 1), (6, 6, 1)]
)
def test_every_layer_is_on_one_rank_and_virtual_stages_are_in_order(layers, pp, virtual):
    ids = layer_ids(layers, pp, virtual)
    chunks = len(ids[0])
    in_order = [i for chunk in range(chunks) for rank in range(pp) for i in ids[rank][chunk]]
    assert in_order == list(range(layers))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (10, 4),
            "--num-layers 10 must be a multiple of --pipeline-model-parallel-size 4; use 8 or",
        ),
        ((2, 4), "--num-layers 2 must be a multiple .*; use 4 layers"),
        ((8, 0), "--pipeline-model-parallel-size 0 must be >= 1"),
        ((8, 2, 3), r"--num-layers-per-virtual-pipeline-stage 3 must divide the 4 .*\[1, 2, 4\]"),
        ((8, 2, 0), "--num-layers-per-virtual-pipeline-stage 0 must divide"),
        ((8, 1, 2), "needs --pipeline-model-parallel-size of at least 2; drop it"),
    ],
)
def test_errors_name_flag_value_rule_and_cure(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_ids(*arguments)
