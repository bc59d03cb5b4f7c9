"""Writes golden batches, cases and what they must give, as JSON: python -m tests.conformance.generate

The files are the same on every machine but for the last digits of what floating point computes. No value of a
batch is next to a bound at which a loss jumps, so that float32 and float64 see it on the same side.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.conformance.reference import advantages, evaluate, table_scores

GOLDEN = Path(__file__).parent / "golden"
VOCABULARY = 5
NUM_SAMPLES = 8
ESTIMATORS = (
    "grpo",
    "grpo_not_normalized",
    "grpo_leave_one_out",
    "grpo_clipped",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
)
_PLAIN: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
}
_NONE: dict[str, Any] = {"constant": 7, "correction": None, "kl": None, "entropy": 0.0}
_LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo_dual_clip": {"loss": "ppo", "dual_clip": 3.0},
    "gspo": {},
    "gspo_token": {},
    "cispo": {},
    "reinforce": {},
    "sapo": {"tau_pos": 0.8, "tau_neg": 2.0},
    "on_policy": {},
    "engine_ratio": {},
}
_CORRECTIONS = {
    "none": None,
    "plain": {"type": "plain", "low": None, "high": None},
    "tis": {"type": "tis", "low": None, "high": 1.5},
    "icepop": {"type": "icepop", "low": 0.7, "high": 1.5},
    "seq_mask": {"type": "seq_mask", "low": 0.9, "high": 1.1},
}
_KINDS = {
    "ragged": "samples of one to nine tokens",
    "masked": "three samples do not train, with log-ratios of 50 nats",
    "turns": "conversations, in which other tokens stand between those that the policy generated",
    "groups": "groups of one, two and five samples",
    "zero_length": "two samples without a generated token, one of them in a group of its own",
    "uniform": "one group with equal rewards, so without advantages",
    "far": "log-ratios beyond every limit",
    "all": "all of this at once, but for equal rewards",
}
# A value this close to a bound could fall on either side of it in float32.
_NEAR = 2e-3


def cases() -> list[dict[str, Any]]:
    """Return every loss x mean x correction that nemo_like accepts, then the KL's estimators, the entropy,
    a weighed KL, and what changes the advantages or the share of some tokens."""
    found: list[dict[str, Any]] = []
    for name, changes in _LOSSES.items():
        for mean in ("token", "sample", "constant"):
            for correction, values in _CORRECTIONS.items():
                is_sequence = name.startswith("gspo")
                is_refused = (
                    (is_sequence and (mean == "token" or correction == "seq_mask"))
                    or (name == "engine_ratio" and correction != "none")
                )  # fmt: skip
                if not is_refused:
                    case = {"loss": name, **_PLAIN, **_NONE, **changes, "mean": mean, "correction": values}
                    found.append({"name": f"{name}/{mean}/{correction}", **case})
    added: dict[str, dict[str, Any]] = {
        "ppo/token/k1": {"kl": {"beta": 0.3, "kind": "k1"}},
        "ppo/token/k2": {"kl": {"beta": 0.3, "kind": "k2"}},
        "ppo/token/k3": {"kl": {"beta": 0.3, "kind": "k3"}},
        "ppo/sample/k3": {"kl": {"beta": 0.3, "kind": "k3"}, "mean": "sample"},
        "gspo/sample/k3": {"loss": "gspo", "kl": {"beta": 0.3, "kind": "k3"}, "mean": "sample"},
        "ppo/token/entropy": {"entropy": 0.2},
        "ppo/sample/entropy": {"entropy": 0.2, "mean": "sample"},
        "ppo/token/weighed_k3": {"kl": {"beta": 0.3, "kind": "k3", "weighed": True}},
        "ppo/token/off_policy_mask": {"off_policy_mask": 0.05},
        "gspo/sample/off_policy_mask": {"loss": "gspo", "off_policy_mask": 0.05, "mean": "sample"},
        "ppo/token/moving_entropy": {"entropy": 0.2, "is_moving": True},
        "ppo/token/kl_in_reward": {"kl": {"beta": 0.3, "kind": "k1", "in_reward": True}},
        "gspo/sample/kl_in_reward": {
            **{"loss": "gspo", "mean": "sample"},
            "kl": {"beta": 0.3, "kind": "k3", "in_reward": True},
        },
        "ppo/token/top_entropy": {"top_entropy": 0.4},
        "ppo/token/likelihood": {"likelihood": 0.3},
        "sapo/sample/likelihood": {"loss": "sapo", "likelihood": 0.3, "mean": "sample"},
        "ppo/token/penalties": {"penalties": [-2.0, -1.0]},
        "gspo/sample/penalties": {"loss": "gspo", "penalties": [-2.0, -1.0], "mean": "sample"},
    }
    for name, changes in added.items():
        found.append({"name": name, "loss": "ppo", **_PLAIN, **_NONE, "mean": "token", **changes})
    return found


def batch(kind: str, rng: random.Random) -> dict[str, Any]:
    """Return one random batch of a kind."""
    table = torch.tensor(
        [[round(rng.gauss(0, 1), 3) for _ in range(VOCABULARY)] for _ in range(VOCABULARY)],
        dtype=torch.float64,
    )
    has = {kind} if kind != "all" else {*_KINDS} - {"uniform"}
    groups = [0, 1, 1, 2, 2, 2, 2, 2] if "groups" in has else [0, 0, 0, 0, 1, 1, 1, 1]
    prompts = {group: [rng.randrange(VOCABULARY) for _ in range(2)] for group in groups}
    samples = []
    for place, group in enumerate(groups):
        is_empty = "zero_length" in has and place in (0, 6)
        length = 0 if is_empty else rng.randint(1, 9)
        generated = [1] * length
        if "turns" in has and length:
            generated = [1, *(rng.randint(0, 1) for _ in range(length - 1)), 1]
        samples.append(
            {
                "ids": [*prompts[group], *(rng.randrange(VOCABULARY) for _ in range(max(1, len(generated))))],
                "generated": [0, 0, *(generated or [0])],
                "group": group,
                "trains": not ("masked" in has and place in (1, 4, 7)),
                "reward": 1.0 if "uniform" in has and group == groups[-1] else round(rng.random(), 2),
            }
        )
    for sample, advantage in zip(samples, advantages(samples, "grpo"), strict=True):
        sample["advantage"] = round(advantage, 6)
    logprobs, _ = table_scores(table, samples)
    for sample, own in zip(samples, logprobs, strict=True):
        _add_columns(sample, own.tolist(), "far" in has, rng)
    return {
        "name": kind,
        "what": _KINDS[kind],
        "table": table.tolist(),
        "samples": samples,
        "splits": _SPLITS,
    }


# Micro-batches by rank, as positions of samples: what is summed over them must not depend on the split.
_SPLITS = {
    "whole": [[[0, 1, 2, 3, 4, 5, 6, 7]]],
    "one by one": [[[7], [6], [5], [4], [3], [2], [1], [0]]],
    "uneven": [[[0, 3, 6], [1], [2, 4, 5, 7]]],
    "even": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
    "two ranks": [[[0, 1], [2, 3]], [[4], [5, 6, 7]]],
    "four ranks": [[[1], [4]], [[7, 0]], [[2, 3]], [[5], [6]]],
}


def _add_columns(sample: dict[str, Any], own: list[float], is_far: bool, rng: random.Random) -> None:
    """Add the log-probs that the loss compares with: near the table's own, or also far from them."""

    def near(values: list[float], spread: float) -> list[float]:
        far = (lambda: rng.choice((0, 0, 0, -1, 1)) * rng.choice((2.5, 9, 23))) if is_far else lambda: 0.0
        return [round(value + rng.gauss(0, spread) + far(), 6) for value in values]

    sample["prev"] = near(own, 0.3)
    sample["generation"] = near(sample["prev"], 0.2)
    sample["reference"] = near(own, 1.0)
    if not sample["trains"]:
        sample["prev"] = [-50.0 for _ in own]


