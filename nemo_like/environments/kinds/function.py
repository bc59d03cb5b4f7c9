"""The kind ``function``: a reward function of the user's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.environments.kind import Kind, OwnCode


@dataclass(kw_only=True, slots=True)
class FunctionOptions:
    """A reward function: ``function(turn, **arguments)`` returns a number, a mapping of named numbers, or a
    ``Feedback``."""

    function: Annotated[str, Key("package.module:name")]
    arguments: Annotated[dict[str, Any], Key("of the function, by name", {})]


KIND = Kind(
    about="A function of your own gives the reward: function(turn, **arguments) returns a "
    "number, named numbers, a Feedback, or None for a response that it does not "
    "judge. One with verl's signature, compute_score(data_source, solution_str, "
    "ground_truth, extra_info), runs as it is.",
    reward="what a function of yours returns",
    example="`{function: my_rewards:brevity, arguments: {limit: 100}}`",
    options=FunctionOptions,
    base={"batch_size": Key("", 16)},
    judge="nemo_like.environments.user_code:function",
    own_code=OwnCode("function", makes_environment=False),
)
