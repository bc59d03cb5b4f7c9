"""Environments with the interface of Gymnasium, whose observations are text or rendered as text."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
from hub_interface import HubFailure, HubPrompt, OwnRandomness, TurnOutcome, last_match

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumHub:
    """One environment id of Gymnasium's registry; ``module:id`` imports the module that registers it
    first."""

    def __init__(
        self,
        env_id: str,
        arguments: dict[str, Any],
        action_pattern: str | None,
        actions: dict[str, Any],
        invalid_reward: float,
        prompt_template: str,
        observation_template: str,
    ) -> None:
        """Make the environment once, so that a wrong id or argument is noticed at the start."""
        self._id, self._arguments = env_id, arguments
        self._pattern, self._actions, self._invalid_reward = action_pattern, actions, invalid_reward
        self._prompt, self._observation = prompt_template, observation_template
        self.made().close()

    def made(self) -> Any:
        """Return a new environment. Raises the errors of ``gymnasium.make``."""
        return gymnasium.make(self._id, **self._arguments)

    async def prompts(self, size: int, seed: int) -> list[HubPrompt]:
        prompts = []
        for number in range(seed, seed + size):
            episode = GymnasiumEpisode(self, number)
            prompt = self._prompt.replace("{observation}", episode.beginning)
            prompts.append(HubPrompt(prompt, {"seed": number}))
            await episode.close()
        return prompts

    async def open(self, data: dict[str, Any]) -> GymnasiumEpisode:
        return GymnasiumEpisode(self, int(data["seed"]))

    def action(self, response: str, space: Any) -> Any:
        """Return the action that a response names, or None when the space has no such action."""
        found = last_match(self._pattern, response)
        if found is None:
            return None
        if self._actions:
            return self._actions.get(found)
        if isinstance(space, gymnasium.spaces.Text):
            return found if space.contains(found) else None
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise HubFailure(
                "raised", f"actions of {space} have no text of their own; name them in options.actions"
            )
        action = int(found) if found.lstrip("-").isdigit() else None
        return action if action is not None and space.contains(action) else None

    def shown(self, observation: str) -> str:
        """Return an observation in the form that the policy sees."""
        return self._observation.replace("{observation}", observation)

    def invalid(self, observation: str) -> TurnOutcome:
        """Return the outcome of a response without a valid action: the state stays as it was."""
        return TurnOutcome(
            self.shown(observation), {"reward": self._invalid_reward}, metrics={"valid_action": 0.0}
        )


class GymnasiumEpisode:
    """One episode, from the reset with ``seed``."""

    def __init__(self, hub: GymnasiumHub, seed: int) -> None:
        self._hub, self._randomness = hub, OwnRandomness(seed)
        with self._randomness.active():
            self._env = hub.made()
            observation, _ = self._env.reset(seed=seed)
        self.beginning = self._text = self._as_text(observation)

    async def step(self, response: str, is_last: bool) -> TurnOutcome:
        action = self._hub.action(response, self._env.action_space)
        if action is None:
            return self._hub.invalid(self._text)
        with self._randomness.active():
            observation, reward, is_terminated, is_truncated, _ = self._env.step(action)
        self._text = self._as_text(observation)
        is_done = bool(is_terminated or is_truncated)
        shown = self._hub.shown(self._text)
        return TurnOutcome(shown, {"reward": float(reward)}, is_done, metrics={"valid_action": 1.0})

    async def close(self) -> None:
        self._env.close()

    def _as_text(self, observation: Any) -> str:
        """Return the text that ``render_mode: ansi`` shows, without colours, or else the observation as
        text."""
        if self._env.render_mode == "ansi":
            return _COLOURS.sub("", str(self._env.render())).strip("\n")
        return observation if isinstance(observation, str) else str(observation)
