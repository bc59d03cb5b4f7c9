"""``LatentSizes``: the sizes of multi-head latent attention (MLA, arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSizes:
    """The sizes of latent attention.

    All keys and values of a token are projected from one latent, and its queries from another one, or from
    the hidden state. A part of each query rotates with the position. The part of a key with which it is
    multiplied is the same for all heads and comes from the hidden state.
    """

    KEYS: ClassVar[tuple[str, ...]] = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    query_latent: int | None  # None: queries have no latent
    key_value_latent: int
    plain: int  # of the part of a head's queries and keys that does not rotate
    rotated: int  # of the part that does
    value: int  # of a head's values

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Read the sizes from the entries of a config.json."""
        latent, plain, rotated, value = (content[key] for key in cls.KEYS)
        return cls(
            query_latent=content.get("q_lora_rank"),
            key_value_latent=latent,
            plain=plain,
            rotated=rotated,
            value=value,
        )

    @property
    def head(self) -> int:
        """The size of a head's queries, and of its keys."""
        return self.plain + self.rotated

    @property
    def cached(self) -> int:
        """What an engine keeps of a token: the latent and the rotated part of its keys."""
        return self.key_value_latent + self.rotated

    @property
    def norms(self) -> int:
        """The number of scalars in the weights of a layer's norms of latents."""
        return self.key_value_latent + (self.query_latent or 0)

    def input_projections(self, hidden: int, num_heads: int) -> int:
        """Return the number of scalars in a layer's weights that make queries, keys and values."""
        queries, keys_and_values = num_heads * self.head, num_heads * (self.plain + self.value)
        of_queries = hidden * queries if self.query_latent is None else self.query_latent * (hidden + queries)
        return of_queries + hidden * self.cached + self.key_value_latent * keys_and_values
