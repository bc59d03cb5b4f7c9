"""``Family``: all that is known of a model family; each family has one file with it.

families/qwen3.py    KIND = Family(model_types=("qwen3",), has_qk_norm=True, ...)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any

from nemo_like.config.kinds import Kinds
from nemo_like.models.latent_sizes import LatentSizes
from nemo_like.models.weight_names import EXPERT_RULES, LAYER_RULES, Rule

FAMILIES = Kinds(
    "nemo_like.models.families", "model family", "nemo_like.models.family:Family", has_keys=False
)

_TEXT = "_text"  # ends the type of the language model of a model that reads images too
_LINEAR_LAYERS = ("self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_LATENT_LAYERS = tuple(
    f"self_attention.linear_{name}_proj" for name in ("q_down", "q_up", "kv_down", "kv_up")
)


@dataclass(frozen=True, slots=True)
class TrainedValues:
    """The values of a key of config.json with which Megatron-core trains a family's models.

    A key that is not there means ``missing``. ``rule`` and ``remedy`` are what a model with another value is
    told, where {group} stands for the worker group.
    """

    key: str
    values: tuple[Any, ...]
    missing: Any = None
    rule: str = ""
    remedy: str = "use a checkpoint without it"

    def refusal(self, group: str, content: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return what is wrong with the key in ``content``, and a remedy; None where its value trains."""
        value = content.get(self.key, self.missing)
        if value in self.values:
            return None
        rule = self.rule or f"has {self.key}={json.dumps(value)}, which is not supported"
        return rule, self.remedy.replace("{group}", group)


def without(*keys: str) -> tuple[TrainedValues, ...]:
    """Return that each of these features must be off."""
    return tuple(TrainedValues(key, (False, None)) for key in keys)


SWIGLU = TrainedValues("hidden_act", ("silu",), missing="silu")
# Megatron-core's options of routers with sigmoids, and with a bias for the choice of experts that stays.
SIGMOID_ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,
    "moe_router_dtype": "fp32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The keys of config.json for a family's mixtures; an empty one is of a part that they do not have.

    ``normalises`` is the key that says whether the weights of a token's chosen experts are scaled to sum to
    1; they always are where it is empty.
    """

    num_experts: str = "num_experts"
    num_chosen: str = "num_experts_per_tok"
    expert_size: str = "moe_intermediate_size"
    normalises: str = "norm_topk_prob"
    num_dense_layers: str = ""  # how many of the first layers have no experts
    num_shared: str = ""  # how many experts every token uses, besides those chosen for it
    scale: str = ""  # the factor of the weights of chosen experts
    num_groups: str = ""  # into how many groups the experts are divided
    num_chosen_groups: str = ""  # from how many of these groups a token's experts are chosen

    @property
    def sizes(self) -> tuple[str, ...]:
        """The keys that have to be positive integers."""
        return (self.expert_size, self.num_experts, self.num_chosen)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The further keys that have to be numbers where they are given."""
        keys = (self.num_dense_layers, self.num_shared, self.scale, self.num_groups, self.num_chosen_groups)
        return tuple(filter(None, keys))


