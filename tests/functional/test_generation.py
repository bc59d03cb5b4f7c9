"""A real vLLM engine in its own process, on a tiny random Qwen3: what it samples, what it says of tokens."""

from __future__ import annotations

import ast
import dataclasses
import os
import signal
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from ray.exceptions import RayActorError, RayTaskError
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_like.cluster.actor_errors import ActorBroken, ActorFailed
from nemo_like.cluster.actors import ActorHandle, ActorSpec, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.stage import EngineHolds
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.generation.engine_rules import CPU_HEAD_SIZES
from nemo_like.generation.environment import engine_environment
from nemo_like.generation.interface import EngineStats, GroupRequest, GroupResult, PromptScores
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.policy.options import Device
from nemo_like.tripwires.canary_checks import canary_tokens
from scripts.demo_model.tiny_tokenizer import save_tokenizer
from tests.functional.generation_fixtures import (
    EOS,
    MAX_LENGTH,
    TIMEOUT_S,
    VOCAB_SIZE,
    collector_spec,
    engine_spec,
    make_checkpoint,
    reference_logprobs,
)
from tests.functional.policy_fixtures import random_batch
from tests.functional.renewed import renew, renewable
from tests.functional.teachers import by_dense_model, check

# The first test of a module also waits for its engines.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nobody_dies")]

SAMPLED = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=12, stop_token_ids=(EOS,))
# Nothing ends these early.
ENDLESS = dataclasses.replace(SAMPLED, stop_token_ids=())
LONG = dataclasses.replace(ENDLESS, max_new_tokens=80)
PROMPT = (4, 9, 13, 21, 8, 30)
MAX_NUM_SEQS = 256


@dataclasses.dataclass
class Generation:
    """An engine and its sink, with the waits that every test needs."""

    cluster: Cluster
    engine: ActorHandle
    sink: ActorHandle

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingSettings = SAMPLED) -> None:
        self.call(self.engine.submit("submit", requests, sampling, self.sink))

    def generate(
        self, requests: Sequence[GroupRequest], sampling: SamplingSettings = SAMPLED
    ) -> list[GroupResult]:
        self.submit(requests, sampling)
        return self.wait_for([request.request_id for request in requests])

    def submit_and_call(self, requests: Sequence[GroupRequest], method: str, *arguments: object) -> None:
        """Submit requests that take 80 steps, and call another method meanwhile.

        Both calls are sent at once: on a busy machine the engine may finish such requests before its answer
        to the first call has come back.
        """
        calls = [
            self.engine.submit("submit", requests, LONG, self.sink),
            self.engine.submit(method, *arguments),
        ]
        self.cluster.gather(calls, stage="test", timeout_s=TIMEOUT_S)

    def wait_for(self, request_ids: Sequence[str]) -> list[GroupResult]:
        return self.call(self.sink.submit("wait_for", request_ids, TIMEOUT_S))

    def score(self, sequences: list[list[int]], top_k: int) -> PromptScores:
        return self.call(self.engine.submit("score", sequences, top_k))

    def received(self) -> list[str]:
        return self.call(self.sink.submit("received"))

    def call(self, call: Call):
        return self.cluster.gather([call], stage="test", timeout_s=TIMEOUT_S)[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("tied"), tied=True)
    save_tokenizer(path)
    # One token more than the model has, with which a step fails: vLLM checks prompts by the tokenizer.
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<beyond>"])
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def actors(ray_of_engines: None, checkpoint: Path) -> Iterator[tuple[Cluster, ActorHandle]]:
    """An engine as a teacher has it, in the process in which the tests' own engine is built later."""
    cluster = Cluster()
    target, kwargs = "tests.functional.teachers:EngineTeacher", {"checkpoint": str(checkpoint)}
    teacher = ActorSpec("engine", target, kwargs, env=engine_environment(Device.cpu))
    yield cluster, cluster.start(renewable(teacher))
    cluster.stop()


@pytest.fixture(scope="module")
def generation(actors: tuple[Cluster, ActorHandle], checkpoint: Path) -> Generation:
    cluster, engine = actors
    generation = Generation(cluster, engine, cluster.start(collector_spec()))
    options = {"tokenizer_name": str(checkpoint), "max_num_seqs": MAX_NUM_SEQS}
    generation.call(renew(engine, engine_spec(checkpoint, "engine", **options)))
    return generation


