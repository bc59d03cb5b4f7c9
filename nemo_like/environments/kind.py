"""What is known of a kind of environment beside what judges: one file for each kind describes it so.

    kinds/exact_match.py    KIND = Kind(about=..., options=ExactMatchOptions, judge="module:factory", ...)

What knows no kind asks these fields: ``registry.kind_of(env)`` has those of an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.environments.shared_options import AgentOptions, HubOptions, ModelOptions, NoOptions

if TYPE_CHECKING:
    from nemo_like.data.interface import PromptExample
    from nemo_like.environments.options import EnvConfig

# Called with a problem; raises ValueError when the environment could not judge it.
RecordCheck = Callable[["PromptExample"], None]


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The option that names a user's own code: a function of a turn, or what makes an ``Environment``."""

    option: str
    makes_environment: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of environment.

    about: what it rewards, in whole sentences, as the head of its file in ``configs/env``.
    reward, example: its row in the table of docs/environments.md: its reward, and options as an example.
    options: the class of ``env.<name>.options``. What builds on ``HubOptions``, ``ModelOptions`` or
        ``AgentOptions`` is served as a hub, a reward model or an agent is.
    base: the keys of ``EnvConfig`` for which it has other defaults.
    judge: import path of what makes the ``Environment`` from the options; "" where other environments judge.
    record_check: import path of what makes a ``RecordCheck`` from the options; None: nothing is checked.
    problems: yields what is wrong with the environment of a name among all of a configuration, whose options
        are of the right types.
    machine_problems: yields what this machine lacks for the environment of a name.
    package: a module that the run's interpreter needs, and what pip calls its package.
    answers: a response may get an observation in place of a reward, so that another turn follows.
    components: the option with the environments of which it is the sum, by name with their weights.
    last_judge: the option with the name of the environment that judges the response which ends.
    tools: import path of what lists the tools of its options, for the chat template.
    own_code: the user's code that its options name.
    start_remedy: what to do when its first question gets no reward; ``{env}`` is the environment's name.
    is_harmless: too simple to hang or crash, so that it needs no process that can be replaced.
    max_processes: how many processes of one actor may judge side by side, when turns are asked about alone.
    start_timeout_s: deadline of building it in a new process: of imports, and of what it loads.
    """

    about: str
    reward: str = ""
    example: str = "`{}`"
    options: type = NoOptions
    base: Mapping[str, Key] = field(default_factory=dict)
    judge: str = ""
    record_check: str | None = None
    problems: Callable[[str, Mapping[str, EnvConfig]], Iterator[Problem]] | None = None
    machine_problems: Callable[[str, EnvConfig], Iterator[Problem]] | None = None
    package: tuple[str, str] | None = None
    answers: bool = False
    components: str | None = None
    last_judge: str | None = None
    tools: str | None = None
    own_code: OwnCode | None = None
    start_remedy: str = "correct the environment or its options, or the problem"
    is_harmless: bool = False
    max_processes: int = 8
    start_timeout_s: float = 120.0

    @property
    def is_hub(self) -> bool:
        """Whether a package plays, in a process that has a conversation's episode."""
        return issubclass(self.options, HubOptions)

    @property
    def loads_model(self) -> bool:
        """Whether each of its actors loads a model, perhaps on a GPU."""
        return issubclass(self.options, ModelOptions)

    @property
    def is_asked_here(self) -> bool:
        """Whether the machine on which a run begins asks it for problems or tools."""
        return self.is_hub or self.tools is not None

    @property
    def calls_policy(self) -> bool:
        """Whether an agent calls the policy, where others judge its responses."""
        return issubclass(self.options, AgentOptions)
