"""Find out whether an engine and a trainer compute a model alike, and in which module they do not
(docs/how_to/find_mismatch.md).

python scripts/find_mismatch.py --model models/Qwen3-8B
python scripts/find_mismatch.py --model models/Qwen3-8B --config configs/grpo_gpu.yaml --json found.json \\
    policy.precision=bfloat16
python scripts/find_mismatch.py RUN_DIR
python scripts/find_mismatch.py RUN_DIR --step 12 --sample 3

It starts one engine and one replica of the trainer. With --model it compares the log-probs of both with those
of transformers, as loaded and after the trainer has made a few updates and sent its weights to the engine; of
a run that is over it takes a sample, and the checkpoint whose weights sampled it. Then it compares both layer
by layer. The last line says in one sentence what differs. The exit code is 0 when nothing does but for
rounding, 1 when something does, 2 when nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.cluster.proxies import bypass_proxies
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.driver import exit_codes
from nemo_like.driver.stopping import ignore_first_interrupt, sigterm_as_interrupt
from nemo_like.models.remote_code import allowing_code
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.rules.rules import validate

if TYPE_CHECKING:
    from nemo_like.driver.parties import Parties
    from nemo_like.mismatch.certificate import Certificate
    from nemo_like.mismatch.past_run import PastSample
    from nemo_like.mismatch.search import EngineMismatch

_CONFIGS = Path(__file__).resolve().parents[1] / "configs"
# Large enough for Adam to move log-probs visibly in one update, whatever the configuration trains with.
_RATE = "3.0e-4"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare as ``arguments`` say; return the exit code."""
    accept_all_characters()
    bypass_proxies()
    options = _parse(arguments)
    try:
        with sigterm_as_interrupt():
            return _main(options)
    except KeyboardInterrupt:
        print("interrupted before everything was compared", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _main(options: argparse.Namespace) -> int:
    try:
        cfg = _config(options)
    except (ConfigError, ValueError, OSError) as error:
        print(printable(str(error)), file=sys.stderr)
        return exit_codes.REFUSED
    scratch_directory = tempfile.TemporaryDirectory(prefix="find-mismatch-")
    with allowing_code(cfg.policy), scratch_directory as scratch:
        return _compare(cfg, options, Path(scratch))


def _config(options: argparse.Namespace) -> Config:
    """Return the configuration of both sides. Raises ConfigError for one that cannot run here."""
    from nemo_like.mismatch.sides import as_sides

    if options.model is None:
        file, overrides = options.run_dir / "config.yaml", []
        if not file.is_file():
            raise ValueError(f"{options.run_dir} is no run directory: it has no config.yaml")
    else:
        file, overrides = options.config, [f"policy.model_name='{options.model}'"]
        if file is None:
            file = _CONFIGS / "grpo_cpu.yaml"
            overrides += ["policy.max_total_sequence_length=192", "generation.max_new_tokens=24"]
        overrides.append(f"policy.optimizer.lr={_RATE}")
    cfg = as_sides(load_config(file, [*overrides, *options.overrides]))
    try:
        validate(cfg)
    except ConfigError as error:
        # Nothing is sampled for a task here, so data that are missing do not matter.
        if problems := [one for one in error.problems if not one.key.startswith("data.")]:
            raise ConfigError(problems) from None
    return cfg


def _compare(cfg: Config, options: argparse.Namespace, scratch: Path) -> int:
    from nemo_like.cluster.actor_errors import ClusterError
    from nemo_like.mismatch.past_run import past_sample

    warn = partial(print, file=sys.stderr)
    try:
        sample = None
        if options.model is None:
            sample = past_sample(options.run_dir, cfg, options.step, options.sample)
        # Only now: this loads Ray, and the checks above must be quick.
        from nemo_like.driver.parties import started_parties

        with started_parties(cfg, RunDirectory.create(str(scratch), "logs"), warn) as parties:
            if sample is not None:
                return _past(cfg, parties, sample, options)
            return _certify(cfg, parties, options, scratch)
    except (ClusterError, ValueError, OSError) as error:
        print(printable(str(error)), file=sys.stderr)
        return exit_codes.REFUSED


def _certify(cfg: Config, parties: Parties, options: argparse.Namespace, scratch: Path) -> int:
    from nemo_like.mismatch.certificate import certificate, random_prompts

    found = certificate(cfg, parties, random_prompts(cfg), options.updates, scratch)
    print(*_table(found), "", sep="\n")
    for weights, mismatch in found.mismatches.items():
        print(f"{weights}: {_layers(mismatch)}")
    if found.moved is not None:
        print(f"the updates moved log-probs by {found.moved:.2g} nats per token")
    _write(options, found.as_json())
    print("", found.sentence, sep="\n")
    return exit_codes.FINISHED if found.holds else exit_codes.FAILED


def _past(cfg: Config, parties: Parties, sample: PastSample, options: argparse.Namespace) -> int:
    from nemo_like.mismatch.search import past_mismatch

    found = past_mismatch(cfg, parties, sample)
    print(f"{sample.name}, weights of version {sample.version}: {_layers(found)}")
    if not sample.has_its_weights:
        print("other weights sampled it, so the log-probs that it came with are not compared")
    print("a weight that did not reach the run's engine shows while the run is alive only, not here")
    _write(options, {"sample": sample.name, "version": sample.version, **found.as_json()})
    print("", *found.sentences[1:], found.sentences[0], sep="\n")
    return exit_codes.FINISHED if found.agrees else exit_codes.FAILED


def _write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _layers(found: EngineMismatch) -> str:
    """Return how much was compared, and where the gap came nearest to what rounding may give."""
    excess = found.compared.excess
    worst = max(excess, key=excess.__getitem__)
    return (
        f"{len(excess)} points of {found.num_tokens} tokens and {len(found.weights.compared)} weights are "
        f"compared; the largest gap is {excess[worst]:.2g} of the bound, at {worst}"
    )


def _table(found: Certificate) -> list[str]:
    """Return the comparisons with transformers as lines."""
    heads = ("tokens", "mean gap", "largest", "limit")
    lines = [f"{'weights':<18}{'compared with transformers':<32}" + "".join(f"{head:>11}" for head in heads)]
    for one in found.comparisons:
        end = "" if one.agrees else "  DIFFERS"
        lines.append(
            f"{one.weights:<18}{one.what:<32}{one.num_tokens:>11}{one.mean_gap:>11.2g}{one.largest_gap:>11.2g}"
            f"{one.limit:>11.2g}{end}"
        )
    return lines


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help="of a run that is over")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face checkpoint, without a run")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="of --model; default: configs/grpo_cpu.yaml"
    )
    parser.add_argument("--updates", type=int, default=2, metavar="N", help="with --model; default: 2")
    parser.add_argument(
        "--step", type=int, metavar="S", help="of the run; default: the last with its weights"
    )
    parser.add_argument(
        "--sample", type=int, default=0, metavar="I", help="of the step's samples; default: 0"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    if options.run_dir is not None and "=" in str(options.run_dir) and not options.run_dir.is_dir():
        options.overrides.insert(0, str(options.run_dir))
        options.run_dir = None
    if (options.run_dir is None) == (options.model is None):
        parser.error("give either RUN_DIR or --model DIR")
    if options.updates < 0:
        parser.error(f"--updates {options.updates} must be 0 or more")
    return options


if __name__ == "__main__":
    exit_code = main()
    ignore_first_interrupt()
    sys.exit(exit_code)
