"""Find out whether this machine's engine and trainer compute a model alike, and where they do not
(docs/how_to/find_mismatch.md).

python scripts/find_mismatch.py --model models/Qwen3-8B
python scripts/find_mismatch.py --model models/Qwen3-8B --config configs/grpo_gpu.yaml --json found.json \\
    policy.precision=bfloat16

It starts one engine and one replica of the trainer, and compares the log-probs of both with those of
transformers: as loaded, and after the trainer has made a few updates and sent its weights to the engine.
The exit code is 0 when all agree but for rounding, 1 when they do not, 2 when nothing could be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.cluster.proxies import bypass_proxies
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.driver import exit_codes
from nemo_like.driver.stopping import ignore_first_interrupt, sigterm_as_interrupt
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.rules.rules import validate

if TYPE_CHECKING:
    from nemo_like.mismatch.certificate import Certificate

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
    with tempfile.TemporaryDirectory(prefix="find-mismatch-") as scratch:
        return _certify(cfg, options, Path(scratch))


def _config(options: argparse.Namespace) -> Config:
    """Return the configuration of both sides. Raises ConfigError for one that cannot run here."""
    from nemo_like.mismatch.parties import as_parties

    file, overrides = options.config, [f"policy.model_name='{options.model}'"]
    if file is None:
        file = _CONFIGS / "grpo_cpu.yaml"
        overrides += ["policy.max_total_sequence_length=192", "generation.max_new_tokens=24"]
    cfg = as_parties(load_config(file, [*overrides, f"policy.optimizer.lr={_RATE}", *options.overrides]))
    try:
        validate(cfg)
    except ConfigError as error:
        # Nothing is sampled for a task here, so data that are missing do not matter.
        if problems := [one for one in error.problems if not one.key.startswith("data.")]:
            raise ConfigError(problems) from None
    return cfg


def _certify(cfg: Config, options: argparse.Namespace, scratch: Path) -> int:
    # Only now: these load Ray and torch, and the checks above must be quick.
    from nemo_like.cluster.actor_errors import ClusterError
    from nemo_like.mismatch.certificate import certificate, random_prompts
    from nemo_like.mismatch.parties import started_parties

    warn = partial(print, file=sys.stderr)
    try:
        with started_parties(cfg, RunDirectory.create(str(scratch), "logs"), warn) as parties:
            found = certificate(cfg, parties, random_prompts(cfg), options.updates, scratch)
    except (ClusterError, OSError) as error:
        print(printable(str(error)), file=sys.stderr)
        return exit_codes.REFUSED
    print(*_table(found), sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(found.as_json(), indent=2) + "\n", encoding="utf-8")
    return exit_codes.FINISHED if found.holds else exit_codes.FAILED


def _table(found: Certificate) -> list[str]:
    """Return the comparisons as lines, and one that sums up."""
    heads = ("tokens", "mean gap", "largest", "limit")
    lines = [f"{'weights':<18}{'compared with transformers':<32}" + "".join(f"{head:>11}" for head in heads)]
    for one in found.comparisons:
        end = "" if one.agrees else "  DIFFERS"
        lines.append(
            f"{one.weights:<18}{one.what:<32}{one.num_tokens:>11}{one.mean_gap:>11.2g}{one.largest_gap:>11.2g}"
            f"{one.limit:>11.2g}{end}"
        )
    lines.append("")
    if found.moved is not None:
        lines.append(f"the updates moved log-probs by {found.moved:.2g} nats per token")
    if not all(one.agrees for one in found.comparisons):
        return [*lines, "engine, trainer and transformers do not agree"]
    if found.moved is not None and not found.was_reload_tested:
        return [*lines, "that is within the limit, so the reload was not tested: give more --updates"]
    return [*lines, "engine, trainer and transformers agree but for rounding"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face checkpoint")
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: configs/grpo_cpu.yaml")
    parser.add_argument("--updates", type=int, default=2, metavar="N", help="of the trainer; default: 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    if options.updates < 0:
        parser.error(f"--updates {options.updates} must be 0 or more")
    return options


if __name__ == "__main__":
    exit_code = main()
    ignore_first_interrupt()
    sys.exit(exit_code)
