"""Settings that wait for another one are accepted, and said in the log."""

import pytest

from megatron.training.arguments import check_command_line
from tests.arguments.good import command_line

SAID = {
    "--optimizer sgd --adam-beta1 0.8": "--adam-beta1 0.8 has no effect with --optimizer sgd",
    "--sgd-momentum 0.5": "--sgd-momentum 0.5 has no effect with --optimizer adam",
    "--lr-wsd-decay-style linear": "--lr-wsd-decay-style linear has no effect without",
    "--lr-decay-style constant --min-lr 1e-5": "--min-lr 1e-05 has no effect with",
    "--position-embedding-type none --rotary-percent 0.5": "--rotary-percent 0.5 has no effect",
    "--position-embedding-type none --rotary-base 5e5": "--rotary-base 500000.0 has no effect",
    "--cp-layout balanced": "--cp-layout balanced has no effect with a context-parallel size of 1",
    "--no-load-optim": "--no-load-optim has no effect without --load",
    "--no-load-rng": "--no-load-rng has no effect without --load",
    "--no-save-optim": "--no-save-optim has no effect without --save",
    "--allow-changed seq_length": "--allow-changed seq_length has no effect without --load",
    "--override-opt-param-scheduler": "--override-opt-param-scheduler has no effect without --load",
    "--iterations-to-skip 3 11 12": "--iterations-to-skip 11 12 has no effect: the run ends after",
    "--window-size 127,0": "--window-size 127,0 (left,right as in Megatron-LM) is 128 keys",
    "--cp-comm-type p2p": "--cp-comm-type p2p has no effect with a context-parallel size of 1",
}
USED = (
    "--load megatron --no-load-optim --no-load-rng --override-opt-param-scheduler",
    "--load megatron --allow-changed seq_length",
    "--iterations-to-skip 10",
    "--window-size 128",
    "--optimizer sgd --sgd-momentum 0.5",
    "--adam-beta1 0.8",
    "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style linear",
    "--lr-decay-style cosine --min-lr 1e-5",
    "--rotary-percent 0.5",
    "--context-parallel-size 2 --cp-layout balanced --cp-comm-type p2p",
)


@pytest.mark.parametrize("words", SAID)
def test_a_setting_without_effect_is_said_once(words):
    notes = check_command_line(command_line(words), world_size=1).notes
    assert len(notes) == 1 and notes[0].startswith(SAID[words])


@pytest.mark.parametrize("words", USED)
def test_a_setting_that_is_used_is_not_mentioned(words):
    assert check_command_line(command_line(words), world_size=2).notes == ()
