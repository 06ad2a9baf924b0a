"""A command line without faults, as a dict of flags, and how to change it."""

GOOD = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "8",
    "--position-embedding-type": "rope",
    "--seq-length": "1024",
    "--micro-batch-size": "1",
    "--global-batch-size": "16",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--mock-data": "",
    "--vocab-size": "512",
    "--tokenizer-type": "NullTokenizer",
}


def command_line(changes: "str | dict[str, str | None]" = "", drop: str = "") -> list[str]:
    """GOOD without the flags in ``drop``, followed by the words of ``changes``."""
    kept = {flag: value for flag, value in GOOD.items() if flag not in drop.split()}
    words = [word for item in kept.items() for word in item if word]
    return [*words, *changes.split()] if isinstance(changes, str) else words
