"""Where a long text may be cut so that its pieces, tokenized apart, give the same tokens.

SentencePiece's BPE keeps one heap for a whole document: its cost is n log n with poor caching
(measured: 16 MB ran at a third of the speed of 64 KB, in 0.7 GB). But no token is
formed across two neighbouring characters that stand side by side in no vocabulary piece. So a
cut between such a pair changes nothing: BPE can't merge across it (each merge must be a piece),
and no unigram piece spans it. The set of pairs inside pieces (a few thousand) decides.

Beside the pairs, the normaliser must not look across the cut:

* identity: nothing to look at. A dummy prefix is switched off for all but the first part.
* nfkc, nmt_nfkc and their case-folding forms: only between two ASCII letters or digits.
* removal of extra whitespace: never beside whitespace.
* user-made rules, or whitespace as a suffix with a dummy: the text stays whole.

A model without byte fallback joins neighbouring unknown characters into one ``<unk>``: there,
one side of the cut must be a known character.

BPE: exactly the tokens of the whole text. Unigram: the best path of each part, joined. The library
itself sums log probabilities of a whole document in float32, and so loses the best path of long
ones (at 8 MB about 3 boundaries in 10,000 tokens differ, by ties and rounding): unigram texts are
cut only beyond 1M characters, which keeps any shorter document equal to the library's own call.
"""

import string
from collections.abc import Callable
from typing import Any

BPE_PART = 1 << 14
"""Characters of a part with BPE (16K: fits the cache; fastest of 16K..1M as measured)."""
UNIGRAM_PART = 1 << 20
"""Characters of a part with unigram."""

_WORD_CHARACTERS = frozenset(string.ascii_letters + string.digits)
_PAIR_TYPES = frozenset((1, 4, 5))  # NORMAL, USER_DEFINED, UNUSED
_UNIGRAM, _BPE = 1, 2
_FOLDED = {"nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"}
_SPACE = "\u2581"


class Cutter:
    """Cuts texts for one model.

    Attributes:
        part: characters after which a cut is looked for; 0 = this model's texts stay whole.
        continuation: the model for parts after the first (no dummy prefix), as serialized bytes,
            or None where the model itself serves.
    """

    def __init__(self, model: bytes) -> None:
        from sentencepiece import sentencepiece_model_pb2

        messages: Any = sentencepiece_model_pb2
        proto = messages.ModelProto()
        proto.ParseFromString(model)
        normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
        self.part = {_BPE: BPE_PART, _UNIGRAM: UNIGRAM_PART}.get(trainer.model_type, 0)
        suffix = trainer.treat_whitespace_as_suffix and normalizer.add_dummy_prefix
        identity = not normalizer.precompiled_charsmap
        if suffix or not (identity or normalizer.name in _FOLDED):
            self.part = 0
        self._identity = identity
        self._beside_space = not normalizer.remove_extra_whitespaces
        self._pairs, self._known = _pairs_and_characters(proto)
        self._byte_fallback = bool(trainer.byte_fallback)
        self.continuation: bytes | None = None
        if normalizer.add_dummy_prefix and self.part:
            normalizer.add_dummy_prefix = False
            self.continuation = proto.SerializeToString()

    def cut(self, text: str) -> list[str]:
        """``text`` in parts of about ``part`` characters (more where no cut is allowed)."""
        if not self.part or len(text) < 2 * self.part:
            return [text]
        parts, start = [], 0
        while len(text) - start >= 2 * self.part:
            end = self._next_cut(text, start + self.part)
            parts.append(text[start:end])
            start = end
        if start < len(text):
            parts.append(text[start:])
        return parts

    def _next_cut(self, text: str, position: int) -> int:
        """The first place from ``position`` on where a cut is allowed, else the end."""
        allowed: Callable[[str, str], bool] = self._allowed
        for place in range(position, len(text)):
            if allowed(text[place - 1], text[place]):
                return place
        return len(text)

    def _allowed(self, left: str, right: str) -> bool:
        left, right = left.replace(_SPACE, " "), right.replace(_SPACE, " ")
        if left + right in self._pairs:
            return False
        if not self._identity:
            if left not in _WORD_CHARACTERS or right not in _WORD_CHARACTERS:
                return False
            if (left + right).lower() in self._pairs:
                return False
        if not self._beside_space and (left.isspace() or right.isspace()):
            return False
        return self._byte_fallback or left in self._known or right in self._known


def _pairs_and_characters(proto: Any) -> tuple[frozenset[str], frozenset[str]]:
    pairs: set[str] = set()
    characters: set[str] = set()
    for entry in proto.pieces:
        if entry.type in _PAIR_TYPES:
            piece = entry.piece.replace(_SPACE, " ")
            pairs.update(piece[i : i + 2] for i in range(len(piece) - 1))
            if len(piece) == 1 and entry.type != 5:
                characters.add(piece)
    return frozenset(pairs), frozenset(characters)
