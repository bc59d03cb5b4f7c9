"""Two real steps, one with short and one with long prompts, and every byte that Ray moves for the driver.

Run in a process of its own, as a driver is: ``python -m tests.functional.driver_traffic DIR``, or with
``images`` after it for pictures in place of prompts of text. Prints JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from ray._private.serialization import SerializationContext

from nemo_like.config.loader import load_config
from nemo_like.driver.setup import run_checkpoints, started
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory

NUM_PROMPTS, NUM_GENERATIONS = 16, 8
PROMPT_LENGTHS = (6, 200)


class Spy:
    """Counts what this process serialises for others and deserialises from them."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        serialize, deserialize = SerializationContext.serialize, SerializationContext.deserialize_objects

        def counted_serialize(context: SerializationContext, value: Any) -> Any:
            serialized = serialize(context, value)
            self.num_bytes += serialized.total_bytes
            return serialized

        def counted_deserialize(
            context: SerializationContext, objects: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self.num_bytes += sum(len(data) for data, *_ in objects if data is not None)
            return deserialize(context, objects, *args, **kwargs)

        with (
            mock.patch.object(SerializationContext, "serialize", counted_serialize),
            mock.patch.object(SerializationContext, "deserialize_objects", counted_deserialize),
        ):
            yield


def sums(directory: Path) -> tuple[str, list[str]]:
    """Short prompts in the first step, and long ones in the second."""
    prompts = directory / "prompts.jsonl"
    with prompts.open("w") as file:
        for length in PROMPT_LENGTHS:
            for number in range(NUM_PROMPTS):
                prompt = f"{number:02d}+".ljust(length - 1, "7") + "="
                file.write(json.dumps({"prompt": prompt, "answer": "000"}) + "\n")
    return "configs/grpo_arithmetic_cpu.yaml", [
        "data.train.kind=jsonl",
        f"data.train.path={prompts}",
        "data.validation.kind=arithmetic",
    ]


def pictures(directory: Path) -> tuple[str, list[str]]:
    """Small pictures in the first step, and large ones in the second, for the model in ``directory``."""
    from PIL import Image

    from scripts.demo_model.shapes import SIDE, write_records

    records = ""
    for name in ("small", "large"):
        write_records(directory, name, NUM_PROMPTS, 5, SIDE)
        records += (directory / f"{name}.jsonl").read_text()
    for path in (directory / "small").iterdir():
        Image.open(path).resize((SIDE // 2, SIDE // 2)).save(path)
    (directory / "all.jsonl").write_text(records)
    return "configs/grpo_shapes_vlm_cpu.yaml", [
        f"policy.model_name={directory / 'model'}",
        f"data.train.path={directory / 'all.jsonl'}",
        f"data.validation.path={directory / 'all.jsonl'}",
    ]


def main(directory: Path, task: str = "sums") -> None:
    config, arguments = {"sums": sums, "images": pictures}[task](directory)
    cfg = load_config(
        config,
        [
            *arguments,
            f"grpo.num_prompts_per_step={NUM_PROMPTS}",
            f"grpo.num_generations_per_prompt={NUM_GENERATIONS}",
            "policy.max_total_sequence_length=256",
            "loss_fn.use_generation_logprobs_as_prev=false",  # every stage calls
            "data.shuffle=false",
            f"logger.log_dir={directory}",
            "logger.wandb.mode=disabled",
            "generation.num_engines=1",
        ],
    )
    run_directory = RunDirectory.create(cfg.logger.log_dir, "traffic")
    spy, traffic = Spy(), []
    with (
        open("/dev/null", "w") as nowhere,
        RunLogger(cfg.logger, run_directory, resolved_config={}, max_num_steps=2, stream=nowhere) as logger,
        started(cfg, run_directory, logger, run_checkpoints(cfg, run_directory)) as run,
        spy.installed(),
    ):
        for step in (1, 2):
            before = spy.num_bytes
            metrics = run.driver.step(step, run.driver.next_prompts(step)).metrics
            traffic.append({"bytes": spy.num_bytes - before, "tokens": metrics["train/total_num_tokens"]})
    tensor_libraries = sorted({"torch", "tensordict", "transfer_queue", "vllm"} & sys.modules.keys())
    print(json.dumps({"steps": traffic, "tensor_libraries": tensor_libraries}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
