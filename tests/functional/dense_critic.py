"""PPO with a critic on one process, in float64, one sample at a time, written the slow, obvious way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.core_model_loading import revert_weight_conversion

from nemo_like.algorithms.options import LossConfig, SurrogateLossConfig
from nemo_like.batch.columns import PARENT_GAPS
from nemo_like.batch.forest import ROOT, Forest, TokenRun
from nemo_like.policy.options import OptimizerKind, PolicyConfig, ValueConfig
from tests.functional.dense_reference import ADAPTER, add_adapters, with_all_rows
from tests.functional.torch_muon import TorchMuon
from tests.unit.batch.forests import forest_from


def in_float64(loader: Any, path: str) -> Any:
    """The model with all it computes in float64: transformers' norms would round to float32, and its grouped
    product of experts has no float64."""
    model = loader.from_pretrained(Path(path), dtype=torch.float64, experts_implementation="eager")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(
                torch.nn.functional.rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )
    return with_all_rows(model)


def per_sample(batch: dict[str, Any], column: str) -> list[np.ndarray]:
    return np.split(batch["columns"][column], np.cumsum(batch["lengths"])[:-1])


@dataclass(frozen=True, slots=True)
class Estimates:
    """Packed [sum of lengths] float64, as the columns hold them."""

    values: np.ndarray
    returns: np.ndarray
    advantages: np.ndarray


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """``values``, ``is_clipped`` and ``errors`` are of the trained response tokens, before the update."""

    loss: float
    grad_norm: float
    values: Tensor
    is_clipped: Tensor
    errors: Tensor


def forest_of(batch: dict[str, Any], row: int) -> Forest:
    """The forest of a sample's tokens."""
    if PARENT_GAPS.name not in batch["columns"]:
        return Forest((TokenRun(batch["lengths"][row]),))
    gaps = per_sample(batch, PARENT_GAPS.name)[row].tolist()
    return forest_from([token - 1 - gap for token, gap in enumerate(gaps)])


def path_by_path(outputs: Callable[[Tensor], Tensor], ids: np.ndarray, forest: Forest) -> Tensor:
    """The ``outputs`` [L, ...] of paths [L], run by run: of each token that on its path, [T, ...]."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    of_runs = []
    for run, path in zip(forest.runs, forest.paths(), strict=True):
        places = [place for piece in path for place in range(*piece)]
        of_runs.append(outputs(tokens[places])[-run.length :])
    return torch.cat(of_runs)


class DenseCritic:
    """A transformers model with one label, which the values of tokens come from."""

    def __init__(self, cfg: ValueConfig) -> None:
        self.cfg = cfg
        self.model = in_float64(AutoModelForSequenceClassification, cfg.model_name)
        self._adapted = {}
        if cfg.lora.enabled:
            self._adapted = add_adapters(self.model, cfg.lora)
            self.model.double()
            self.model.score.requires_grad_(True)
        adam = cfg.optimizer
        self.optimizer: Any = torch.optim.AdamW(
            [
                {"params": [p for p in self.model.parameters() if p.dim() > 1]},
                {"params": [p for p in self.model.parameters() if p.dim() == 1], "weight_decay": 0.0},
            ],
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            eps=adam.adam_eps,
            weight_decay=adam.weight_decay,
        )
        if adam.kind is OptimizerKind.muon:
            self.optimizer = TorchMuon(self.model, self.optimizer, adam)

    def weights(self) -> dict[str, Tensor]:
        """By name, with the adapters merged."""
        weights = {
            name.replace(".base_layer", ""): weight.detach().clone()
            for name, weight in self.model.named_parameters()
            if ".lora_" not in name
        }
        for name, layer in self._adapted.items():
            weights[f"{name}.weight"] += layer.get_delta_weight(ADAPTER).detach()
        return as_checkpoint(self.model, weights)

    def gradient(self) -> dict[str, Tensor]:
        """That of the latest update, of what trained; of an adapter's layer that of B times A, the only one
        that a first update has."""
        gradient = {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None and ".lora_" not in name
        }
        for name, layer in self._adapted.items():
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            gradient[f"{name}.weight"] = layer.scaling[ADAPTER] * (up.grad @ down.detach())
        return as_checkpoint(self.model, gradient)

    def states(self, ids: np.ndarray, forest: Forest) -> Tensor:
        """The value of each token's state, the tokens of its path, [T]."""

        def values(path: Tensor) -> Tensor:
            hidden = self.model.model(path[None]).last_hidden_state[0]
            return (hidden @ self.model.score.weight.T)[:, 0]

        return path_by_path(values, ids, forest)

    @torch.no_grad()
    def estimates(self, batch: dict[str, Any], loss: LossConfig) -> Estimates:
        """Values, returns and advantages of all samples."""
        masks, ids = per_sample(batch, "response_mask"), per_sample(batch, "input_ids")
        prev, reference = per_sample(batch, "prev_logprobs"), per_sample(batch, "reference_logprobs")
        columns: list[list[np.ndarray]] = [[], [], []]
        for row, mask in enumerate(masks):
            forest = forest_of(batch, row)
            states, parents = self.states(ids[row], forest).tolist(), forest.parents()
            of_sample = np.zeros((3, len(mask)))
            is_cut_off = self.cfg.bootstrap_truncated and batch["tags"]["is_truncated"][row]
            for (length, _), start in zip(forest.runs, forest.starts, strict=True):
                end = start + length
                places = [place for place in range(start, end) if mask[place]]
                following, advantage = (states[end - 1] if is_cut_off else 0.0), 0.0
                for place in reversed(places):
                    gap = float(reference[row][place]) - float(prev[row][place])
                    reward = -loss.reference_policy_kl_penalty * (np.exp(gap) - 1 - gap)
                    if place == places[-1]:
                        reward += batch["tags"]["shaped_reward"][row]
                    value = states[parents[place]]
                    delta = reward + self.cfg.gae_gamma * following - value
                    advantage = delta + self.cfg.gae_gamma * self.cfg.gae_lambda * advantage
                    of_sample[:, place] = value, advantage + value, advantage
                    following = value
            for column, values in zip(columns, of_sample, strict=True):
                column.append(values)
        return Estimates(*(np.concatenate(column) for column in columns))

    def update(
        self,
        batch: dict[str, Any],
        rows: Sequence[int],
        old: np.ndarray,
        returns: np.ndarray,
        learning_rate: float,
    ) -> CriticUpdate:
        """One optimizer update on these samples, whose packed ``old`` values and ``returns`` are given."""
        bounds = np.cumsum(batch["lengths"])[:-1]
        old_of, returns_of = np.split(old, bounds), np.split(returns, bounds)
        masks, ids = per_sample(batch, "response_mask"), per_sample(batch, "input_ids")
        values, olds, targets = [], [], []
        for row in rows:
            if batch["tags"]["sample_mask"][row]:
                places = np.flatnonzero(masks[row])
                forest = forest_of(batch, row)
                values.append(self.states(ids[row], forest)[np.array(forest.parents())[places]])
                olds.append(torch.from_numpy(old_of[row][places]).double())
                targets.append(torch.from_numpy(returns_of[row][places]).double())
        value, before, target = torch.cat(values), torch.cat(olds), torch.cat(targets)
        losses = (value - target) ** 2 / 2
        is_clipped = torch.zeros(len(value))
        if (clip := self.cfg.clip_range) is not None:
            kept = torch.minimum(torch.maximum(value, before - clip), before + clip)
            clipped = (kept - target) ** 2 / 2
            is_clipped = (clipped > losses).double()
            losses = torch.where(clipped > losses, clipped, losses)
        loss = losses.mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return CriticUpdate(
            float(loss.detach()),
            float(norm),
            value.detach(),
            is_clipped,
            (value - target).abs().detach(),
        )


