"""Records in a vLLM worker what the model's modules compute. The functions run in the worker's process.

vLLM's norms and rotary embeddings write over their inputs, so everything is copied as it comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nemo_like.generation.sampling import SamplingSettings
from nemo_like.mismatch.points import AFTER_LAYERS, EMBEDDING, FINAL_NORM, usual_leaf
from nemo_like.mismatch.sampled_distribution import log_distribution

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_ATTRIBUTE = "_mismatch_recorder"
_ROWS_AT_ONCE = 64  # of logits
_NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    """What one worker's modules computed for T tokens: [T, width of this worker] by point."""

    points: dict[str, np.ndarray]
    dtype: str
    # [T], log-probs of each next token by the sampling settings that are applied, "" for none; empty where
    # another worker has the logits.
    logprobs: dict[str, np.ndarray]
    logit_sizes: np.ndarray | None  # [T], the largest |logit|


def begin_trace(worker: Any) -> None:
    """Begin to record in this worker."""
    setattr(worker, _ATTRIBUTE, _Recorder(worker.get_model()))


def end_trace(worker: Any, token_ids: list[int], sampling: SamplingSettings) -> WorkerTrace:
    """Stop recording; return what was recorded, with log-probs of the ``token_ids`` that follow the first."""
    recorder: _Recorder = vars(worker).pop(_ATTRIBUTE)
    recorder.stop()
    points = {name: torch.cat(parts) for name, parts in recorder.parts.items()}
    hidden = points[FINAL_NORM]
    dtype = worker.vllm_config.model_config.dtype
    logprobs, sizes = _logprobs(worker, hidden.to(worker.device, dtype), token_ids[1:], sampling)
    arrays = {name: tensor.numpy() for name, tensor in points.items()}
    return WorkerTrace(arrays, str(dtype).removeprefix("torch."), logprobs, sizes)


