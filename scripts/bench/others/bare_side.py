"""The least that a step can take with these libraries, in ``against_others.py``: vLLM's ``generate``, then
the forward and backward passes and AdamW of a plain loop, in one process. Its weights stay in the trainer."""

from __future__ import annotations

import os

import torch

from nemo_like.configuration import Config, load_config
from nemo_like.data.interface import TaskPrompt
from nemo_like.policy.options import Device
from scripts.bench.others.turns import SideTurns, side_arguments
from scripts.bench.plain_loop import PlainLoop, Rollout


def main() -> None:
    options = side_arguments(__doc__)
    cfg = load_config(options.config, options.overrides)
    assert cfg.policy.device is Device.cpu, "the plain loop trains on CPUs"
    loop = BareLoop(cfg, int(os.environ["OMP_NUM_THREADS"]))
    turns = SideTurns(options.pipe, lambda: float("nan"))
    while turns.is_open:
        loop.step()
        turns.step_ended(loop.new_tokens)


class BareLoop(PlainLoop):
    """A plain loop that samples by vLLM."""

    def __init__(self, cfg: Config, num_threads: int) -> None:
        from vllm import LLM, SamplingParams

        super().__init__(cfg, num_threads)
        self._llm = LLM(
            model=cfg.policy.model_name,
            max_model_len=cfg.policy.max_total_sequence_length,
            max_num_seqs=cfg.grpo.num_samples_per_step,
            enforce_eager=cfg.generation.vllm_cfg.enforce_eager,
            seed=cfg.grpo.seed,
        )
        self._sampling = SamplingParams(
            n=cfg.grpo.num_generations_per_prompt,
            temperature=cfg.generation.temperature,
            max_tokens=cfg.generation.max_new_tokens,
            logprobs=0,
        )
        self.new_tokens = 0  # of the latest step

    def _generate(self, examples: list[TaskPrompt]) -> Rollout:
        """Sample once per prompt of a group, ``n`` responses each."""
        distinct = examples[:: self.cfg.grpo.num_generations_per_prompt]
        prompts = [{"prompt_token_ids": list(self._encoded(example))} for example in distinct]
        outputs = self._llm.generate(prompts, self._sampling, use_tqdm=False)
        rows = [(output.prompt_token_ids, one) for output in outputs for one in output.outputs]
        self.new_tokens = sum(len(one.token_ids) for _, one in rows)
        left = max(len(prompt) for prompt, _ in rows)
        right = max(len(one.token_ids) for _, one in rows)
        tokens = torch.full((len(rows), left + right), self.tokenizer.pad_token_id)
        attention = torch.zeros_like(tokens)
        logprobs = torch.zeros(len(rows), right)
        for row, (prompt, one) in enumerate(rows):
            begin, end = left - len(prompt), left + len(one.token_ids)
            tokens[row, begin:end] = torch.tensor([*prompt, *one.token_ids])
            attention[row, begin:end] = 1
            scores = [at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)]
            logprobs[row, : len(scores)] = torch.tensor(scores)
        return Rollout(tokens, attention, attention[:, left:].float(), logprobs)

    def _encoded(self, example: TaskPrompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_prompts([example.prompt], [example.tools], [example.template])[0])