class Part(Enum):
    """The parts that models of some families have beyond, or in place of, those of Llama; a backend of
    Megatron-core builds each of them."""

    post_norms = "post_norms"  # of what attention and feed-forward part add to the residual stream
    no_pre_norms = "no_pre_norms"  # attention and feed-forward part read the residual stream itself
    whole_qk_norm = "whole_qk_norm"  # a norm over the queries of all heads, and one over the keys
    mixed_windows = "mixed_windows"  # some layers have the window, others attend to the whole sequence
    two_ropes = "two_ropes"  # layers with the window rotate in another way than layers without it
    gelu_gate = "gelu_gate"  # the gate's activation is GELU, by its approximation with tanh
    scaled_embeddings = "scaled_embeddings"  # the layers get them times the root of the hidden size
    mla = "mla"  # queries, keys and values come from latents, and one rotated key is for all heads
    sinks = "sinks"  # a learnable logit per head, which takes a share of every query's attention
    yarn = "yarn"  # all layers rotate in the same way, with YaRN
    clamped_swiglu = "clamped_swiglu"  # (up + 1) gate sigmoid(1.702 gate), both held within 7
    linear_biases = "linear_biases"  # of the attention's output layer, of routers and of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: decoder-only transformers with RMS norms, rotary positions and SwiGLU.

    about: the models' name, and what distinguishes them, as the page of models has it.
    model_types: the values of ``model_type`` in config.json.
    trained_values: the keys of config.json with the values that Megatron-core trains.
    has_qkv_bias: the projections to queries, keys and values have biases.
    has_qk_norm: each head's queries and keys are normalised.
    qk_norm_key: the key of config.json that says whether they are; empty where they always are.
    has_partial_rotation: config.json says which share of a head's values rotates with the position.
    has_window: layers have the window of ``sliding_window`` in config.json, if that is not null.
    query_scale_key: the key of config.json whose inverse root multiplies the products of queries with keys;
        it is the head size where the name is empty.
    parts: what models have beyond Llama's layers.
    defaults: the values that keys of config.json have where they are missing, as transformers takes them.
    mixture: how config.json describes experts; None for dense models.
    megatron: further options of Megatron-core's TransformerConfig.
    layer_rules, expert_rules: weight rules of a layer and of one expert, where they are not those of most
        families (``weight_names``).
    experts_at: the place of experts in a layer of a checkpoint.
    engine_config: entries of config.json that vLLM reads, and that transformers leaves out of what it writes.
    cpu_engine: arguments of vLLM's engines on CPUs.
    stacks_experts: a checkpoint has one tensor of all experts of a layer, whose name is that of an expert's
        without its number.
    """

    about: str
    model_types: tuple[str, ...]
    trained_values: tuple[TrainedValues, ...] = without("attention_bias", "mlp_bias", "use_sliding_window")
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    qk_norm_key: str = ""
    has_partial_rotation: bool = False
    has_window: bool = False
    query_scale_key: str = ""
    parts: frozenset[Part] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    mixture: Mixture | None = None
    megatron: Mapping[str, Any] = field(default_factory=dict, hash=False)
    layer_rules: Mapping[str, Rule] = field(default_factory=dict, hash=False)
    expert_rules: Mapping[str, Rule] = field(default_factory=dict, hash=False)
    experts_at: str = "mlp.experts"
    engine_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cpu_engine: Mapping[str, Any] = field(default_factory=dict, hash=False)
    stacks_experts: bool = False

    @property
    def has_router_bias(self) -> bool:
        """Whether routers choose by scores with a bias, which does not train."""
        return bool(self.megatron.get("moe_router_enable_expert_bias", False))

    @property
    def has_linear_biases(self) -> bool:
        """Whether the attention's output layer, routers and experts have biases."""
        return Part.linear_biases in self.parts

    @property
    def norms_per_layer(self) -> int:
        """How many norms of the hidden size a layer has."""
        return 2 * ((Part.no_pre_norms not in self.parts) + (Part.post_norms in self.parts))

    @property
    def sizes(self) -> tuple[str, ...]:
        """The keys of config.json that have to be positive integers, beyond those of all models."""
        latent = LatentSizes.KEYS if Part.mla in self.parts else ()
        of_experts = self.mixture.sizes if self.mixture else ()
        of_layers = ("sliding_window_pattern",) if Part.mixed_windows in self.parts else ()
        return (*of_experts, *latent, *of_layers, *filter(None, [self.query_scale_key]))

    @property
    def numbers(self) -> tuple[str, ...]:
        """The keys of config.json that have to be numbers where they are given, beyond those of all
        models."""
        return self.mixture.numbers if self.mixture else ()

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """The names of a layer's linear layers in a checkpoint, with the layers that an expert has too."""
        inputs = _LATENT_LAYERS if Part.mla in self.parts else ("self_attention.linear_qkv",)
        rules = [self.layer_rule(f"{layer}.weight") for layer in (*inputs, *_LINEAR_LAYERS)]
        return tuple(name.split(".")[-2] for rule in rules for name in rule.hf_names)

    def layer_rule(self, name: str) -> Rule:
        """Return the rule of a layer's parameter; raise KeyError for one that no model of the family has."""
        return self.layer_rules.get(name) or LAYER_RULES[name]

    def expert_rule(self, name: str) -> Rule:
        """Return the rule of the weight of one of an expert's linear layers, or of its bias."""
        return self.expert_rules.get(name) or EXPERT_RULES[name]


@cache
def _families() -> Mapping[str, Family]:
    """Return the family of each model type, in the alphabetical order of the types."""
    families = [FAMILIES.load(name) for name in FAMILIES.names()]
    of_types = {model_type: family for family in families for model_type in family.model_types}
    return dict(sorted(of_types.items()))


def family_of(model_type: object) -> Family | None:
    """Return the family of a model type; None where no file describes it."""
    return _families().get(model_type) if isinstance(model_type, str) else None


def described_types() -> tuple[str, ...]:
    """Return the model types that have a family, in alphabetical order."""
    return tuple(_families())


def nearest_type(model_type: object) -> str | None:
    """Return the model type with a family whose name is most like ``model_type``; None where none is like
    it."""
    names = {one.removesuffix(_TEXT): one for one in described_types()}
    nearest = get_close_matches(str(model_type).removesuffix(_TEXT), names, n=1)
    return names[nearest[0]] if nearest else None
