"""Writes docs/reference/conformance.md from what the frameworks gave (``ask``) and what nemo_like's own code
gave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.conformance.conventions import CONVENTIONS, OF_ADVANTAGES
from tests.conformance.generate import load
from tests.conformance.own_results import TOLERANCE

_EXTREME = ("far", "all")
_OPENING = (
    "# Conformance\n\n"
    "What other frameworks' losses give on the same batches. To ask them anew needs a network.\n\n"
    "The same batch, loss, mean and correction must give the same loss, gradient and update, on however many "
    "ranks, and however micro-batches cut the batch. [`tests/conformance/`](../../tests/conformance) holds "
    "golden "
    "batches and what they must give, as plain JSON; a reference in float64 "
    "([`reference.py`](../../tests/conformance/reference.py)), with the formulas that the "
    "[tripwires](../explanation/tripwires.md) compare with, which share no code with what trains; and "
    "adapters that "
    "hand the same cases to functions of other frameworks. This page is written by\n\n"
    "```sh\npython scripts/conformance.py --against trl verl\n```\n\n"
    "which installs the frameworks from PyPI in an environment that is thrown away afterwards. The "
    "formulas are "
    "those of [losses.md](../explanation/losses.md).\n"
)


def report(own: Mapping[str, Any], frameworks: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    parts = [_OPENING, *_kit(own)]
    for framework in frameworks:
        parts += [*_summary(framework), *_reasons(framework), *_advantages(framework), *_rows(framework)]
    return "\n".join(parts).rstrip() + "\n"


def _kit(own: Mapping[str, Any]) -> Iterator[str]:
    batches, cases = load("batches"), load("cases")
    splits = ", ".join(f"*{name}*" for name in batches[0]["splits"])
    yield "## The kit\n"
    yield (
        f"{len(cases)} cases: nine losses, three means (over tokens, per sample, a constant per sample), "
        "four "
        "importance-sampling corrections and none, as far as they go together, then the KL's three "
        "estimators, "
        "the entropy and one with a target, a weighed KL, a KL in the reward, the off-policy mask, the "
        "tokens of highest entropy, the likelihood of right answers, and penalties of responses of a wrong "
        f"form. {len(batches)} batches of eight samples:\n"
    )
    yield "| batch | what is in it |\n|---|---|"
    for batch in batches:
        yield f"| {batch['name']} | {batch['what']} |"
    yield (
        f"\nEach batch is split over ranks and micro-batches in {len(batches[0]['splits'])} ways: "
        f"{splits}. What a "
        "rank back-propagates is summed over its micro-batches; gradients are then summed over ranks here, "
        "and "
        "averaged in TRL and verl, whose losses are scaled for that. Not in the kit is what needs a teacher "
        "or a critic, distillation and GAE, and what acts between steps, a reference that follows "
        "the policy.\n"
    )
    yield "## nemo_like\n"
    yield (
        f"{own['passed']} of {own['total']} combinations of case, batch and split are equal to the "
        "reference, in "
        "float32 and in the layouts padded, packed and shared by turns; the farthest is "
        f"{own['worst']:.1g} of the "
        f"gradient's norm away, and {TOLERANCE:g} are allowed. `tests/conformance` holds the same per "
        "token, and "
        "for updates and advantages; `tests/functional/test_conformance_backends.py` holds it for "
        "Megatron-core "
        "and FSDP on processes of their own.\n"
    )


def _summary(framework: Mapping[str, Any]) -> Iterator[str]:
    name, answers = framework["framework"], framework["answers"]
    asked = [answer for answer in answers if answer["status"] != "absent"]
    absent = {answer["case"] for answer in answers if answer["status"] == "absent"}
    raised = [answer for answer in asked if answer["status"] == "raised"]
    compared = [answer for answer in asked if answer["status"] != "raised"]
    usual = [answer for answer in compared if not _deviation(answer, ordinary=True)]
    unexplained = [answer for answer in asked if answer["status"] == "unexplained"]
    yield f"## {name} {framework['version']}\n"
    if framework["remark"]:
        yield f"{framework['remark']}\n"
    yield (
        f"Asked in {len(asked)} ways for {len({answer['case'] for answer in asked})} of the cases, in "
        "float64 on "
        f"torch {framework['torch']}, with the splits that it can make ({', '.join(framework['splits'])}). "
        f"{len(usual)} are equal to the reference on all batches but {' and '.join(_EXTREME)}, and "
        f"{sum(answer['status'] == 'equal' for answer in asked)} on all. "
        + (
            "Every deviation of the others is explained: the reference with the conventions below gives the "
            "framework's numbers, to 1e-7 of the gradient's norm."
            if not unexplained
            else f"**{len(unexplained)} deviate for reasons that are not known.**"
        )
        + "\n"
    )
    split = [answer for answer in compared if answer["splits"]]
    if split:
        worst = max(split, key=lambda answer: answer["splits"])
        yield (
            f"Normalisation: {len(compared) - len(split)} of {len(compared)} do not depend on how the batch "
            "is split. "
            f"Those that do: {_listed(split)}; the same batch gives gradients that are up to "
            f"{worst['splits']:.2g} "
            "of their norm apart.\n"
        )
    else:
        yield f"Normalisation: none of the {len(compared)} depends on how the batch is split.\n"
    if raised:
        yield f"{len(raised)} raised an error: {_listed(raised)}: `{raised[0]['raised']}`.\n"
    if absent:
        reasons = defaultdict(list)
        for answer in answers:
            if answer["status"] == "absent":
                reasons[answer["reason"]].append(answer)
        listed = "; ".join(f"{_listed(of)} ({reason})" for reason, of in reasons.items())
        yield f"Not there, {len(absent)} cases: {listed}.\n"


def _listed(answers: Sequence[Mapping[str, Any]]) -> str:
    """Return the cases, those with all means or corrections of a loss in one."""
    by_loss: dict[tuple[str, str], list[str]] = defaultdict(list)
    for answer in answers:
        loss, mean, rest = answer["case"].split("/")
        kind = answer.get("asked", "").split(",")[0] if "bnpo" in answer.get("asked", "") else ""
        by_loss[loss, kind].append(f"{mean}/{rest}")
    texts = []
    for (loss, kind), of in by_loss.items():
        names = list(dict.fromkeys(of))
        shown = f"{len(names)} of {loss}" if len(names) > 3 else f"{loss}: {', '.join(names)}"
        texts.append(f"{shown} with {kind}" if kind else shown)
    return "; ".join(texts)


def _deviation(answer: Mapping[str, Any], *, ordinary: bool) -> float:
    return float(max(one["deviation"] for one in _compared(answer, ordinary=ordinary)))


def _compared(answer: Mapping[str, Any], *, ordinary: bool) -> list[Mapping[str, Any]]:
    """Return what was found on all batches, or on the ordinary ones."""
    return [one for name, one in answer["batches"].items() if not (ordinary and name in _EXTREME)]


def _shown(answer: Mapping[str, Any], *, ordinary: bool) -> str:
    """Return the largest deviation as the tables have it."""
    if any(one["raised"] for one in _compared(answer, ordinary=ordinary)):
        return "raised"
    return _number(_deviation(answer, ordinary=ordinary))


def _reasons(framework: Mapping[str, Any]) -> Iterator[str]:
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for answer in framework["answers"]:
        for convention in {name for one in answer.get("batches", {}).values() for name in one["because"]}:
            usual = [
                one["deviation"]
                for name, one in answer["batches"].items()
                if convention in one["because"] and name not in _EXTREME
            ]
            every = [one["deviation"] for one in answer["batches"].values() if convention in one["because"]]
            seen[convention].append((max(usual, default=0.0), max(every)))
    yield (
        "| convention that differs | ways of asking in which it shows | largest deviation "
        "| in far and all too |"
    )
    yield "|---|---|---|---|"
    for name, text in CONVENTIONS.items():
        if name in seen:
            usual, every = (max(values) for values in zip(*seen[name], strict=True))
            yield f"| {text} | {len(seen[name])} | {_number(usual)} | {_number(every)} |"
    yield (
        "\nA deviation is the distance of the gradients relative to the reference's norm, or that of the "
        "losses "
        "where it is larger; several conventions may add to one.\n"
    )


def _advantages(framework: Mapping[str, Any]) -> Iterator[str]:
    if not framework["advantages"]:
        yield (
            "Advantages are computed inside of its rollout, where they cannot be called, and are not "
            "compared.\n"
        )
        return
    yield "| advantage estimator | largest difference | because |\n|---|---|---|"
    for one in framework["advantages"]:
        reasons = "; ".join(OF_ADVANTAGES[name] for name in one["because"])
        unknown = " and for reasons that are not known" if one["status"] == "unexplained" else ""
        yield f"| {one['estimator']} | {_number(one['deviation'])} | {reasons}{unknown} |"
    yield ""


def _number(value: float) -> str:
    return f"{value:.2g}" if value else "none"


def _rows(framework: Mapping[str, Any]) -> Iterator[str]:
    short = {name: number for number, name in enumerate(CONVENTIONS, 1)}
    used = sorted(
        {
            short[name]
            for answer in framework["answers"]
            for one in answer.get("batches", {}).values()
            for name in one["because"]
        }
    )
    names = {number: name for name, number in short.items()}
    yield "<details><summary>Case by case</summary>\n"
    yield "Conventions: " + "; ".join(f"{n} {CONVENTIONS[names[n]]}" for n in used) + ".\n"
    yield "| case | asked by | deviation | in far and all too | because |\n|---|---|---|---|---|"
    for answer in framework["answers"]:
        if answer["status"] == "absent":
            continue
        because = sorted({short[name] for one in answer["batches"].values() for name in one["because"]})
        usual, every = (_shown(answer, ordinary=value) for value in (True, False))
        reasons = ", ".join(map(str, because)) + (" and unknown" if answer["status"] == "unexplained" else "")
        yield f"| {answer['case']} | `{answer['asked']}` | {usual} | {every} | {reasons} |"
    yield "\n</details>\n"