def test_an_engine_of_a_teacher_writes_what_a_dense_model_says(
    actors: tuple[Cluster, ActorHandle], checkpoint: Path
) -> None:
    """First, since the other tests have another engine in its process."""
    cluster, teacher = actors
    batch = random_batch(8)
    batch["columns"]["input_ids"] %= VOCAB_SIZE
    (columns,) = cluster.gather([teacher.submit("scored", batch)], stage="test", timeout_s=TIMEOUT_S)
    check(range(8), columns, by_dense_model(checkpoint, batch, 1.0))


def request(
    name: str, *, prompt: Sequence[int] = PROMPT, first_seed: int = 0, num_responses: int = 8
) -> GroupRequest:
    return GroupRequest(name, tuple(prompt), tuple(range(first_seed, first_seed + num_responses)))


def assert_same_samples(first: GroupResult, second: GroupResult) -> None:
    """Bit for bit."""
    for one, other in zip(first.responses, second.responses, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_a_seed_gives_the_same_samples_whatever_else_is_in_the_batch(generation: Generation) -> None:
    rng = np.random.default_rng(0)
    # Longer than two blocks of the KV cache, so that prefixes are shared and cached.
    long_prompt = tuple(rng.integers(2, VOCAB_SIZE, size=70).tolist())
    others = [
        request(f"other-{i}", prompt=rng.integers(2, VOCAB_SIZE, size=3 + i).tolist(), first_seed=1000 * i)
        for i in range(40)
    ]
    alone = [
        generation.generate([request(f"alone-{name}", prompt=prompt, first_seed=77)])[0]
        for name, prompt in [("short", PROMPT), ("long", long_prompt)]
    ]
    crowd = [
        *others[:25],
        request("crowd-long", prompt=long_prompt, first_seed=77),
        *others[25:],
        request("crowd-short", first_seed=77),
    ]
    generation.generate(crowd)
    in_crowd = generation.wait_for(["crowd-short", "crowd-long"])
    for first, second in zip(alone, in_crowd, strict=True):
        assert_same_samples(first, second)


def test_response_j_is_sampled_with_seed_j(generation: Generation) -> None:
    [eight] = generation.generate([request("seeds-8", first_seed=500)])
    [three] = generation.generate([request("seeds-3", first_seed=503, num_responses=3)])
    assert_same_samples(dataclasses.replace(eight, responses=eight.responses[3:6]), three)
    assert len({response.token_ids.tobytes() for response in eight.responses}) > 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    generation: Generation, model: torch.nn.Module, temperature: float
) -> None:
    sampling = dataclasses.replace(SAMPLED, temperature=temperature)
    [result] = generation.generate([request(f"hf-{temperature}", first_seed=9)], sampling)
    for response in result.responses:
        assert response.token_ids.dtype == np.int32
        assert response.logprobs.dtype == np.float32
        expected = reference_logprobs(model, PROMPT, response.token_ids, temperature)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)


def test_temperature_zero_takes_the_most_likely_token(generation: Generation, model: torch.nn.Module) -> None:
    greedy = dataclasses.replace(ENDLESS, temperature=0.0)
    [result] = generation.generate([request("greedy", num_responses=1)], greedy)
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, *result.responses[0].token_ids.tolist()]])
        expected = model(ids).logits[0, len(PROMPT) - 1 : -1].argmax(-1)
    assert result.responses[0].token_ids.tolist() == expected.tolist()


def test_a_response_ends_with_a_stop_token_or_is_truncated(generation: Generation) -> None:
    [free] = generation.generate([request("free", first_seed=40)], ENDLESS)
    stop = int(free.responses[0].token_ids[5])
    [stopped] = generation.generate(
        [request("stopped", first_seed=40)], dataclasses.replace(SAMPLED, stop_token_ids=(stop,))
    )
    for without, response in zip(free.responses, stopped.responses, strict=True):
        assert without.is_truncated
        assert len(without.token_ids) == len(without.logprobs) == 12
        tokens = without.token_ids.tolist()
        end = tokens.index(stop) + 1 if stop in tokens else 12
        assert response.token_ids.tolist() == tokens[:end]
        assert response.is_truncated == (stop not in tokens)
    assert not stopped.responses[0].is_truncated


