"""Games of TextArena: the policy is player 0, and a user's function plays the other players."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import textarena
from hub_interface import HubFailure, HubPrompt, OwnRandomness, TurnOutcome

_POLICY = 0  # the player that the policy is
_MAX_OPPONENT_MOVES = 1000  # in a row


class TextArenaHub:
    """One game of TextArena's registry."""

    def __init__(
        self, env_id: str, arguments: dict[str, Any], num_players: int, opponent: str | None
    ) -> None:
        """Begin a game once, so that a wrong id or argument is noticed at the start.

        ``opponent``, ``module:function``, returns another player's move for the text that this player sees.
        """
        self.env_id, self.arguments, self.num_players = env_id, arguments, num_players
        self.opponent: Callable[[str], str] | None = None
        if opponent is not None:
            module, _, name = opponent.partition(":")
            self.opponent = getattr(importlib.import_module(module), name)
        TextArenaEpisode(self, 0)

    async def prompts(self, size: int, seed: int) -> list[HubPrompt]:
        return [
            HubPrompt(TextArenaEpisode(self, number).beginning, {"seed": number})
            for number in range(seed, seed + size)
        ]

    async def open(self, data: dict[str, Any]) -> TextArenaEpisode:
        return TextArenaEpisode(self, int(data["seed"]))


class TextArenaEpisode:
    """One game."""

    def __init__(self, hub: TextArenaHub, seed: int) -> None:
        self._hub, self._randomness = hub, OwnRandomness(seed)
        self._seen: dict[int, str] = {}  # by player: all that was shown
        self._is_done = False
        with self._randomness.active():
            self._env = textarena.make(env_id=hub.env_id, **hub.arguments)
            self._env.reset(num_players=hub.num_players, seed=seed)
            self.beginning = self._until_policy()

    async def step(self, response: str, is_last: bool) -> TurnOutcome:
        with self._randomness.active():
            self._is_done, _ = self._env.step(action=response)
            observation = "" if self._is_done else self._until_policy()
            if not self._is_done and not is_last:
                return TurnOutcome(observation)
            rewards, info = self._env.close()
        of_policy = (info or {}).get(_POLICY, {})
        metrics = {"invalid_move": float(bool(of_policy.get("invalid_move"))), "ended": float(self._is_done)}
        reward = float((rewards or {}).get(_POLICY, 0.0)) if self._is_done else 0.0
        return TurnOutcome("", {"reward": reward}, self._is_done, metrics)

    async def close(self) -> None:
        """Do nothing: a game holds nothing but memory."""

    def _until_policy(self) -> str:
        """Let the other players move until it is the policy's turn; return the text that the policy has not
        seen yet."""
        for _ in range(_MAX_OPPONENT_MOVES):
            player, shown = self._env.get_observation()
            new = self._new(player, str(shown))
            if player == _POLICY:
                return new
            if self._hub.opponent is None:
                raise HubFailure("raised", f"it is the turn of player {player}; name options.opponent")
            self._is_done, _ = self._env.step(action=self._hub.opponent(str(shown)))
            if self._is_done:
                return ""
        raise HubFailure("raised", f"the policy had no turn in {_MAX_OPPONENT_MOVES} moves")

    def _new(self, player: int, shown: str) -> str:
        """Return the new part of an observation: in most games it begins with all earlier text."""
        before = self._seen.get(player, "")
        self._seen[player] = shown
        return shown[len(before) :] if shown.startswith(before) else shown
