"""The parameters of a decoder-only transformer, by kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """The number of a model's parameters of each kind, in scalars.

    ``attention``, ``dense_ffn``, ``router``, ``shared_experts`` and ``layer_norms`` are counts of one layer,
    ``expert`` of one expert. The first layers of a mixture may be dense.
    """

    num_layers: int
    num_dense_layers: int  # the first ones, which have no experts; all layers without a mixture
    input_embeddings: int
    output_layer: int  # 0 where it is the input embedding
    attention: int  # of one layer: the four projections, their biases, the norms of queries and keys
    dense_ffn: int  # of one layer without experts; 0 where every layer has experts
    expert: int  # of one expert; 0 without a mixture
    num_experts: int  # per layer; 0 without a mixture
    num_experts_per_token: int  # 0 without a mixture
    router: int  # of one layer with experts; 0 without a mixture
    shared_experts: int  # those that every token uses, of one layer with experts
    layer_norms: int  # of one layer: the norms of the hidden size, before or after its two parts
    final_norm: int

    @property
    def experts(self) -> int:
        """The parameters of all experts of one layer, without shared ones."""
        return self.num_experts * self.expert

    @property
    def num_mixture_layers(self) -> int:
        """The layers that have experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def embeddings(self) -> int:
        """The parameters of the input embedding and of the output layer; tied ones count once."""
        return self.input_embeddings + self.output_layer

    @property
    def layer(self) -> int:
        """The parameters of the largest layer."""
        mixture = self.router + self.shared_experts + self.experts
        return self.attention + self.layer_norms + max(self.dense_ffn, mixture)

    def experts_in(self, layers: range) -> int:
        """Return the parameters of all experts of these layers, without shared ones."""
        return self._num_mixture_layers_in(layers) * self.experts

    def outside_experts_in(self, layers: range) -> int:
        """Return the parameters of these layers that expert parallelism does not divide."""
        num_mixture = self._num_mixture_layers_in(layers)
        ffn = (len(layers) - num_mixture) * self.dense_ffn
        ffn += num_mixture * (self.router + self.shared_experts)
        return len(layers) * (self.attention + self.layer_norms) + ffn

    def matrices_in(self, layers: range) -> int:
        """Return the parameters of these layers outside of experts that are matrices; biases, and norms of
        queries and keys, are few and counted as such."""
        return self.outside_experts_in(layers) - len(layers) * self.layer_norms

    def _num_mixture_layers_in(self, layers: range) -> int:
        return len(range(max(layers.start, self.num_dense_layers), layers.stop))

    @property
    def layer_matrices(self) -> int:
        """The parameters of all layers that are matrices."""
        layers = range(self.num_layers)
        return self.matrices_in(layers) + self.experts_in(layers)

    @property
    def total(self) -> int:
        """The parameters of the model."""
        layers = range(self.num_layers)
        return self.embeddings + self.outside_experts_in(layers) + self.experts_in(layers) + self.final_norm

    @property
    def active(self) -> int:
        """The parameters that one token uses: all except the experts that are not chosen for it."""
        idle = self.num_experts - self.num_experts_per_token
        return self.total - self.num_mixture_layers * idle * self.expert