def _logprobs(
    worker: Any, hidden: Tensor, next_ids: list[int], sampling: SamplingSettings
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    model, variants = worker.get_model(), variants_of(sampling)
    found: dict[str, list[Tensor]] = {name: [] for name in variants}
    sizes = []
    for start in range(0, len(hidden), _ROWS_AT_ONCE):
        logits = model.compute_logits(hidden[start : start + _ROWS_AT_ONCE])
        if logits is None:
            return {}, None
        ids = torch.tensor(next_ids[start : start + len(logits)], device=logits.device)
        sizes.append(logits.float().abs().amax(-1))
        for name, settings in variants.items():
            found[name].append(log_distribution(logits, settings).gather(1, ids[:, None])[:, 0])
    arrays = {name: torch.cat(parts).cpu().numpy() for name, parts in found.items()}
    return arrays, torch.cat(sizes).cpu().numpy()


def variants_of(sampling: SamplingSettings) -> dict[str, SamplingSettings]:
    """Return the settings that change nothing under "", then with one of the given settings under its name,
    for each that changes anything, and with all of these."""
    plain = replace(sampling, **_NEUTRAL)
    used = [name for name, neutral in _NEUTRAL.items() if getattr(sampling, name) != neutral]
    single = {name: replace(plain, **{name: getattr(sampling, name)}) for name in used}
    return {"": plain, **single, **({", ".join(used): sampling} if len(used) > 1 else {})}


class _Recorder:
    """Hooks on the modules of a model, and what they recorded: parts of rows by point."""

    def __init__(self, model: nn.Module) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self._hooks: list[Any] = []
        # Modules of transformers, with which vLLM computes some models, have a batch of one sample.
        self._has_batch = type(model).__name__.startswith("Transformers")
        for name, module in model.named_modules():
            match = _LAYER.fullmatch(name)
            if match is None:
                prefix, watching = "", _OF_MODEL.get(name.rpartition(".")[2])
            else:
                prefix, watching = f"layers.{match[1]}", _OF_LAYER.get(usual_leaf(match[2]))
            if watching is not None:
                self._watch(module, prefix, watching)

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def keep(self, name: str, tensor: Tensor) -> None:
        """Copy the values at a point; rows of a later call follow those of earlier ones."""
        rows = tensor.squeeze(0) if self._has_batch and tensor.dim() > 2 else tensor
        copied = rows.detach().reshape(len(rows), -1).to("cpu", torch.float32, copy=True)
        self.parts.setdefault(name, []).append(copied)

    def _watch(self, module: nn.Module, prefix: str, watching: _Watching) -> None:
        if watching.before is not None:
            before = watching.before

            def see_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                before(self, prefix, module, [*args, *kwargs.values()])

            self._hooks.append(module.register_forward_pre_hook(see_inputs, with_kwargs=True))
        if watching.after is not None:
            after = watching.after

            def see_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                after(self, prefix, module, output)

            self._hooks.append(module.register_forward_hook(see_outputs))


_See = Callable[[_Recorder, str, Any, Any], None]


@dataclass(frozen=True, slots=True)
class _Watching:
    """What is recorded of a module: from its inputs before it computes, from its output after it did."""

    before: _See | None = None
    after: _See | None = None


def _first(output: Any) -> Tensor:
    """Return the values of a module that may return something beside them."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _output(leaf: str) -> _Watching:
    return _Watching(
        after=lambda recorder, prefix, _, output: recorder.keep(_join(prefix, leaf), _first(output))
    )


def _norm(leaf: str, stream: str) -> _Watching:
    """A norm that may add the residual stream to its input first, and returns both then."""

    def before(recorder: _Recorder, prefix: str, module: Any, inputs: list[Any]) -> None:
        if len(inputs) == 1 or inputs[1] is None:
            recorder.keep(_join(prefix, stream), inputs[0])

    def after(recorder: _Recorder, prefix: str, module: Any, output: Any) -> None:
        recorder.keep(_join(prefix, leaf), _first(output))
        if isinstance(output, tuple):
            recorder.keep(_join(prefix, stream), output[1])

    return _Watching(before, after)


def _qkv(recorder: _Recorder, prefix: str, module: Any, output: Any) -> None:
    layer = getattr(module, "base_layer", module)  # of a layer with adapters
    sizes = [layer.num_heads * layer.head_size, *[layer.num_kv_heads * layer.head_size] * 2]
    for name, part in zip("qkv", _first(output).split(sizes, dim=-1), strict=True):
        recorder.keep(f"{prefix}.self_attn.{name}_proj", part)


def _gate_up(recorder: _Recorder, prefix: str, module: Any, output: Any) -> None:
    for name, part in zip(("gate", "up"), _first(output).chunk(2, dim=-1), strict=True):
        recorder.keep(f"{prefix}.mlp.{name}_proj", part)


def _rotated(recorder: _Recorder, prefix: str, module: Any, inputs: list[Any]) -> None:
    for name, part in zip("qk", inputs, strict=False):
        recorder.keep(f"{prefix}.self_attn.rotated_{name}", part)


def _activation(recorder: _Recorder, prefix: str, module: Any, inputs: list[Any]) -> None:
    recorder.keep(f"{prefix}.mlp.activation", inputs[0])


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf


_NORMS_OF_ATTENTION = ("q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm")
_OF_LAYER = {
    "input_layernorm": _norm("input_layernorm", "input"),
    "self_attn.qkv_proj": _Watching(after=_qkv),
    **{f"self_attn.{name}": _output(f"self_attn.{name}") for name in _NORMS_OF_ATTENTION},
    "self_attn.attn": _Watching(_rotated, _output("self_attn.attention").after),
    "self_attn.o_proj": _output("self_attn.o_proj"),
    "post_attention_layernorm": _norm("post_attention_layernorm", "after_attention"),
    "pre_feedforward_layernorm": _output("pre_feedforward_layernorm"),
    "post_feedforward_layernorm": _output("post_feedforward_layernorm"),
    "mlp.gate": _output("mlp.gate"),
    "mlp.gate_up_proj": _Watching(after=_gate_up),
    "mlp.down_proj": _Watching(_activation, _output("mlp.down_proj").after),
    "mlp.experts": _output("mlp.experts"),
}
_OF_MODEL = {
    EMBEDDING: _output(EMBEDDING),
    "embedding": _output(EMBEDDING),  # of gpt-oss
    "norm": _norm(FINAL_NORM, AFTER_LAYERS),
}
