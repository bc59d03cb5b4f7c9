"""Environments of OpenEnv, behind their servers: each episode has its own connection, and so its own
session."""

from __future__ import annotations

import json
from typing import Any

from hub_interface import HubFailure, HubPrompt, TurnOutcome, last_match
from openenv.core.generic_client import GenericEnvClient

_RESPONSE = "{response}"


class OpenEnvHub:
    """One server of OpenEnv."""

    def __init__(
        self,
        base_url: str,
        action: dict[str, Any],
        action_pattern: str | None,
        reset_arguments: dict[str, Any],
        observation_key: str | None,
        prompt_template: str,
        observation_template: str,
        message_timeout_s: float,
    ) -> None:
        """Keep the options; nothing is sent yet."""
        self._url, self._timeout_s = base_url, message_timeout_s
        self._action, self._pattern = action, action_pattern
        self._reset, self._key = reset_arguments, observation_key
        self._prompt, self._observation = prompt_template, observation_template

    async def prompts(self, size: int, seed: int) -> list[HubPrompt]:
        prompts = []
        for number in range(seed, seed + size):
            episode = await self.open({"seed": number})
            prompts.append(
                HubPrompt(self._prompt.replace("{observation}", episode.beginning), {"seed": number})
            )
            await episode.close()
        return prompts

    async def open(self, data: dict[str, Any]) -> OpenEnvEpisode:
        client = GenericEnvClient(
            self._url, connect_timeout_s=self._timeout_s, message_timeout_s=self._timeout_s, mode="simulation"
        )
        try:
            result = await client.reset(seed=data["seed"], **self._reset)
            return OpenEnvEpisode(self, client, self._text(result.observation))
        except (ConnectionError, OSError, TimeoutError) as error:
            await client.disconnect()
            raise self._unreachable(error) from error
        except BaseException:
            await client.disconnect()
            raise

    async def sent(self, client: Any, response: str) -> TurnOutcome:
        """Send a response as an action, and return the outcome."""
        found = last_match(self._pattern, response)
        try:
            result = await client.step(_filled(self._action, "" if found is None else found))
        except (ConnectionError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error
        observation = self._observation.replace("{observation}", self._text(result.observation))
        return TurnOutcome(observation, {"reward": float(result.reward or 0.0)}, bool(result.done))

    def _unreachable(self, error: Exception) -> HubFailure:
        return HubFailure(
            "unreachable", f"the OpenEnv server at {self._url} gave {type(error).__name__}: {error}"
        )

    def _text(self, observation: dict[str, Any]) -> str:
        if self._key is None:
            return json.dumps(observation)
        if self._key not in observation:
            there = ", ".join(sorted(observation))
            raise HubFailure("malformed", f"an observation has no {self._key!r}; there are: {there}")
        value = observation[self._key]
        return value if isinstance(value, str) else json.dumps(value)


class OpenEnvEpisode:
    """One session of the server."""

    def __init__(self, hub: OpenEnvHub, client: Any, beginning: str) -> None:
        self._hub, self._client, self.beginning = hub, client, beginning

    async def step(self, response: str, is_last: bool) -> TurnOutcome:
        return await self._hub.sent(self._client, response)

    async def close(self) -> None:
        await self._client.disconnect()


def _filled(template: Any, response: str) -> Any:
    """Return the action: the template with the response in place of {response} in every text."""
    if isinstance(template, dict):
        return {key: _filled(value, response) for key, value in template.items()}
    if isinstance(template, list):
        return [_filled(value, response) for value in template]
    return template.replace(_RESPONSE, response) if isinstance(template, str) else template
