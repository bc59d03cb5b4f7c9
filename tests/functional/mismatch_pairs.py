"""An engine and a trainer that are compared, with faults in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_like.configuration import Config, load_config
from nemo_like.driver.parties import Parties, started_parties
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.mismatch.search import EngineMismatch, History, find_mismatch
from nemo_like.mismatch.sides import as_sides
from nemo_like.observability.run_directory import RunDirectory
from tests.functional.mismatch_faults import TARGETS
from tests.functional.runs import ROOT
from tests.functional.warm_servers import shared

PROMPT = [2 + (7 * i) % 60 for i in range(70)]  # more than a block of the engine's cache
SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)


def config(model: Path, *overrides: str) -> Config:
    own = [
        f"policy.model_name='{model}'",
        "policy.max_total_sequence_length=96",
        "policy.optimizer.lr=1e-3",
        "generation.vllm_cfg.kv_cache_gib=0.0625",
    ]
    return as_sides(load_config(ROOT / "configs/grpo_cpu.yaml", [*own, *overrides]))


@contextmanager
def parties_of(cfg: Config, tmp_path: Path) -> Iterator[Parties]:
    directory = RunDirectory.create(str(tmp_path), "logs")
    with shared(), started_parties(cfg, directory, print, TARGETS) as parties:
        yield parties


class Pair:
    """An engine and a trainer under test."""

    def __init__(self, cfg: Config, parties: Parties) -> None:
        self.cfg, self.parties, self.history = cfg, parties, History()
        self.version = 0
        self.history.note(parties, 0)

    def find(self, sampling: SamplingSettings = SAMPLING) -> EngineMismatch:
        return find_mismatch(self.cfg, self.parties, PROMPT, sampling, self.history)

    def train(self) -> None:
        """One more update; the engine gets the weights."""
        self.parties.ask_trainer("train_on", [PROMPT, PROMPT[::-1]], 1)
        self.version += 1
        self.history.note(self.parties, self.version)

    def push(self) -> None:
        self.parties.ask_trainer("push_weights", self.version)


@contextmanager
def planted(pair: Pair, fault: str, where: str) -> Iterator[None]:
    """Within the block the engine has the fault."""
    pair.parties.ask_engine("plant", fault, where)
    try:
        yield
    finally:
        pair.parties.ask_engine("mend")


def points(found: EngineMismatch) -> list[str]:
    """The points that sentences begin with."""
    return [said.partition(":")[0] for said in found.sentences]