def test_a_stop_string_may_be_a_special_token_or_have_one(generation: Generation, checkpoint: Path) -> None:
    """By vLLM's defaults neither ends a response: texts leave out special tokens."""
    tokenizer = Tokenizer(checkpoint)
    special = tokenizer.encode_text("<pad>")
    [free] = generation.generate([request("unstopped", first_seed=90, num_responses=64)], ENDLESS)
    texts = [tokenizer.decode(response.token_ids) for response in free.responses]
    # What follows the token in some response makes a stop string of two tokens.
    follows = next(text.partition("<pad>")[2] for text in texts if "<pad>" in text[:-5])
    several = f"<pad>{tokenizer.decode(tokenizer.encode_text(follows)[:1])}"
    for stop in ("<pad>", several):
        sampling = dataclasses.replace(ENDLESS, stop_strings=(stop,))
        name = f"stopped at {stop}"
        [stopped] = generation.generate([request(name, first_seed=90, num_responses=64)], sampling)
        assert any(not response.is_truncated for response in stopped.responses)
        for text, response in zip(texts, stopped.responses, strict=True):
            before, found, _ = text.partition(stop)
            assert tokenizer.decode_response(response.token_ids, ()) == before + found
            assert response.is_truncated == (not found)
            assert not found or special[0] in response.token_ids[-2:]


def test_a_group_is_delivered_while_others_are_still_generated(generation: Generation) -> None:
    short = dataclasses.replace(ENDLESS, max_new_tokens=2)
    generation.submit_and_call([request("slow")], "submit", [request("quick")], short, generation.sink)
    generation.wait_for(["slow", "quick"])
    received = generation.received()
    assert received.index("quick") < received.index("slow")


def test_groups_that_finish_together_come_in_one_call(generation: Generation) -> None:
    generation.generate([request(f"together-{i}", num_responses=4) for i in range(20)], ENDLESS)
    assert generation.call(generation.sink.submit("calls"))[-1] == 20


def test_an_aborted_group_is_never_delivered(generation: Generation) -> None:
    generation.submit_and_call([request("aborted"), request("kept")], "abort", ["aborted", "unknown"])
    generation.wait_for(["kept"])
    generation.generate([request("after-abort")])
    assert "aborted" not in generation.received()


def test_stats_count_delivered_tokens_and_busy_seconds(generation: Generation) -> None:
    before: EngineStats = generation.call(generation.engine.submit("stats"))
    generation.generate([request("stats")], ENDLESS)
    after: EngineStats = generation.call(generation.engine.submit("stats"))
    assert after.num_generated_tokens - before.num_generated_tokens == 8 * 12
    assert after.generation_s > before.generation_s
    assert after.policy_version == -1


def test_the_canary_is_scored_at_temperature_1_as_by_transformers(
    generation: Generation, checkpoint: Path
) -> None:
    tokens = canary_tokens(VOCAB_SIZE, MAX_LENGTH - 1)
    scored = generation.call(generation.engine.submit("canary_logprobs", tokens))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert scored == pytest.approx(expected.tolist(), abs=1e-4)
    assert generation.call(generation.engine.submit("canary_logprobs", tokens)) == scored


def test_an_engine_that_generates_scores_no_canary(generation: Generation) -> None:
    with pytest.raises(ActorFailed, match="still generates, so it cannot score tokens"):
        generation.submit_and_call([request("busy")], "canary_logprobs", (2, 3))
    generation.wait_for(["busy"])


def test_an_engine_with_a_processor_of_its_own_does_not_sleep(generation: Generation) -> None:
    with pytest.raises(ActorFailed, match="was not started to sleep"):
        generation.call(generation.engine.submit("hold", EngineHolds.nothing))


def test_one_request_that_cannot_be_served_refuses_the_whole_call(generation: Generation) -> None:
    too_long = request("too-long", prompt=[5] * (MAX_LENGTH + 1))
    with pytest.raises(ActorFailed, match="submit failed"):
        generation.submit([request("in-front"), too_long])
    with pytest.raises(ActorFailed, match="8 greedy responses would be the same"):
        generation.submit([request("greedy-group")], dataclasses.replace(SAMPLED, temperature=0.0))
    twice = [request("twice")]
    with pytest.raises(ActorFailed, match="'twice' is unfinished already"):
        generation.submit_and_call(twice, "submit", twice, SAMPLED, generation.sink)
    generation.wait_for(["twice"])
    assert "in-front" not in generation.received()


# What the engine says of given tokens

# The shortest, those around the blocks of 32 tokens of the KV cache, the longest, and one of them twice.
LENGTHS = (1, 2, 31, 32, 33, 64, MAX_LENGTH - 1, 2)
MANY = 40  # times these are more sequences than the engine computes at once


def some_sequences() -> list[list[int]]:
    rng = np.random.default_rng(3)
    sequences = [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in LENGTHS]
    return [*sequences[:-1], sequences[1]]


