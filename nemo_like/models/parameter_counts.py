"""The parameters of a decoder-only transformer, by kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """The number of a model's parameters of each kind, in scalars.

    ``attention``, ``dense_ffn``, ``router`` and ``layer_norms`` are counts of one layer, ``expert`` of one
    expert.
    """

    num_layers: int
    input_embeddings: int
    output_layer: int  # 0 where it is the input embedding
    attention: int  # of one layer: the four projections, their biases, the norms of queries and keys
    dense_ffn: int  # of one layer; 0 in a mixture
    expert: int  # of one expert; 0 without a mixture
    num_experts: int  # per layer; 0 without a mixture
    num_experts_per_token: int  # 0 without a mixture
    router: int  # of one layer; 0 without a mixture
    layer_norms: int  # of one layer: the two before attention and feed-forward part
    final_norm: int

    @property
    def experts(self) -> int:
        """The parameters of all experts of one layer."""
        return self.num_experts * self.expert

    @property
    def embeddings(self) -> int:
        """The parameters of the input embedding and of the output layer; tied ones count once."""
        return self.input_embeddings + self.output_layer

    @property
    def layer(self) -> int:
        """The parameters of one layer."""
        return self.layer_without_experts + self.experts

    @property
    def layer_without_experts(self) -> int:
        """The parameters of one layer that expert parallelism does not divide."""
        return self.attention + self.dense_ffn + self.router + self.layer_norms

    @property
    def total(self) -> int:
        """The parameters of the model."""
        return self.embeddings + self.num_layers * self.layer + self.final_norm

    @property
    def active(self) -> int:
        """The parameters that one token uses: all except the experts that are not chosen for it."""
        idle = self.num_experts - self.num_experts_per_token
        return self.total - self.num_layers * idle * self.expert
