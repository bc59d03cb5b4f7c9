"""The special tokens around a text: decides which of them a prompt or a complete text gets.

prompt:      before, once ▸ the text's own tokens                    a response follows
whole text:  before, once ▸ the text's own tokens ▸ after, once      nothing follows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

# A text for which every tokenizer has tokens.
_PROBE = "a0"


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that a tokenizer of transformers puts around a text, such as <s> before it."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    before_text: str  # the text of the tokens before a text

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Compare the tokens of a text with and without special tokens, and return the difference.

        Raises ValueError for a tokenizer that changes the text's own tokens when it adds special ones.
        """
        own = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        whole = tokenizer(_PROBE)["input_ids"]
        starts = range(len(whole) - len(own) + 1)
        start = next((one for one in starts if whole[one : one + len(own)] == own), None)
        if start is None:
            raise ValueError(
                f"the tokenizer makes {whole} of {_PROBE!r} with special tokens and {own} without, so what "
                "it puts around a text cannot be told; correct the post-processor in its tokenizer.json"
            )
        before, after = whole[:start], whole[start + len(own) :]
        return cls(tuple(before), tuple(after), "".join(tokenizer.convert_ids_to_tokens(before)))

    def prompt(self, own: Sequence[int]) -> list[int]:
        """Return the tokens of a prompt whose text has the tokens ``own``: with the special tokens before it,
        unless it begins with them, and none after it, since the response continues it."""
        is_there = tuple(own[: len(self.before)]) == self.before
        return [*own] if is_there else [*self.before, *own]

    def whole_text(self, own: Sequence[int]) -> list[int]:
        """Return the tokens of a complete text, with the special tokens before and after it, each once."""
        begun = self.prompt(own)
        is_there = tuple(begun[len(begun) - len(self.after) :]) == self.after
        return begun if is_there else [*begun, *self.after]
