#!/usr/bin/env python
"""What this project adds to vLLM's own loop, and what that loop adds to the model: seconds per engine step.

    python scripts/bench/engine_loop.py [--config FILE] [--sequences 64 256 1024] [--tokens 32] [--rounds 5]
                                        [--profile FILE] [key=value ...]

One real engine, that of the configuration (the demo's), in this process, samples random prompts in ways that
take turns:

    bare   vLLM's engine alone: add_request, then step until all have ended
    ours   RequestLoop around the same engine, as an engine of a run uses it, with a sink

Prints JSON: by number of sequences the medians of the seconds per step of both, their ratio, and the share of
vLLM's own step in which the model is executed; of an engine that sleeps also the seconds to give up the GPU's
memory and to get it back. --profile writes where the time goes, by Python's profiler, which makes everything
slower.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nemo_like.configuration import Config, load_config
from nemo_like.generation.environment import engine_environment
from scripts.bench.arguments import at_least

PROMPT_TOKENS = 16
GROUP_SIZE = 16  # samples of one prompt, which are one request
TIMEOUT_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/grpo_arithmetic_cpu.yaml")
    parser.add_argument(
        "--sequences",
        type=at_least(GROUP_SIZE),
        nargs="+",
        default=[64, 256, 1024],
        help=f"in requests of {GROUP_SIZE}: other numbers are rounded down",
    )
    parser.add_argument("--tokens", type=at_least(1), default=32, help="of each response")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--profile", type=Path, metavar="FILE")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    longest = max(PROMPT_TOKENS + options.tokens, 64)
    cfg = load_config(
        options.config,
        [
            f"generation.vllm_cfg.max_num_seqs={max(options.sequences)}",
            f"policy.max_total_sequence_length={longest}",
            *options.overrides,
        ],
    )
    # Before vLLM is imported, which writes what it logs among the figures.
    os.environ |= engine_environment(cfg.policy.device) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    contest = Contest(cfg, options.tokens)
    contest.turn(contest.bare, min(options.sequences))  # warm-up
    found: dict[str, Any] = {
        "by_sequences": {number: contest.compare(number, options.rounds) for number in options.sequences}
    }
    tables = [profiled(contest.turn, contest.ours, max(options.sequences))] if options.profile else []
    if contest.sleeps:  # last: it may lose the weights
        found["sleep_s"] = [contest.sleep_s() for _ in range(options.rounds)]
        tables += [profiled(contest.sleep_s)] if options.profile else []
    print(json.dumps(found, indent=2))
    if options.profile:
        options.profile.write_text("\n".join(tables))
    return 0


class Sink:
    """Takes what has ended, as the rollout does."""

    def __init__(self) -> None:
        self.num_groups = 0

    def submit(self, method: str, *args: Any) -> None:
        if method != "on_groups":
            raise RuntimeError(f"the engine failed: {args}")
        self.num_groups += len(args[0])


class Contest:
    """One engine, and both ways to have it sample."""

    def __init__(self, cfg: Config, num_tokens: int) -> None:
        """Start the engine of ``cfg``, every response of which has ``num_tokens``."""
        from nemo_like.generation.engine_routes import EngineRoutes
        from nemo_like.generation.engine_spec import Sleeps
        from nemo_like.generation.request_loop import RequestLoop
        from nemo_like.generation.sampling import SamplingSettings
        from nemo_like.generation.started_vllm import build_llm_engine, complete_args, prepare_engine
        from nemo_like.plan.engine_of_run import engine_of_run

        spec = engine_of_run(cfg)
        routes = EngineRoutes(None, spec.device)
        llm = build_llm_engine(spec, complete_args("engine", spec, routes))
        self._started = prepare_engine("engine", spec, llm, routes)
        self._loop = RequestLoop(self._started, TIMEOUT_S)
        self._sampling = SamplingSettings(1.0, 1.0, 0, num_tokens)
        self._random = random.Random(0)
        self._num_requests = 0
        self.sleeps = spec.sleeps is not Sleeps.never
        self._model_s = 0.0
        for name in ("execute_model", "sample_tokens"):
            setattr(llm.model_executor, name, self._timed(getattr(llm.model_executor, name)))

    def compare(self, num_sequences: int, num_rounds: int) -> dict[str, float]:
        """Let both sample in turn; return the medians."""
        ours, bare, model = [], [], []
        for _ in range(num_rounds):
            seconds, of_model = self.turn(self.bare, num_sequences)
            bare.append(seconds)
            model.append(of_model)
            ours.append(self.turn(self.ours, num_sequences)[0])
        bare_s, ours_s = statistics.median(bare), statistics.median(ours)
        return {
            "bare_step_s": round(bare_s, 5),
            "our_step_s": round(ours_s, 5),
            "ours_over_bare": round(ours_s / bare_s, 3),
            "model_share_of_bare": round(statistics.median(model) / bare_s, 3),
        }

    def turn(self, way: Callable[[Sequence[Any]], int], num_sequences: int) -> tuple[float, float]:
        """Have so many sequences sampled; return the seconds per step, and those of the model's execution."""
        requests = [self._request() for _ in range(num_sequences // GROUP_SIZE)]
        self._model_s = 0.0
        start = time.perf_counter()
        num_steps = way(requests)
        return (time.perf_counter() - start) / num_steps, self._model_s / num_steps

    def bare(self, requests: Sequence[Any]) -> int:
        """Sample by vLLM's engine alone; return the number of its steps."""
        from nemo_like.generation.engine_requests import as_prompt, sampling_params

        llm = self._started.llm
        for one in requests:
            params = sampling_params(one, self._sampling, {})
            llm.add_request(one.request_id, as_prompt(one, None), params)
        num_steps = 0
        while llm.has_unfinished_requests():
            llm.step()
            num_steps += 1
        return num_steps

    def ours(self, requests: Sequence[Any]) -> int:
        """Sample as an engine of a run does; return the number of steps."""
        from nemo_like.generation.engine_requests import QueuedRequest, sampling_params

        sink, before = Sink(), self._loop.queue.num_steps
        queued = [
            QueuedRequest(one, self._sampling, sampling_params(one, self._sampling, {}), sink)
            for one in requests
        ]
        self._loop.add(queued)
        while sink.num_groups < len(requests):
            self._loop.advance()
        return self._loop.queue.num_steps - before

    def sleep_s(self) -> dict[str, float]:
        """Sleep and wake once; return the seconds until the engine held nothing, weights, everything."""
        from nemo_like.cluster.stage import EngineHolds

        seconds = {}
        for what in (EngineHolds.nothing, EngineHolds.weights, EngineHolds.everything):
            start = time.perf_counter()
            self._started.memory.hold(what)
            seconds[what.value] = round(time.perf_counter() - start, 4)
            self._started.memory.weights_came()  # none are loaded: what is sampled does not matter here
        return seconds

    def _request(self) -> Any:
        from nemo_like.generation.interface import GroupRequest

        self._num_requests += 1
        size = self._started.llm.model_config.get_vocab_size()
        prompt = tuple(self._random.randrange(size) for _ in range(PROMPT_TOKENS))
        first = GROUP_SIZE * self._num_requests
        return GroupRequest(f"request-{self._num_requests}", prompt, tuple(range(first, first + GROUP_SIZE)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._model_s += time.perf_counter() - start

        return timed


def profiled(function: Callable[..., Any], *args: Any) -> str:
    """Call the function; return where the time went, by function and by function with all that it calls."""
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(function, *args)
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler, stream=text).sort_stats(order).print_stats(60)
    return text.getvalue()


if __name__ == "__main__":
    sys.exit(main())
