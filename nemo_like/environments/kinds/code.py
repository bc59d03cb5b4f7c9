"""The kind ``code``: programs, by tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.environments.bubblewrap import sandbox_problems
from nemo_like.environments.kind import Kind
from nemo_like.environments.shared_options import SandboxMode


@dataclass(kw_only=True, slots=True)
class CodeOptions:
    program_pattern: Annotated[
        str | None,
        Key("the last match's group 1 is run; null: the whole response", "```(?:python)?\\n(.*?)```"),
    ]
    tests_key: Annotated[
        str, Key("the example's field with tests: asserts, or a list of {input: ..., output: ...}", "tests")
    ]
    timeout_s: Annotated[float, Key("deadline of one program", 5.0, above=0)]
    memory_mib: Annotated[int, Key("limit for each process of a program", 512, above=0)]
    max_processes: Annotated[
        int, Key("limit for the processes and threads of one program together", 16, above=0)
    ]
    max_parallel: Annotated[int, Key("programs that one actor runs at the same time", 2, above=0)]
    share_objects: Annotated[
        bool,
        Key(
            "true: tests run in the program's own process, so that they can use its classes "
            "and callables; the program can then deceive them.",
            False,
        ),
    ]
    sandbox: Annotated[
        SandboxMode,
        Key(
            "programs run under bubblewrap; none: they can do whatever the run's user can",
            SandboxMode.required,
        ),
    ]
    readable_paths: Annotated[
        list[str],
        Key(
            "files and folders of the machine that programs may read, besides Python's own and /usr",
            [],
            is_path=True,
        ),
    ]


KIND = Kind(
    about="The response has a Python program, which runs in a sandbox. The reward is the "
    "share of tests that it passes.",
    reward="the share of its tests that a Python program passes",
    example="`{tests_key: tests, timeout_s: 5.0, memory_mib: 512}`",
    options=CodeOptions,
    base={"timeout_s": Key("", 120.0), "max_concurrency": Key("", 4), "batch_size": Key("", 8)},
    judge="nemo_like.environments.code:CodeEnvironment",
    record_check="nemo_like.environments.code:has_tests",
    machine_problems=sandbox_problems,
)
