"""An engine that keeps a log of its own of what it read and sampled."""

from __future__ import annotations

from typing import Any

from vllm import RequestOutput

from nemo_like.generation.vllm_engine import VllmEngine


class LoggingEngine(VllmEngine):
    """To be hosted in the place of ``VllmEngine``."""

    def __init__(self, **kwargs: Any) -> None:
        self._log: list[dict[str, Any]] = []
        super().__init__(**kwargs)
        self._thread.call(self._watch)

    def take_log(self) -> list[dict[str, Any]]:
        """What vLLM returned since the last call: the tokens of each prompt and of its responses."""

        def take() -> list[dict[str, Any]]:
            taken, self._log = self._log, []
            return taken

        return self._thread.call(take)

    def _watch(self) -> None:
        step = self._vllm.llm.step

        def watched() -> list[RequestOutput]:
            outputs = step()
            self._log += [_entry(one) for one in outputs if one.finished]
            return outputs

        self._vllm.llm.step = watched  # type: ignore[method-assign]


def _entry(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": list(output.prompt_token_ids or ()),
        "responses": [list(one.token_ids) for one in output.outputs],
        "ranks": [list(one.logprobs.ranks) for one in output.outputs],  # type: ignore[union-attr]
    }
