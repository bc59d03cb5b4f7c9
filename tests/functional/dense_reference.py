"""The same training by a dense Hugging Face model and torch.optim, written the slow, obvious way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLora
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.options import KLType, SurrogateLossConfig
from nemo_like.policy.backends.adapters import initial_value
from nemo_like.policy.options import LoraConfig, OptimizerKind, PolicyConfig
from tests.functional.torch_muon import TorchMuon

ADAPTER = "default"


@dataclass(frozen=True, slots=True)
class DenseUpdate:
    """``ratio``, ``clipped_ratio``, ``held_low`` and ``held_high`` (1 where the clip leaves no gradient),
    ``kl`` and ``entropy`` are of the trained response tokens. ``choices`` is what ``DenseReference.choices``
    counted before the update, of a mixture of experts."""

    loss: float
    grad_norm: float
    num_tokens: float
    ratio: Tensor
    clipped_ratio: Tensor
    held_low: Tensor
    held_high: Tensor
    kl: Tensor
    entropy: Tensor
    choices: Tensor | None = None


class DenseReference:
    """One process, one sample at a time, no padding."""

    loader: Any = AutoModelForCausalLM

    def __init__(self, cfg: PolicyConfig, loss: SurrogateLossConfig, temperature: float) -> None:
        self.cfg, self.loss, self.temperature = cfg, loss, temperature
        self.model = with_all_rows(self.loader.from_pretrained(Path(cfg.model_name), dtype=torch.float32))
        if cfg.freeze_vision_tower:
            self.model.model.visual.requires_grad_(False)
        if cfg.megatron_cfg.freeze_moe_router:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(not name.endswith("mlp.gate.weight"))
        self._adapted: dict[str, Any] = add_adapters(self.model, cfg.lora) if cfg.lora.enabled else {}
        named = dict(self.model.named_parameters())  # gpt-oss has biases of all experts in one
        decayed = [one for name, one in named.items() if one.dim() > 1 and not name.endswith("_bias")]
        others = [one for name, one in named.items() if one.dim() == 1 or name.endswith("_bias")]
        adam = cfg.optimizer
        self.optimizer: Any = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": adam.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            eps=adam.adam_eps,
        )
        if adam.kind is OptimizerKind.muon:
            self.optimizer = TorchMuon(self.model, self.optimizer, adam)

    def weights(self) -> dict[str, Tensor]:
        """By name, with the adapters merged."""
        merged = {
            f"{name.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', 'weight')}": (
                layer.get_delta_weight(ADAPTER)
            )
            for name, layer in self._adapted.items()
        }
        plain = {
            name.replace(".base_layer", ""): weight
            for name, weight in self.model.state_dict().items()
            if ".lora_" not in name
        }
        return {
            name: weight + merged[name].detach() if name in merged else weight
            for name, weight in plain.items()
        }

    def adapters(self) -> dict[str, Tensor]:
        """By the names that peft saves them under."""
        return {
            f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": value
            for name, value in self.model.state_dict().items()
            if ".lora_" in name
        }

    def logprobs(self, batch: dict[str, Any]) -> list[Tensor]:
        """Per sample [T] with 0 where response_mask is 0; differentiable."""
        return [logprobs for logprobs, _ in self._scores(batch, range(len(batch["lengths"])))]

    def entropies(self, batch: dict[str, Any]) -> list[Tensor]:
        """Those of the distributions that ``logprobs`` are of, likewise."""
        return [entropy for _, entropy in self._scores(batch, range(len(batch["lengths"])))]

    def reference_logprobs(self, batch: dict[str, Any]) -> list[Tensor]:
        """Those of the reference policy, before the first update."""
        return [logprobs.detach() for logprobs in self.logprobs(batch)]

    def logits(self, batch: dict[str, Any], row: int, ids: Tensor) -> Tensor:
        """Of sample ``row``, whose tokens are ``ids`` [1, T]: [1, T, vocabulary]."""
        result: Tensor = self.model(ids).logits
        return result

    def _scores(self, batch: dict[str, Any], rows: Iterable[int]) -> list[tuple[Tensor, Tensor]]:
        """Of each row log-probs and entropy of the distributions that they are of, [T] both."""
        results = []
        all_ids, masks = (_per_sample(batch, name) for name in ("input_ids", "response_mask"))
        for row in rows:
            ids, mask = all_ids[row], masks[row]
            logits = self.logits(batch, row, ids[None].long())[0, :-1].float() / self.temperature
            logprobs = torch.log_softmax(logits, -1)
            scored = logprobs.gather(1, ids[1:, None].long())[:, 0]
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            results.append(
                (torch.cat([torch.zeros(1), scored]) * mask, torch.cat([torch.zeros(1), entropy]) * mask)
            )
        return results

    @property
    def routers(self) -> list[Any]:
        """Those of a mixture, which return scores, and the weights and numbers of the chosen experts."""
        return [one for one in self.model.modules() if type(one).__name__.lower().endswith("topkrouter")]

    @torch.no_grad()
    def choices(self, batch: dict[str, Any], rows: Iterable[int]) -> Tensor:
        """[layers with experts, experts + 1]: how many response tokens of these samples are predicted by each
        expert, and the sum over tokens of the weight of the expert with most."""
        outputs: list[tuple[Tensor, Tensor, Tensor]] = []
        hooks = [
            router.register_forward_hook(lambda _, args, output: outputs.append(output))
            for router in self.routers
        ]
        sums = []
        all_ids, masks = (_per_sample(batch, name) for name in ("input_ids", "response_mask"))
        for row in rows:
            outputs.clear()
            self.model(all_ids[row][None].long())
            scored = masks[row][1:].nonzero()[:, 0]
            of_layers = []
            for scores, weights, experts in outputs:
                counts = torch.bincount(experts[scored].flatten(), minlength=scores.shape[-1])
                of_layers.append(torch.cat([counts, weights[scored].amax(-1).sum()[None]]))
            sums.append(torch.stack(of_layers).double())
        for hook in hooks:
            hook.remove()
        return torch.stack(sums).sum(dim=0)

    def update(
        self,
        batch: dict[str, Any],
        rows: list[int],
        prev: list[Tensor],
        reference: list[Tensor] | None,
        learning_rate: float,
    ) -> DenseUpdate:
        """One optimizer update on these samples."""
        masks = _per_sample(batch, "response_mask")
        advantages, trains = batch["tags"]["advantage"], batch["tags"]["sample_mask"]
        trained = [row for row in rows if trains[row]]
        scores = self._scores(batch, trained)
        num_tokens = sum(float(masks[row].sum()) for row in trained)
        num_samples = len(trained)
        total, details = torch.zeros(()), []
        for row, (logprobs, entropy) in zip(trained, scores, strict=True):
            log_ratio = logprobs - prev[row]
            if self.loss.kind == "gspo":
                log_ratio = (log_ratio.sum() / masks[row].sum()).expand(len(log_ratio))
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - self.loss.ratio_clip_min, 1 + self.loss.ratio_clip_max)
            token_loss = torch.maximum(-advantages[row] * ratio, -advantages[row] * clipped)
            if advantages[row] < 0 and self.loss.ratio_clip_c is not None:
                token_loss = token_loss.clamp(max=-advantages[row] * self.loss.ratio_clip_c)
            (slope,) = torch.autograd.grad(token_loss.sum(), ratio, retain_graph=True)
            is_held = (slope == 0) & (advantages[row] != 0)
            low, high = (is_held & (ratio < 1)).float(), (is_held & (ratio > 1)).float()
            kl = torch.zeros_like(ratio)
            if reference is not None:
                gap = reference[row] - logprobs
                kl = dense_kl(gap, self.loss.reference_policy_kl_type) * (logprobs - logprobs.detach()).exp()
                kl = kl.clamp(-10, 10)  # after the factor, whose gradient it must cut as well
                token_loss = token_loss + self.loss.reference_policy_kl_penalty * kl
            token_loss = token_loss - (self.loss.entropy_coef or 0.0) * entropy
            share = num_tokens if self.loss.token_level_loss else float(masks[row].sum()) * num_samples
            total = total + (token_loss * masks[row]).sum() / share
            details.append(torch.stack((ratio, clipped, low, high, kl, entropy)).detach()[:, masks[row] > 0])
        choices = self.choices(batch, rows) if self.routers else None
        self.optimizer.zero_grad()
        total.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return DenseUpdate(
            float(total.detach()), float(grad_norm), num_tokens, *torch.cat(details, dim=1), choices
        )


def with_all_rows(model: Any) -> Any:
    """The model with embeddings of which every row has a gradient, also the padding token's."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return model


