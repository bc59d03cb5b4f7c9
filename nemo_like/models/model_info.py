"""Reads the sizes and features of a model from its checkpoint directory, without loading the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_like.config.problems import ConfigError
from nemo_like.models.family import Family, Mixture, Part, family_of
from nemo_like.models.latent_sizes import LatentSizes
from nemo_like.models.parameter_counts import ParameterCounts
from nemo_like.models.quantization import quantization
from nemo_like.models.rope import (
    ROPE_NUMBERS,
    USUAL_ROPE_THETA,
    Rope,
    query_scale,
    rope,
    rope_settings,
    ropes_of,
    rotated_share,
)
from nemo_like.policy.options import BACKEND_KINDS, ValueConfig, WorkerGroupConfig

# Models with a vision tower.
IMAGE_TEXT_MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")
# The keys of config.json for tokens that stand for an image or a video. In a response such a token
# would stand for a picture that is not there, so it is neither sampled nor scored.
_PLACEHOLDERS = ("image_token_id", "video_token_id")

# A directory for each model that recipes name, with its config.json and nothing else.
_SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"

_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
# The keys that have to be numbers where they are given; null leaves them out.
_NUMBERS = ("head_dim", "num_key_value_heads", "q_lora_rank", "rms_norm_eps", *ROPE_NUMBERS)
# Names of these sizes in other models, or in other versions of transformers.
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_experts": ("num_local_experts",),
}
# A model that leaves out the size of its feed-forward layers has this many times the hidden size.
_USUAL_FFN_FACTOR = 4
# What transformers assumes when config.json has none.
_USUAL_NORM_EPSILON = 1e-6
# A model of a type without a family is counted like one of this family.
_ASSUMED = Family(about="assumed", model_types=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The facts about a causal language model in its config.json."""

    model_type: str
    hidden_size: int
    intermediate_size: int  # of one expert in a mixture
    num_experts: int | None  # per layer; None: no mixture
    num_experts_per_token: int  # 0: no mixture
    normalises_chosen_experts: bool  # the weights of a token's chosen experts are scaled to sum to 1
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    has_tied_embeddings: bool
    norm_epsilon: float
    rope_theta: float
    rope_scaling_factor: float | None  # of Llama 3.1's scaling; None with no scaling, or with another kind
    num_stored_scalars: int | None  # counted in the weight files; None if the sizes give the number
    window: int | None = None  # the tokens to which one attends, itself included; None: all earlier ones
    full_layers: tuple[int, ...] = ()  # those without the window, in a model whose other layers have it
    query_scale: float | None = None  # multiplies products of queries with keys; None: head_size ** -0.5
    # Of layers with a window, and of full_layers; or one of all layers; none: that of rope_theta.
    ropes: tuple[Rope, ...] = ()
    latent: LatentSizes | None = None  # of latent attention; None: queries, keys and values have no latents
    num_dense_layers: int = 0  # the first ones of a mixture, which have no experts
    dense_ffn_size: int = 0  # of the layers of a mixture that have no experts
    shared_ffn_size: int = 0  # of the experts that every token uses, together
    routed_scale: float | None = None  # the factor of a mixture's weights of experts; None: 1
    num_expert_groups: int = 1  # a token's experts are chosen from some of these groups
    num_chosen_groups: int = 1
    leaves_out_qk_norm: bool = False  # though the family has it
    placeholder_ids: tuple[int, ...] = ()  # tokens that are never sampled; none without a vision tower
    rotated_share: float = 1.0  # the share of a head's values that rotate with the position
    quantization: str | None = None  # how weights are stored in fewer than 16 bits; None: they are not
    has_value_head: bool = False  # a critic's one output is in the place of the output layer

    @property
    def has_vision_tower(self) -> bool:
        """Whether the model reads images."""
        return self.model_type in IMAGE_TEXT_MODEL_TYPES

    @property
    def family(self) -> Family:
        """What is known of models of this type; of a type that no file describes, Llama's is assumed."""
        return family_of(self.model_type) or _ASSUMED

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return self.family.has_qkv_bias

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        return self.family.has_qk_norm and not self.leaves_out_qk_norm

    @property
    def num_mixture_layers(self) -> int:
        """The layers that have experts."""
        return 0 if self.num_experts is None else self.num_layers - self.num_dense_layers

    @property
    def normalises_whole(self) -> bool:
        """Whether the queries of all heads are normalised together, and the keys."""
        return Part.whole_qk_norm in self.family.parts

    @property
    def value_size(self) -> int:
        """The size of one head's values."""
        return self.head_size if self.latent is None else self.latent.value

    @property
    def rotated_size(self) -> int:
        """The size of the part of a head that rotates with the position, in models with ``ropes``."""
        return self.head_size if self.latent is None else self.latent.rotated

    @property
    def key_value_width(self) -> int:
        """The size of all heads' keys and values of a token."""
        return self.num_kv_heads * (self.head_size + self.value_size)

    @property
    def cached_width(self) -> int:
        """The size of what an engine keeps of a token in one layer: keys and values, or their latent."""
        return self.key_value_width if self.latent is None else self.latent.cached

    @property
    def num_cached_heads(self) -> int:
        """The parts into which tensor-parallel ranks can divide what an engine keeps of a token."""
        return self.num_kv_heads if self.latent is None else 1

    @property
    def projections(self) -> int:
        """The number of scalars in the weights of one layer's attention, without norms and biases."""
        output = self.num_heads * self.value_size * self.hidden_size
        if self.latent is not None:
            return self.latent.input_projections(self.hidden_size, self.num_heads) + output
        return self.hidden_size * (self.num_heads * self.head_size + self.key_value_width) + output

    def window_within(self, num_tokens: int) -> int | None:
        """Return the window where it leaves out tokens of a sequence of ``num_tokens``, else None."""
        return self.window if self.window is not None and self.window < num_tokens else None

    def padded_vocab_size(self, tp: int) -> int:
        """Return the rows of an embedding on ``tp`` ranks: the vocabulary, rounded up to a multiple."""
        return -(-self.vocab_size // tp) * tp

    @property
    def _output_layer(self) -> int:
        if self.has_value_head:
            return self.hidden_size
        return 0 if self.has_tied_embeddings else self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """The number of scalars in the weights; tied embeddings count once."""
        return self.parameters.total if self.num_stored_scalars is None else self.num_stored_scalars

    @property
    def parameters(self) -> ParameterCounts:
        """The number of scalars in the weights, by kind.

        Where the weight files were counted, the kinds are estimates: the other kinds are counted as in Llama,
        and the feed-forward layers share the rest of the counted sum.
        """
        has_biases = self.family.has_linear_biases
        biases = self.num_heads * self.head_size + self.key_value_width if self.has_qkv_bias else 0
        biases += self.hidden_size * has_biases + self.num_heads * (Part.sinks in self.family.parts)
        heads = self.num_heads + self.num_kv_heads if self.normalises_whole else 2
        norms = heads * self.head_size if self.has_qk_norm else 0
        if self.latent is not None:
            norms = self.latent.norms
        ffn, dense_size = 3 * self.hidden_size, self.dense_ffn_size
        embedding = self.vocab_size * self.hidden_size
        num_experts = self.num_experts or 0
        expert_biases = (2 * self.intermediate_size + self.hidden_size) * has_biases
        counts = ParameterCounts(
            num_layers=self.num_layers,
            num_dense_layers=self.num_layers - self.num_mixture_layers,
            input_embeddings=embedding,
            output_layer=self._output_layer,
            attention=self.projections + biases + norms,
            dense_ffn=ffn * (dense_size if num_experts else self.intermediate_size),
            expert=ffn * self.intermediate_size + expert_biases if num_experts else 0,
            num_experts=num_experts,
            num_experts_per_token=self.num_experts_per_token,
            router=num_experts * (self.hidden_size + self.family.has_router_bias + has_biases),
            shared_experts=ffn * self.shared_ffn_size,
            layer_norms=self.family.norms_per_layer * self.hidden_size,
            final_norm=self.hidden_size,
        )
        if self.num_stored_scalars is None:
            return counts
        rest = self.num_stored_scalars - replace(counts, dense_ffn=0).total
        return replace(counts, dense_ffn=max(0, rest // self.num_layers))


def is_here(model_name: str) -> bool:
    """Return whether a model's directory is on this machine with more than its config.json."""
    return Path(model_name).is_dir() and not _has_sizes_alone(Path(model_name))


def _has_sizes_alone(path: Path) -> bool:
    has_more = any(path.glob("*.safetensors")) or any(path.glob("tokenizer*"))
    return (path / "config.json").is_file() and not has_more


def planned_shape(model_name: str) -> Path | None:
    """Return a directory with the sizes of a model that is not here; None when there is none.

    It is the model's own directory where that has config.json alone, or else the shipped one for its name.
    With it a run can be planned on a machine that does not have the model.
    """
    shape = Path(model_name) if Path(model_name).is_dir() else _SHAPES / Path(model_name).name
    return shape if (shape / "config.json").is_file() else None


def model_of(group: WorkerGroupConfig) -> ModelInfo:
    """Return the sizes of the model of a training worker group.

    Without the model's directory, the shipped sizes of its name are read. Raises ConfigError when there are
    none.
    """
    shape = None if is_here(group.model_name) else planned_shape(group.model_name)
    model = read_model_info(str(shape or group.model_name), group.backend)
    return _as_critic(model) if isinstance(group, ValueConfig) else model


def _as_critic(model: ModelInfo) -> ModelInfo:
    """Return the sizes of the critic made of a language model: a value head replaces the output layer."""
    critic = replace(model, has_value_head=True, has_tied_embeddings=False)
    if model.num_stored_scalars is None:
        return critic
    stored = model.num_stored_scalars - model.parameters.output_layer + critic.parameters.output_layer
    return replace(critic, num_stored_scalars=stored)


def read_model_info(model_name: str, backend: str | None, group: str = "policy") -> ModelInfo:
    """Read a model's sizes from ``config.json`` in the directory ``model_name``.

    Raises ConfigError when the file is missing or broken, or when the training ``backend`` does not support
    the model; None is for a model that nothing trains. The error names keys of the worker group ``group``.
    """
    path = Path(model_name) / "config.json"
    if not path.is_file():
        raise _error(
            group, model_name, "has no config.json", "point it at a Hugging Face checkpoint directory"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _error(group, model_name, f"has a config.json that is not valid JSON ({error})", "") from error
    if not isinstance(content, dict):
        raise _error(group, model_name, "has a config.json that is not a JSON object", "")
    _check_form(group, model_name, content)
    model_type = content.get("model_type")
    if "vision_config" in content:
        _check_vision_tower(group, model_name, str(model_type))
        content = _of_language_model(content)
    family = family_of(model_type)
    content = _with_usual_names({**family.defaults, **content} if family else content)
    _check_numbers(group, model_name, content, family)
    refusal = None if backend is None else BACKEND_KINDS.load(backend).refusal
    if refusal is not None and (refused := refusal(group, content)) is not None:
        raise _error(group, model_name, *refused)
    required = _REQUIRED + (family.sizes if family else ())
    bad = [name for name in required if not _is_size(content.get(name))]
    if bad:
        raise _error(
            group, model_name, f"has a config.json without a positive integer for {', '.join(bad)}", ""
        )
    return _model_info(content, None if family else count_stored_scalars(Path(model_name)))


def _check_form(group: str, model_name: str, content: Mapping[str, Any]) -> None:
    """Raise ConfigError for a config.json without the model's type, or with a value in place of entries."""
    if not isinstance(content.get("model_type"), str):
        remedy = "name the type, as transformers' save_pretrained does"
        raise _error(group, model_name, "has a config.json without model_type", remedy)
    for key in ("rope_parameters", "rope_scaling", "quantization_config"):
        if not isinstance(content.get(key) or {}, dict):
            rule = f"has {key}={json.dumps(content[key])} in config.json, which must be an object or null"
            raise _error(group, model_name, rule, "")


def _check_numbers(group: str, model_name: str, content: Mapping[str, Any], family: Family | None) -> None:
    """Raise ConfigError for something other than a number where one has to be, also in rope settings."""
    of_rope = rope_settings(content)
    parts = (content, of_rope, *(part for part in of_rope.values() if isinstance(part, dict)))
    for key in _NUMBERS + (family.numbers if family else ()):
        for value in (part.get(key) for part in parts):
            if value is not None and not _is_number(value):
                rule = f"has {key}={json.dumps(value)} in config.json, which must be a number >= 0 or null"
                raise _error(group, model_name, rule, "")


def _check_vision_tower(group: str, model_name: str, model_type: str) -> None:
    """Raise ConfigError unless models of this type, which have a vision tower, are supported."""
    if model_type not in IMAGE_TEXT_MODEL_TYPES:
        rule = f"has a vision tower (it is of type {model_type!r}) that is not supported"
        supported = f"use one of type {' or '.join(IMAGE_TEXT_MODEL_TYPES)}, or a model of text alone"
        raise _error(group, model_name, rule, supported)


def _of_language_model(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` of an image-text model with the sizes of its language model at the top level.

    Earlier versions of transformers wrote them there already.
    """
    of_text = dict(content.get("text_config") or {})
    of_text.pop("model_type", None)
    return {**of_text, **content}


def count_stored_scalars(path: Path) -> int:
    """Count the scalars in a directory's safetensors files, from their headers alone."""
    return sum(math.prod(shape) for shape in stored_shapes(path).values())


def stored_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a directory's safetensors files, by name, from the headers alone.

    A file whose header is not valid JSON contributes none.
    """
    shapes: dict[str, list[int]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            try:
                header = json.loads(stream.read(size))
            except ValueError:
                continue
        header.pop("__metadata__", None)
        shapes |= {name: tensor["shape"] for name, tensor in header.items()}
    return shapes


def _with_usual_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` with each size under the name that Llama, Qwen and most other models use."""
    named = dict(content)
    for name, others in _OTHER_NAMES.items():
        values = [content[key] for key in (name, *others) if content.get(key) is not None]
        if values:
            named[name] = values[0]
    if named.get("intermediate_size") is None and _is_size(named.get("hidden_size")):
        named["intermediate_size"] = _USUAL_FFN_FACTOR * named["hidden_size"]
    return named


def _of_mixture(content: Mapping[str, Any], mixture: Mixture) -> dict[str, Any]:
    """Return what only some mixtures have: dense layers, shared experts, a factor of the weights, groups."""
    num_dense = content.get(mixture.num_dense_layers) or 0
    return {
        "num_dense_layers": num_dense,
        "dense_ffn_size": content["intermediate_size"] if num_dense else 0,
        "shared_ffn_size": (content.get(mixture.num_shared) or 0) * content[mixture.expert_size],
        "routed_scale": content.get(mixture.scale),
        "num_expert_groups": content.get(mixture.num_groups) or 1,
        "num_chosen_groups": content.get(mixture.num_chosen_groups) or 1,
    }


def _model_info(content: Mapping[str, Any], num_stored_scalars: int | None) -> ModelInfo:
    theta, scaling_factor = rope(content) or (USUAL_ROPE_THETA, None)
    epsilon = content.get("rms_norm_eps")
    num_heads = content["num_attention_heads"]
    family = family_of(content["model_type"])
    mixture = family.mixture if family else None
    full_layers = _full_layers(content, family) if family else ()
    has_window = family is not None and family.has_window and len(full_layers) < content["num_hidden_layers"]
    latent = LatentSizes.of(content) if family and Part.mla in family.parts else None
    return ModelInfo(
        model_type=content["model_type"],
        hidden_size=content["hidden_size"],
        intermediate_size=content[mixture.expert_size if mixture else "intermediate_size"],
        num_experts=content[mixture.num_experts] if mixture else None,
        num_experts_per_token=content[mixture.num_chosen] if mixture else 0,
        **(_of_mixture(content, mixture) if mixture else {}),
        normalises_chosen_experts=bool(
            mixture and (not mixture.normalises or content.get(mixture.normalises, False))
        ),
        num_layers=content["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_heads if latent else content.get("num_key_value_heads") or num_heads,
        head_size=latent.head if latent else content.get("head_dim") or content["hidden_size"] // num_heads,
        vocab_size=content["vocab_size"],
        max_position_embeddings=content["max_position_embeddings"],
        has_tied_embeddings=bool(content.get("tie_word_embeddings", False)),
        norm_epsilon=_USUAL_NORM_EPSILON if epsilon is None else epsilon,
        rope_theta=theta,
        rope_scaling_factor=scaling_factor,
        num_stored_scalars=num_stored_scalars,
        window=content.get("sliding_window") if has_window else None,
        full_layers=full_layers,
        query_scale=query_scale(content, family.query_scale_key, latent) if family else None,
        ropes=ropes_of(content, family.parts) if family else (),
        latent=latent,
        quantization=quantization(content),
        leaves_out_qk_norm=bool(family and family.qk_norm_key and not content.get(family.qk_norm_key)),
        rotated_share=rotated_share(content) if family and family.has_partial_rotation else 1.0,
        placeholder_ids=placeholder_ids(content) if content["model_type"] in IMAGE_TEXT_MODEL_TYPES else (),
    )


def _full_layers(content: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """Return the layers without a window, of a family in which some layers have one.

    Where config.json has no list of the layers' types, it says that every so many-th has no window.
    """
    if Part.mixed_windows not in family.parts:
        return ()
    pattern = content["sliding_window_pattern"]
    types = content.get("layer_types") or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(content["num_hidden_layers"])
    ]
    return tuple(layer for layer, kind in enumerate(types) if kind == "full_attention")


def placeholder_ids(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that config.json gives for the tokens that stand for images and videos."""
    return tuple(content[name] for name in _PLACEHOLDERS if content.get(name) is not None)


def has_vision_tower(model_name: str) -> bool:
    """Return whether the checkpoint ``model_name`` reads images; False without a readable config.json."""
    return config_of(model_name).get("model_type") in IMAGE_TEXT_MODEL_TYPES


def config_of(model_name: str) -> dict[str, Any]:
    """Return the entries of a checkpoint's config.json; none without a readable one."""
    try:
        content = json.loads((Path(model_name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _error(group: str, model_name: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError.of(f"{group}.model_name={model_name}", rule, remedy)


# transformers' name for the output layer of a model that scores whole sequences with one number.
VALUE_HEAD = "score.weight"
