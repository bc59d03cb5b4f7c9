"""The main function of the process in which a program of the policy runs, in one of three modes.

``stdin``   the program reads its input and prints, as if started by itself
``calls``   its functions are called by value: frames of (name, arguments, keywords) on stdin, replies on
            stdout
``shared``  the weaker way: tests come on stdin, and run in the same process

Except in mode ``shared``, the process holds no test, no expected value and no secret.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, BinaryIO

from nemo_like.environments.sandboxed.confine import confine


def main(mode: str, source_fd: str, user_id: str, limits: str, *package_folders: str) -> None:
    """Confine this process, then run the program whose source can be read from ``source_fd``."""
    confine(int(user_id), limits)
    with os.fdopen(int(source_fd), encoding="utf-8") as file:
        source = file.read()
    # The interpreter starts without its site module, whose search for packages takes longer than all the
    # rest; the next two lines make up for it.
    site.setquit()
    sys.path += package_folders
    if mode == "stdin":
        _run(source, "program.py", _new_main())
        return
    # What the program prints is thrown away; the two channels move to descriptors to which it cannot print.
    incoming, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    namespace = _new_main()
    _run(source, "program.py", namespace)
    if mode == "calls":
        _answer_calls(namespace, incoming, replies)
    else:
        token, _, tests = incoming.read().decode().partition("\n")
        _run(tests, "tests.py", namespace)
        replies.write(token.encode())
        replies.close()


def _new_main() -> dict[str, Any]:
    """Return the namespace of a fresh ``__main__``, which has nothing of this module."""
    module = ModuleType("__main__")
    module.__file__ = "program.py"
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    return module.__dict__


def _run(source: str, name: str, namespace: dict[str, Any]) -> None:
    exec(compile(source, name, "exec", dont_inherit=True), namespace)


def _answer_calls(namespace: dict[str, Any], calls: BinaryIO, replies: BinaryIO) -> None:
    from nemo_like.environments.sandboxed import plain_data

    while True:
        try:
            name, arguments, named = plain_data.decode(plain_data.read_frame(calls))
        except EOFError:
            return
        reply = _reply(namespace, name, arguments, named)
        try:
            plain_data.write_frame(replies, reply)
        except plain_data.NotPlain as refused:
            plain_data.write_frame(replies, {"object": str(refused)})


def _reply(namespace: dict[str, Any], name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """Call a function of the program and put its result, or its exception, into a reply."""
    from nemo_like.environments.sandboxed import plain_data

    try:
        if name not in namespace:
            raise NameError(f"name {name!r} is not defined")
        value = namespace[name](*arguments, **named)
        return {"value": plain_data.encode(value, simplify=plain_data.lenient)}
    except plain_data.NotPlain as refused:
        return {"object": str(refused)}
    except BaseException as error:
        # Tests expect exceptions by their class: the nearest class that is Python's own stands for this one.
        classes = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        try:
            values = plain_data.encode(list(error.args), simplify=plain_data.lenient)
        except Exception:
            values = [str(error)]
        return {"raised": classes, "arguments": values}
