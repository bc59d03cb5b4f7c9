"""Two real steps, one with short and one with long prompts, and every byte that Ray moves for the driver.

Run in a process of its own, as a driver is: ``python -m tests.functional.driver_traffic DIR``, or with
``images`` after it for pictures in place of prompts of text. Prints JSON.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray._private.serialization import SerializationContext

from nemo_like.batch.columns import MESSAGES, OBSERVED_PIXEL_VALUES, PIXEL_VALUES
from nemo_like.configuration import load_config
from nemo_like.driver.setup import started
from nemo_like.driver.stopping import StopRequests
from nemo_like.driver.whole_run import run_checkpoints
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory

NUM_PROMPTS, NUM_GENERATIONS = 16, 8
PROMPT_LENGTHS = (6, 200)
HEIGHTS = {"small": 28, "large": 56}  # of the environment's pictures
CONTROL_BYTES = 2**20
STORED = [column.name for column in (MESSAGES, PIXEL_VALUES, OBSERVED_PIXEL_VALUES)]


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
    """Small pictures in the first step, and large ones in the second, for the model in ``directory``: in
    prompts, and from an environment."""
    from PIL import Image

    from scripts.demo_model.shapes import SIDE, write_records

    records = ""
    for name in ("small", "large"):
        write_records(directory, name, NUM_PROMPTS, 5, SIDE)
        for line in (directory / f"{name}.jsonl").read_text().splitlines():
            records += json.dumps({**json.loads(line), "height": HEIGHTS[name]}) + "\n"
    for path in (directory / "small").iterdir():
        Image.open(path).resize((SIDE // 2, SIDE // 2)).save(path)
    (directory / "all.jsonl").write_text(records)
    return "configs/grpo_shapes_vlm_cpu.yaml", [
        f"policy.model_name={directory / 'model'}",
        f"data.train.path={directory / 'all.jsonl'}",
        f"data.validation.path={directory / 'all.jsonl'}",
        "env.count.kind=custom",
        "env.count.max_turns=2",
        "generation.max_new_tokens=16",
        "++env.count.options={target: 'tests.functional.looking:Looking', arguments: {}}",
        f"generation.stop_strings=[{','.join(string.ascii_lowercase)}]",
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
            "rollout.keep_messages=true",
            "data_plane.log_operations=true",
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
        started(
            cfg, run_directory, logger, run_checkpoints(cfg, run_directory), StopRequests(cfg.checkpointing)
        ) as run,
        spy.installed(),
    ):
        for step in (1, 2):
            before = spy.num_bytes
            metrics = run.driver.step(step).metrics
            moved = spy.num_bytes - before
            stored = {name: metrics.get(f"data_plane/put/{name}/bytes") for name in STORED}
            traffic.append({"bytes": moved, "tokens": metrics["train/total_num_tokens"], "columns": stored})
        before = spy.num_bytes
        ray.get(ray.put(bytes(CONTROL_BYTES)))
        control = spy.num_bytes - before  # what the spy would have seen of as many bytes, there and back
    tensor_libraries = sorted({"torch", "tensordict", "transfer_queue", "vllm"} & sys.modules.keys())
    print(json.dumps({"steps": traffic, "control": control, "tensor_libraries": tensor_libraries}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