def is_clear(one: dict[str, Any]) -> bool:
    """Return whether nothing in the batch is next to a bound."""
    table = torch.tensor(one["table"], dtype=torch.float64)
    logprobs, _ = table_scores(table, one["samples"])
    return all(
        _is_away(own.tolist(), sample)
        for own, sample in zip(logprobs, one["samples"], strict=True)
        if sample["trains"] and len(own)
    )


def _is_away(own: list[float], sample: dict[str, Any]) -> bool:
    ratios = [a - b for a, b in zip(own, sample["prev"], strict=True)]
    to_engine = [a - b for a, b in zip(own, sample["generation"], strict=True)]
    weights = [a - b for a, b in zip(sample["prev"], sample["generation"], strict=True)]
    kl = [a - b for a, b in zip(sample["reference"], own, strict=True)]
    limited = [[min(max(x, -20), 20) for x in values] for values in (weights, to_engine)]
    means = [sum(values) / len(values) for values in limited]
    judged = [
        ([*ratios, sum(ratios) / len(ratios), *to_engine], (0.8, 1.28, 3.0)),
        ([*weights, *to_engine, *(sum(values) for values in limited)], (0.7, 1.5)),
        (means, (0.9, 1.1)),
    ]
    at_jumps = [
        abs(math.exp(min(x, 20)) - bound) for values, bounds in judged for x in values for bound in bounds
    ]
    limits = [abs(abs(x) - 20) for x in (*ratios, *weights, *to_engine, *kl, *(sum(v) for v in limited))]
    of_kl = [abs(abs(estimate) - 10) for x in kl for estimate in (x, x * x / 2, math.exp(min(x, 20)) - 1 - x)]
    return min(*at_jumps, *limits, *of_kl) > _NEAR


def batches() -> Iterator[dict[str, Any]]:
    """Yield a batch of each kind."""
    for number, kind in enumerate(_KINDS):
        seed = 100 * number
        while not is_clear(found := batch(kind, random.Random(seed))):
            seed += 1
        yield found


def expected(one: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Return what a case must give on a batch."""
    return evaluate(torch.tensor(one["table"], dtype=torch.float64), one["samples"], case)


def load(name: str) -> Any:
    """Return the content of a golden file."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def _rounded(values: Any) -> Any:
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return float(f"{values:.8g}") if values else 0


def main() -> None:
    """Write batches.json, cases.json, and expected.json: [batch][case] in the order of these."""
    made, listed = list(batches()), cases()
    results = {
        one["name"]: {
            "advantages": {name: _rounded(advantages(one["samples"], name)) for name in ESTIMATORS},
            "cases": {
                case["name"]: {key: _rounded(value) for key, value in expected(one, case).items()}
                for case in listed
            },
        }
        for one in made
    }
    GOLDEN.mkdir(exist_ok=True)
    for name, content in (("batches", made), ("cases", listed), ("expected", results)):
        text = json.dumps(content, separators=(",", ":"))
        for opening in ('{"name"', '"cases":{', '"advantages":{', '{"ids"'):
            text = text.replace(opening, f"\n{opening}")
        (GOLDEN / f"{name}.json").write_text(f"{text.strip()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
