"""Finds the program's functions that tests call, and refuses tests that cannot work with calls by value.

It reads only the tests, before anything runs: whether they are refused must not depend on the program.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections import Counter
from collections.abc import Iterator

from nemo_like.environments.sandboxed.plain_data import PLAIN_TYPES
from nemo_like.environments.sandboxed.remote_program import RefusedTests

# Modules that show or change objects of their process, or its files; modules that run code which a program
# returned; and modules that wait for its coroutines.
_SHARING_MODULES = {
    *(
        "asyncio",
        "builtins",
        "cloudpickle",
        "ctypes",
        "dill",
        "gc",
        "importlib",
        "inspect",
        "marshal",
        "mock",
    ),
    *("multiprocessing", "pickle", "runpy", "shelve", "sqlite3", "subprocess", "tempfile", "tracemalloc"),
    "weakref",
}
_SHARING_NAMES = {"__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "locals", "open"}
_REDIRECTS = {"redirect_stderr", "redirect_stdout"}
_LOOK_INSIDE = {
    *("assertIsInstance", "delattr", "dir", "getattr", "hasattr", "isinstance", "issubclass", "setattr"),
    *("type", "vars"),
}
_EXPECT_EXCEPTIONS = {"assertRaises", "assertRaisesRegex", "raises", "suppress"}
_MODULE_NAMES = {"__name__", "__file__", "__doc__", "__builtins__", "__debug__", "__annotations__"}
_PLAIN_ATTRIBUTES = {name for kind in (*PLAIN_TYPES, type(iter([]))) for name in dir(kind)}
_CATCHES = (ast.Try, ast.With)


def functions_called(tests: str) -> frozenset[str]:
    """Return the names that the tests use but neither they nor Python define: the program's functions.

    Raises RefusedTests, naming the line, when the tests need more than plain values from these functions.
    """
    try:
        tree = ast.parse(tests, "tests")
        names = _undefined_names(symtable.symtable(tests, "tests", "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RefusedTests(f"they are no Python program: {error}") from None
    if not names:
        raise RefusedTests(
            "they call no function of the program (Python's own names are never the program's)"
        )
    rules = _Rules(tree, names)
    for node in ast.walk(tree):
        for complaint in rules.complaints(node):
            raise RefusedTests(f"line {getattr(node, 'lineno', 1)}: {complaint}")
    return names


def _undefined_names(top: symtable.SymbolTable) -> frozenset[str]:
    defined, used = set(dir(builtins)) | _MODULE_NAMES, set()
    for table in _tables(top):
        for symbol in table.get_symbols():
            # At the top every name is global; in functions, each that no enclosing function binds.
            is_global = table is top or symbol.is_global()
            if is_global and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                defined.add(symbol.get_name())
            if is_global and symbol.is_referenced():
                used.add(symbol.get_name())
    return frozenset(used - defined)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


class _Rules:
    """The rules that each node of the test program must keep, with the names that they need from the whole
    program."""

    def __init__(self, tree: ast.Module, names: frozenset[str]) -> None:
        self._names = names
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self._imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        self._defined = {node.name for node in defined}
        self._callees = names | self._aliases(tree)
        self._results = self._names_of_results(tree)

    def complaints(self, node: ast.AST) -> Iterator[str]:
        """Yield why this node needs more than plain values."""
        if isinstance(node, ast.Import):
            yield from self._sharing_modules(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full_names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from self._sharing_modules(full_names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield from self._use_of_name(node)
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield from self._change(node)
        elif isinstance(node, ast.Attribute):
            yield from self._use_of_attribute(node)
        elif isinstance(node, ast.Call) and self._is_call(node):
            yield from self._shared_arguments(node)
        elif isinstance(node, ast.Expr) and self._is_call(node.value):
            yield from self._changes_in_place(node.value)
        elif isinstance(node, ast.Await) and self._is_call(node.value):
            yield "they await what a function returns"

    def _aliases(self, tree: ast.Module) -> set[str]:
        """Return the parameters and variables of the tests that also name the program's functions."""
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and self._is_name(node.value):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                parameters = functions[node.func.id].args.args
                pairs = zip(parameters, node.args, strict=False)
                found |= {parameter.arg for parameter, given in pairs if self._is_name(given)}
                found |= {word.arg for word in node.keywords if word.arg and self._is_name(word.value)}
        return found

    def _names_of_results(self, tree: ast.Module) -> set[str]:
        """Return the variables that only ever hold results of the program's functions."""
        stored = Counter(
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        from_calls = Counter(
            node.targets[0].id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and self._is_call(node.value)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        )
        return {name for name, count in from_calls.items() if count == stored[name]}

    def _is_name(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self._names

    def _is_call(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self._callees
        )

    def _sharing_modules(self, names: Iterator[str]) -> Iterator[str]:
        for name in names:
            package, last = name.partition(".")[0], name.rpartition(".")[2]
            if package in _SHARING_MODULES or name.startswith("unittest.mock") or last in _REDIRECTS:
                yield f"they import {name}"

    def _use_of_name(self, node: ast.Name) -> Iterator[str]:
        if node.id in _SHARING_NAMES and node.id not in self._defined:
            yield f"they use {node.id}"
        if not self._is_name(node):
            return
        parent = self._parents[node]
        if isinstance(parent, ast.keyword):
            parent = self._parents[parent]
        if isinstance(parent, ast.Call):
            called = ast.unparse(parent.func).rpartition(".")[2]
            is_expected = called in _EXPECT_EXCEPTIONS and node in parent.args[:1]
            if parent.func is not node and (called in _LOOK_INSIDE or is_expected):
                yield f"they give {node.id} to {called}, as if it were a class of theirs"
        elif isinstance(parent, ast.Attribute):
            yield f"they use {node.id}.{parent.attr}, and {node.id} is not theirs (a module must be imported)"
        elif not isinstance(parent, ast.Assign | ast.List | ast.Tuple | ast.Dict | ast.Set | ast.Return):
            yield f"they use {node.id} otherwise than by calling it, and do not define it"

    def _use_of_attribute(self, node: ast.Attribute) -> Iterator[str]:
        if node.attr in _REDIRECTS:
            yield f"they use {node.attr}"
        is_result = isinstance(node.value, ast.Name) and node.value.id in self._results
        if (is_result or self._is_call(node.value)) and node.attr not in _PLAIN_ATTRIBUTES:
            yield f"they use the attribute {node.attr} of what a function returned"

    def _change(self, node: ast.Attribute | ast.Subscript) -> Iterator[str]:
        root: ast.AST = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if isinstance(root, ast.Name) and root.id in self._imported:
            yield f"they change {ast.unparse(node)}, which the program does not see"

    def _shared_arguments(self, call: ast.Call) -> Iterator[str]:
        for given in (*call.args, *(word.value for word in call.keywords)):
            name = given.id if isinstance(given, ast.Name) else None
            if isinstance(given, ast.Lambda) or name in self._defined:
                yield f"they pass a function or class to {ast.unparse(call.func)}"
            elif name in self._callees:
                yield f"they pass the function {name} to {ast.unparse(call.func)}"

    def _changes_in_place(self, call: ast.AST) -> Iterator[str]:
        """Yield a complaint for a call whose value is not used, and which so must be there to change its
        argument.

        There is none when an exception may be expected, or when no argument is a variable.
        """
        assert isinstance(call, ast.Call)
        node: ast.AST | None = call
        while node is not None and not isinstance(node, _CATCHES):
            node = self._parents.get(node)
        if node is None and any(isinstance(given, ast.Name) for given in call.args):
            function = ast.unparse(call.func)
            yield (
                f"they call {function} for what it does to its argument, which is a copy "
                f"(if only the call matters, write _ = {function}(...))"
            )