@torch.no_grad()
def dense_logprobs(cfg: PolicyConfig, batch: dict[str, Any], temperature: float) -> np.ndarray:
    """Of all tokens, packed [sum of lengths]; 0 at each sample's first."""
    model = in_float64(AutoModelForCausalLM, cfg.model_name)
    found = []
    for row, ids in enumerate(per_sample(batch, "input_ids")):
        forest = forest_of(batch, row)
        logits = path_by_path(lambda path: model(path[None]).logits[0], ids, forest)
        logprobs = (logits / temperature).log_softmax(-1)[forest.parents()]
        of_tokens = logprobs.gather(1, torch.from_numpy(ids.astype(np.int64))[:, None])[:, 0].numpy()
        found.append(np.where(np.array(forest.parents()) == ROOT, 0, of_tokens))
    return np.concatenate(found)


def dense_policy_gradient(
    cfg: PolicyConfig, loss: SurrogateLossConfig, batch: dict[str, Any], temperature: float
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of one update on all samples, whose tokens have advantages of their own."""
    model = in_float64(AutoModelForCausalLM, cfg.model_name)
    names = ("input_ids", "response_mask", "prev_logprobs", "token_advantages")
    losses = []
    for row, (ids, mask, prev, own) in enumerate(
        zip(*(per_sample(batch, name) for name in names), strict=True)
    ):
        if not batch["tags"]["sample_mask"][row]:
            continue
        places = np.flatnonzero(mask)
        tokens, forest = torch.from_numpy(ids.astype(np.int64)), forest_of(batch, row)
        logits = path_by_path(lambda path: model(path[None]).logits[0], ids, forest)
        logprobs = (logits / temperature).log_softmax(-1)[np.array(forest.parents())[places]]
        ratio = (logprobs.gather(1, tokens[places, None])[:, 0] - torch.from_numpy(prev[places])).exp()
        scale, shift = (batch["tags"][name][row] for name in ("token_scale", "advantage"))
        advantages = shift + scale * torch.from_numpy(own[places]).double()
        clipped = ratio.clamp(1 - loss.ratio_clip_min, 1 + loss.ratio_clip_max)
        of_tokens = torch.maximum(-advantages * ratio, -advantages * clipped)
        if loss.ratio_clip_c is not None:
            limit = -advantages * loss.ratio_clip_c
            of_tokens = torch.where(advantages < 0, torch.minimum(of_tokens, limit), of_tokens)
        losses.append(of_tokens)
    total = torch.cat(losses).mean()
    total.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(total.detach()), as_checkpoint(model, gradient)


def as_checkpoint(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of parameters by the names of checkpoints, which have each expert by itself."""
    return dict(revert_weight_conversion(model, tensors))
