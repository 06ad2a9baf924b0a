"""RoPE rules: published values, formulas written another way, limits, and wrong mappings."""

import json
import math
from pathlib import Path

import pytest
import torch

from megatron.core.context_extension import rope_frequencies, rope_inv_freq, rotary_dim

REFERENCE = json.loads(
    (Path(__file__).parents[1] / "data" / "rope_reference.json").read_text(encoding="utf-8")
)["cases"]


def from_case(case):
    config = case["config"]
    scaling = dict(config["rope_parameters"])
    theta = scaling.pop("rope_theta")
    scaling["max_position_embeddings"] = config["max_position_embeddings"]
    return rope_inv_freq(config["head_dim"], theta, scaling, case["seq_len"])


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_values(name):
    case = REFERENCE[name]
    inv_freq, factor = from_case(case)
    assert inv_freq.dtype == torch.float64 and inv_freq.shape == (case["config"]["head_dim"] // 2,)
    torch.testing.assert_close(
        inv_freq, torch.tensor(case["inv_freq"], dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert factor == pytest.approx(case["attention_factor"], rel=1e-9)


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_cos_and_sin(name):
    """The reference makes its angles in float32: off by up to position * 2**-24."""
    case = REFERENCE[name]
    inv_freq, factor = from_case(case)
    positions = torch.tensor(case["positions"], dtype=torch.float64)
    angles = positions[:, None] * inv_freq
    tolerance = (positions[:, None] * 2.0**-22 + 1e-6).expand_as(angles) * factor
    for key, values in (("cos_half", angles.cos()), ("sin_half", angles.sin())):
        expected = torch.tensor(case[key], dtype=torch.float64)
        assert ((values * factor - expected).abs() <= tolerance).all()


def test_the_lowest_frequency_of_ntk_is_that_of_linear_and_the_highest_is_unchanged():
    plain, _ = rope_inv_freq(64, 1e4)
    ntk, factor = rope_inv_freq(64, 1e4, {"rope_type": "ntk", "factor": 4.0})
    assert ntk[0] == plain[0] == 1 and factor == 1
    assert ntk[-1].item() == pytest.approx(plain[-1].item() / 4, rel=1e-12)


def test_dynamic_equals_default_up_to_the_original_length_and_ntk_at_factor_times_it():
    scaling = {"rope_type": "dynamic", "factor": 1.0, "original_max_position_embeddings": 2048}
    plain, _ = rope_inv_freq(64, 1e4)
    for length in (None, 1, 2048):
        assert torch.equal(rope_inv_freq(64, 1e4, scaling, length)[0], plain)
    stretched, _ = rope_inv_freq(64, 1e4, scaling, 8192)
    ntk, _ = rope_inv_freq(64, 1e4, {"rope_type": "ntk", "factor": 4.0})
    torch.testing.assert_close(stretched, ntk, rtol=1e-14, atol=0)


def yarn_by_turns(dim, theta, factor, original, fast, slow, truncate):
    """YaRN again, from its definition: how often each pair turns within the original length."""
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    plain = torch.tensor(theta, dtype=torch.float64) ** (-2 * pairs / dim)

    def pair(turns):
        return dim / 2 * math.log(original / (2 * math.pi * turns), theta)

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    ramp = ((pairs - max(low, 0)) / (min(high, dim - 1) - max(low, 0))).clamp(0, 1)
    return torch.lerp(plain, plain / factor, ramp)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("fast, slow", [(32.0, 1.0), (16.0, 2.0)])
def test_yarn_options(truncate, fast, slow):
    scaling = {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": truncate,
    }
    got, factor = rope_inv_freq(128, 5e5, scaling)
    expected = yarn_by_turns(128, 5e5, 16, 4096, fast, slow, truncate)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert factor == pytest.approx(0.1 * math.log(16) + 1)


def test_yarn_of_a_length_below_one_turn_divides_all_but_the_first_pair():
    """Both ends of the ramp are pair 0; without a width the ramp would be 0 / 0 there."""
    scaling = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 6}
    got, _ = rope_inv_freq(64, 1e4, scaling)
    plain, _ = rope_inv_freq(64, 1e4)
    torch.testing.assert_close(got[1:], plain[1:] / 4, rtol=1e-15, atol=0)
    assert got[0] == plain[0] == 1.0


def test_a_context_that_shrinks_has_no_attention_factor():
    """As Hugging Face's rules: the logarithm of a factor below 1 would be negative."""
    lengths = {"original_max_position_embeddings": 4096, "max_position_embeddings": 1024}
    assert rope_inv_freq(64, 1e4, {"rope_type": "yarn", **lengths})[1] == 1.0
    assert rope_inv_freq(16, 1e4, longrope(**lengths), 1024)[1] == 1.0


def test_yarn_mscale_is_a_ratio_and_factor_follows_from_the_lengths():
    base = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    equal = rope_inv_freq(64, 1e4, base | {"mscale": 1.0, "mscale_all_dim": 1.0})
    assert equal[1] == 1.0
    both = rope_inv_freq(64, 1e4, base | {"mscale": 0.707, "mscale_all_dim": 1.0})
    assert both[1] == pytest.approx(
        (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1), rel=1e-12
    )
    one = rope_inv_freq(64, 1e4, base | {"mscale": 0.707, "mscale_all_dim": None})
    assert one[1] == pytest.approx(0.1 * math.log(40) + 1)
    derived = dict(base, factor=None, max_position_embeddings=4096 * 40)
    assert torch.equal(rope_inv_freq(64, 1e4, derived)[0], rope_inv_freq(64, 1e4, base)[0])


def test_llama3_keeps_short_waves_and_divides_long_ones():
    scaling = {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8192}
    got, factor = rope_inv_freq(128, 5e5, scaling)
    plain, _ = rope_inv_freq(128, 5e5)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any() and long.any() and factor == 1
    assert torch.equal(got[short], plain[short])
    torch.testing.assert_close(got[long], plain[long] / 8, rtol=1e-15, atol=0)
    ratio = (got / plain)[~short & ~long]
    assert ((ratio > 1 / 8) & (ratio < 1)).all() and (ratio.diff() < 0).all()


def longrope(**extra):
    short, long = [1.0] * 8, [2.0 + i for i in range(8)]
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long} | extra


def test_longrope_picks_its_factors_by_the_sequence_length():
    scaling = longrope(original_max_position_embeddings=4096, factor=32)
    plain, _ = rope_inv_freq(16, 1e4)
    for length in (None, 1, 4096):
        assert torch.equal(rope_inv_freq(16, 1e4, scaling, length)[0], plain)
    long, factor = rope_inv_freq(16, 1e4, scaling, 4097)
    torch.testing.assert_close(long, plain / torch.arange(2.0, 10.0, dtype=torch.float64))
    assert factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert rope_inv_freq(16, 1e4, scaling | {"attention_factor": 1.5}, 4097)[1] == 1.5


def test_cos_and_sin_at_position_16_million_are_right_to_1e_6():
    """Against exact rational arithmetic for theta = 2**k, where frequencies are exact."""
    position = 16 * 1024 * 1024 - 1
    inv_freq, _ = rope_inv_freq(32, 2.0**16)
    angles = position * inv_freq
    for pair, angle in enumerate(angles.tolist()):
        # theta ** (-2 pair/32) = 2 ** -pair exactly, so the true angle is position / 2 ** pair.
        assert abs(math.cos(angle) - math.cos(position / 2**pair)) < 1e-6
        assert abs(math.sin(angle) - math.sin(position / 2**pair)) < 1e-6


def test_partial_rotation_counts_the_rotated_part_only():
    assert rotary_dim(128, 0.25) == 32
    whole, _ = rope_inv_freq(32, 1e4)
    scaling = {"rope_type": "default", "partial_rotary_factor": 0.25}
    assert torch.equal(rope_inv_freq(128, 1e4, scaling)[0], whole)


def test_values_written_as_text_and_older_names_are_read():
    plain = rope_frequencies(64, 1e4, {"rope_type": "linear", "factor": 4.0})
    assert rope_frequencies(64, "1e4", {"type": "linear", "factor": "4.0"}) == plain
    su = longrope(original_max_position_embeddings="4096", factor=32)
    assert rope_frequencies(16, 1e4, su | {"rope_type": None, "type": "su"}) == rope_frequencies(
        16, 1e4, su
    )
    same_theta = {"rope_type": "default", "rope_theta": 1e4}
    assert rope_frequencies(64, 1e4, same_theta) == rope_frequencies(64, 1e4)


YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "yarm"}, "rope_type yarm is unknown; did you mean yarn"),
        ({"factor": 2.0}, "has no rope_type; add one of default, linear"),
        ({"rope_type": "linear"}, "rope_type linear needs factor; add it"),
        ({"rope_type": "linear", "factor": 0.5}, "factor 0.5 must be at least 1"),
        ({"rope_type": "linear", "factor": "two"}, "factor: 'two' is not a number"),
        ({"rope_type": "linear", "factor": True}, "factor: True is not a number"),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 32}, "beta_fast has no meaning for"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2}, "has two rules, linear and yarn"),
        ({"rope_type": "default", "factor": 2}, "factor has no meaning for rope_type default"),
        (YARN | {"beta_fats": 32}, "unknown key beta_fats; did you mean beta_fast"),
        (YARN | {"truncate": "perhaps"}, "truncate: 'perhaps' is neither true nor false"),
        (YARN | {"beta_fast": 1, "beta_slow": 1}, "beta_fast 1.0 must be greater than beta_slow"),
        ({"rope_type": "yarn", "factor": 4}, "needs original_max_position_embeddings"),
        ({"rope_type": "yarn", "max_position_embeddings": 4096}, "needs factor"),
        ({"rope_type": "dynamic", "factor": 4}, "needs original_max_position_embeddings"),
        (
            {
                "rope_type": "llama3",
                "factor": 8,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 4,
                "high_freq_factor": 1,
            },
            "low_freq_factor 4.0 must be less than high_freq_factor 1.0",
        ),
        (longrope(original_max_position_embeddings=64, long_factor=[1, 2]), None),
        (longrope(original_max_position_embeddings=64, long_factor=2), "2 is not a list"),
        (longrope(original_max_position_embeddings=1), "must be greater than 1"),
        ({"rope_type": "default", "rope_theta": 5e5}, "contradicts the rotary base 10000"),
        ("yarn", "is not a mapping; write {rope_type: yarn"),
    ],
)
def test_wrong_mappings_say_what_is_wrong_and_what_to_do(scaling, message):
    with pytest.raises(ValueError, match=message or "has 2 factors; it must have one for each"):
        rope_inv_freq(16, 1e4, scaling, seq_length=128)


@pytest.mark.parametrize("length", [None, 64, 128])
@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_both_lists_of_longrope_have_a_factor_for_each_pair_at_every_length(name, length):
    scaling = longrope(original_max_position_embeddings=64) | {name: [1.0] * 7}
    with pytest.raises(ValueError, match=f"{name} has 7 factors; it must have one for each"):
        rope_inv_freq(16, 1e4, scaling, length)


@pytest.mark.parametrize("head_dim", [0, 1, -2])
def test_a_head_without_a_pair(head_dim):
    with pytest.raises(ValueError, match=f"head dimension {head_dim} must be at least 2"):
        rope_inv_freq(head_dim, 1e4)


def test_wrong_numbers():
    with pytest.raises(ValueError, match="rotates 15 dimensions"):
        rope_inv_freq(15, 1e4)
    with pytest.raises(ValueError, match="--rotary-base 1.0 must be greater than 1"):
        rope_inv_freq(16, 1.0)
    with pytest.raises(ValueError, match="must be in"):
        rotary_dim(64, 1.5)
    with pytest.raises(ValueError, match="needs a rotated dimension of at least 4"):
        rope_inv_freq(2, 1e4, {"rope_type": "ntk", "factor": 2})
