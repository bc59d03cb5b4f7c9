"""The kind ``custom``: an environment of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.environments.kind import Kind, OwnCode


@dataclass(kw_only=True, slots=True)
class CustomOptions:
    """The user's class or function: ``target(**arguments)`` makes an ``Environment``."""

    target: Annotated[str, Key("package.module:Class")]
    arguments: Annotated[dict[str, Any], Key("of the class, by name", {})]


KIND = Kind(
    about="An environment of your own: target(**arguments) implements "
    "nemo_like.environments.interface.Environment, or is an environment of NeMo-RL.",
    reward="what an environment of yours says",
    example="`{target: my_tasks:Negotiation}`",
    options=CustomOptions,
    base={"batch_size": Key("", 16)},
    judge="nemo_like.environments.user_code:custom",
    own_code=OwnCode("target", makes_environment=True),
)
