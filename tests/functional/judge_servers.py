"""A real vLLM server with an OpenAI-compatible API on this machine, and a tiny model that it serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from transformers import Qwen3ForCausalLM

from nemo_like.cluster.runtime import free_port
from nemo_like.generation.environment import engine_environment
from nemo_like.policy.options import Device
from scripts.demo_model.tiny_tokenizer import save_tokenizer
from scripts.demo_model.warm_start import tiny_config
from tests.functional.reward_models import CHAT_TEMPLATE

MODEL, KEY = "tiny-judge", "sk-a-key-of-this-test"
MAX_TOKENS = 1024  # of a question and its verdict
_START_TIMEOUT_S = 480.0  # it starts in half a minute, but not on a busy machine


@dataclass(frozen=True)
class JudgeServer:
    """A server that is up; it asks for ``KEY``."""

    url: str
    process: subprocess.Popen[bytes]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server and its engine, which is a process of its own."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Have the server shut down, which removes its shared memory; kill it if it does not."""
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.process.wait(timeout=30)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While the block runs, connections are accepted, and nothing is answered."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)


@contextmanager
def judge_server(directory: Path) -> Iterator[JudgeServer]:
    """Serve a random model, whose text means nothing: a request says what form it must have."""
    torch.manual_seed(0)
    config = tiny_config()
    config.max_position_embeddings = MAX_TOKENS
    Qwen3ForCausalLM(config).save_pretrained(directory / "judge")
    save_tokenizer(directory / "judge")
    with model_server(directory / "judge", directory) as server:
        yield server


@contextmanager
def model_server(model: Path, directory: Path, max_tokens: int = MAX_TOKENS) -> Iterator[JudgeServer]:
    """Serve a checkpoint under the name ``MODEL``; its log is in ``directory``."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY),
        *("--chat-template", str(CHAT_TEMPLATE), "--max-model-len", str(max_tokens), "--dtype", "float32"),
        *("--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32"),
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", str(MAX_TOKENS)),
    ]
    # The path of a Unix socket has at most 107 characters, which the folders of tests may exceed.
    sockets = tempfile.mkdtemp(prefix="vllm-")
    # A server's engine is always a process of its own. These variables keep its worker from being one too.
    environment = {**os.environ, **engine_environment(Device.cpu), "VLLM_RPC_BASE_PATH": sockets}
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = JudgeServer(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_up(server, directory / "server.log")
        yield server
    finally:
        server.end()


def _wait_until_up(server: JudgeServer, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        with suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=5).is_success:
                return
        time.sleep(0.3)
    raise AssertionError(f"vLLM's server did not start:\n{log.read_text()[-3000:]}")