def add_adapters(model: Any, lora: LoraConfig) -> dict[str, Any]:
    """peft's own adapters with the project's first values; the layers that have one, by name."""
    all_linear = lora.target_modules == ["all-linear"]
    is_mixture = any(parameter.dim() == 3 for parameter in model.parameters())
    experts = {
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
        "w2": "down_proj",
    }
    if is_mixture:
        named = ["q_proj", "k_proj", "v_proj", "o_proj"] if all_linear else lora.target_modules
        targets: str | list[str] = [layer for layer in named if layer not in experts]
        parameters = {f"experts.{experts[layer]}" for layer in named if layer in experts}
    else:
        targets, parameters = "all-linear" if all_linear else lora.target_modules, set()
    config = PeftLora(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        target_parameters=sorted(parameters) or None,
        exclude_modules=["score"] if hasattr(model, "score") else None,  # a critic's output layer
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    with torch.no_grad():
        for name, layer in layers.items():
            for part in ("lora_A", "lora_B"):
                value = getattr(layer, part)[ADAPTER].weight
                value.copy_(initial_value(f"base_model.model.{name}.{part}.weight", value.shape))
    return layers


def dense_kl(gap: Tensor, kind: KLType) -> Tensor:
    """The estimate of KL(policy || reference) where reference - policy is ``gap``, before it is limited."""
    gap = gap.clamp(-20, 20)
    return {KLType.k1: -gap, KLType.k2: gap**2 / 2, KLType.k3: gap.exp() - 1 - gap}[kind]


def _per_sample(batch: dict[str, Any], column: str) -> list[Tensor]:
    return list(torch.from_numpy(batch["columns"][column]).split(batch["lengths"]))