@pytest.mark.parametrize("top_k", [0, 5, VOCAB_SIZE])
def test_scores_are_those_of_transformers(generation: Generation, model: torch.nn.Module, top_k: int) -> None:
    sequences = some_sequences()
    scores = generation.score(sequences, top_k)
    assert (scores.logprobs.dtype, scores.topk_logprobs.dtype) == (np.float32, np.float32)
    assert scores.topk_ids.dtype == np.int32
    assert len(scores.logprobs) == sum(LENGTHS)
    assert scores.topk_ids.shape == scores.topk_logprobs.shape == (sum(LENGTHS), top_k)
    start = 0
    for sequence in sequences:
        with torch.no_grad():
            expected = model(torch.tensor([sequence])).logits[0, :-1].log_softmax(-1).numpy()
        mine = slice(start + 1, start + len(sequence))
        places = np.arange(len(sequence) - 1)
        np.testing.assert_allclose(scores.logprobs[mine], expected[places, sequence[1:]], atol=1e-4)
        likely = np.argsort(-expected, axis=1)[:, :top_k]
        np.testing.assert_array_equal(scores.topk_ids[mine], likely)
        np.testing.assert_allclose(
            scores.topk_logprobs[mine], np.take_along_axis(expected, likely, axis=1), atol=1e-4
        )
        assert scores.logprobs[start] == 0
        assert not scores.topk_ids[start].any()
        assert not scores.topk_logprobs[start].any()
        start += len(sequence)


def test_the_same_sequences_have_the_same_scores_again(generation: Generation) -> None:
    """Also those whose prefix the engine has computed before."""
    first, again = (generation.score(some_sequences(), 4) for _ in range(2))
    np.testing.assert_array_equal(first.logprobs, again.logprobs)
    np.testing.assert_array_equal(first.topk_ids, again.topk_ids)
    np.testing.assert_array_equal(first.topk_logprobs, again.topk_logprobs)


def test_more_sequences_than_an_engine_computes_at_once_have_the_scores_of_few(
    generation: Generation,
) -> None:
    assert MANY * len(LENGTHS) > MAX_NUM_SEQS
    few, many = (generation.score(some_sequences() * times, 4) for times in (1, MANY))
    np.testing.assert_array_equal(many.logprobs, np.tile(few.logprobs, MANY))
    np.testing.assert_array_equal(many.topk_ids, np.tile(few.topk_ids, (MANY, 1)))
    np.testing.assert_array_equal(many.topk_logprobs, np.tile(few.topk_logprobs, (MANY, 1)))


def test_no_sequence_has_no_scores(generation: Generation) -> None:
    scores = generation.score([], 3)
    assert scores.logprobs.shape == (0,)
    assert scores.topk_ids.shape == (0, 3)


@pytest.mark.parametrize("wrong", [[], [5] * (MAX_LENGTH + 1)])
def test_a_sequence_that_cannot_be_scored_refuses_all_and_the_engine_goes_on(
    generation: Generation, wrong: list[int]
) -> None:
    with pytest.raises(ActorFailed, match=r"ValueError|VLLMValidationError"):
        generation.score([[4, 5, 6], wrong], 2)
    assert len(generation.score([[4, 5, 6]], 2).logprobs) == 3


# The end of the engine


def test_a_failing_step_reaches_the_sink_and_the_driver_as_a_death_does(generation: Generation) -> None:
    """Last, since it ends the engine."""
    pid = generation.engine.process_id().result(TIMEOUT_S)
    generation.submit([request("poison", prompt=[5, VOCAB_SIZE, 5])])
    engine, message = generation.sink.submit("wait_for_error", TIMEOUT_S).result(TIMEOUT_S)
    assert engine == "engine"
    assert "Error: " in message
    assert "\n" not in message
    with pytest.raises(ActorBroken) as caught:
        generation.call(generation.sink.submit("wait_for", ["never"], TIMEOUT_S))
    assert str(caught.value).startswith(f"actor 'engine' failed during stage 'test': {message}; its log is ")
    with pytest.raises(RayTaskError, match="engine 'engine' failed"):
        generation.engine.submit("stats").result(TIMEOUT_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayActorError):
        generation.engine.submit("stats").result(TIMEOUT_S)


def test_the_head_sizes_that_a_configuration_may_have_on_the_cpu_are_vllms() -> None:
    """Read from its source, since loading it takes long."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    (backend,) = (
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "CPUAttentionBackend"
    )
    (sizes,) = (
        ast.literal_eval(statement.value)
        for function in backend.body
        if isinstance(function, ast.FunctionDef) and function.name == "get_supported_head_sizes"
        for statement in function.body
        if isinstance(statement, ast.Return) and statement.value is not None
    )
    assert tuple(sizes) == CPU_HEAD_SIZES
