"""Environments with NeMo-RL's interface, which the kind ``custom`` runs without changes.

    step(message_log_batch, metadata)
        ──▶ observations, metadata, next_stop_strings, rewards, terminateds, answers

An environment is NeMo-RL's when its method ``step`` has the parameter ``message_log_batch``. Metadata begins
as the record's field ``extra_env_info``, or else as all of its fields with ``ground_truth``, and travels with
the conversation. ``global_post_process_and_metrics`` is not called: metrics here are means over turns.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like.config.import_path import load_by_path
from nemo_like.data.messages import as_record
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.nemo_rl_names import add_nemo_rl_names


def load_environment(path: str) -> Any:
    """Import the class or function that makes an environment; of an actor class of Ray, the class itself.

    Raises what ``load_by_path`` raises. A module may import the interfaces of NeMo-RL where that is not
    installed.
    """
    add_nemo_rl_names()
    found = load_by_path(path)
    return getattr(getattr(found, "__ray_metadata__", None), "modified_class", found)


def is_of_nemo_rl(environment: Any) -> bool:
    """Return whether an environment has NeMo-RL's method ``step``."""
    return "message_log_batch" in inspect.signature(environment.step).parameters


@dataclass(frozen=True, slots=True)
class _State:
    """What an environment of NeMo-RL left for the next turn."""

    metadata: Any
    stop_strings: tuple[str, ...]


class NemoRlEnvironment:
    """Asks an environment of NeMo-RL about turns."""

    columns_written = ()

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order.

        Raises what the environment raises, and ValueError for a response that goes on after a stop string
        that the environment asked for.
        """
        for turn in turns:
            _check_stop(turn)
        before = [_metadata(turn) for turn in turns]
        answer = self._environment.step([_message_log(turn) for turn in turns], before)
        observations, metadata, stops, rewards, terminated, *_ = (
            await answer if inspect.isawaitable(answer) else answer
        )
        given = _components(rewards)
        ends = _plain(terminated)
        feedback = []
        for index, turn in enumerate(turns):
            components = {name: values[index] for name, values in given.items()}
            if ends[index] or turn.is_last:
                feedback.append(Feedback(components))
                continue
            # Metadata of None leaves what was before, as in NeMo-RL.
            kept = before[index] if metadata[index] is None else metadata[index]
            state = _State(kept, tuple((stops[index] if stops else None) or ()))
            said = observations[index]["content"]
            feedback.append(Feedback(components, observation=said, is_done=False, state=state))
        return feedback


def _components(rewards: Any) -> dict[str, list[Any]]:
    """Return the components of a batch's rewards, a tensor or named tensors."""
    named = rewards if isinstance(rewards, dict) else {"reward": rewards}
    return {name: _plain(values) for name, values in named.items()}


def _plain(values: Any) -> list[Any]:
    """Return a tensor's values, or those of a sequence, as a list."""
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _metadata(turn: Turn) -> Any:
    if isinstance(turn.state, _State):
        return turn.state.metadata
    given = turn.data.get("extra_env_info")
    return given if given is not None else {**turn.data, "ground_truth": turn.answer}


def _check_stop(turn: Turn) -> None:
    """Raise ValueError when the environment asked for a stop string and the response goes on after it."""
    wanted = turn.state.stop_strings if isinstance(turn.state, _State) else ()
    for text in wanted:
        if (after := turn.response.partition(text)[2]).strip():
            raise ValueError(
                f"the environment ends responses with {text!r}, and one goes on with {after[:40]!r}; stop "
                f"strings are the run's: set generation.stop_strings={list(wanted)}"
            )


def _message_log(turn: Turn) -> list[dict[str, Any]]:
    """Return the whole conversation as messages, with observations of the role ``environment``."""
    prompt = as_record(turn.prompt)
    log = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    for each in turn.history:
        log.append({"role": "assistant", "content": each.response})
        log.append({"role": "environment", "content": each.observation})
    return [*log, {"role": "assistant", "content": turn.response}]
