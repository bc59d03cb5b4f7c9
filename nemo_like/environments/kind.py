"""The description of a kind of environment; each kind has a file with one.

    kinds/exact_match.py    KIND = Kind(about=..., options=ExactMatchOptions, judge="module:factory", ...)

Code that is the same for all kinds reads these fields from ``registry.kind_of(env)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.environments.shared_options import AgentOptions, HubOptions, ModelOptions, NoOptions

if TYPE_CHECKING:
    from nemo_like.data.interface import TaskPrompt
    from nemo_like.environments.options import EnvConfig

# Called with a prompt and its data; raises ValueError when the environment could not judge a response.
RecordCheck = Callable[["TaskPrompt"], None]


@dataclass(frozen=True, slots=True)
class OwnCode:
    """The option that names a user's own code: a function of a turn, or a function or class that makes an
    ``Environment``."""

    option: str
    makes_environment: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of environment.

    about: its rewards, in whole sentences, as the head of its file in ``configs/env``.
    reward, example: its reward in a few words, and options as an example. They are its row in
        docs/how_to/environments.md, so a shipped kind has both; another needs neither.
    options: the class of ``env.<name>.options``. A subclass of ``HubOptions``, ``ModelOptions`` or
        ``AgentOptions`` makes the environment a hub, a reward model or an agent.
    base: the keys of ``EnvConfig`` for which it has other defaults.
    judge: import path of the function or class that makes the ``Environment`` from the options; "" when
        other environments judge.
    record_check: import path of a function that makes a ``RecordCheck`` from the options; None: no check.
    problems: called with the name of an environment and all environments by name, after its options were
        found to be there and of the right types; yields what is wrong with that one.
    machine_problems: yields a problem for everything that this machine lacks for the environment of a name.
    package: a module that the run's interpreter needs, and the name of its package for pip.
    answers: a response may get an observation instead of a reward, so that another turn follows.
    components: the option that maps the names of other environments, whose sum this kind is, to weights.
    last_judge: the option with the name of the environment that judges the last response.
    call_pattern: the option with a regular expression, group 1 of whose matches is a tool call in JSON.
    tools: import path of a function that lists the tools of its options, for the chat template.
    own_code: the user's code that its options name.
    start_remedy: what to do when its first question gets no reward; ``{env}`` is the environment's name.
    is_harmless: too simple to hang or crash, so that it needs no process that can be replaced.
    max_processes: how many processes of one actor may judge side by side, when turns are asked about alone.
    start_timeout_s: deadline for building it in a new process, with imports and loading.
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
    call_pattern: str | None = None
    tools: str | None = None
    own_code: OwnCode | None = None
    start_remedy: str = "correct the environment or its options, or the problem"
    is_harmless: bool = False
    max_processes: int = 8
    start_timeout_s: float = 120.0

    @property
    def is_hub(self) -> bool:
        """Whether a package plays its episodes, in a process that keeps them between turns."""
        return issubclass(self.options, HubOptions)

    @property
    def loads_model(self) -> bool:
        """Whether each of its actors loads a model, perhaps on a GPU."""
        return issubclass(self.options, ModelOptions)

    @property
    def is_asked_here(self) -> bool:
        """Whether the machine on which a run begins asks it for prompts or tools."""
        return self.is_hub or self.tools is not None

    @property
    def calls_policy(self) -> bool:
        """Whether an agent calls the policy; other kinds only judge its responses."""
        return issubclass(self.options, AgentOptions)
