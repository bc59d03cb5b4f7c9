"""Finds in the source where it uses what another project keeps to itself: by reading, without importing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Underscored, and documented all the same: of Python's os module, and of its named tuples.
_DOCUMENTED = {"_exit", "_replace"}
# Modules that no documentation of their projects describes: whatever is imported from them counts.
UNDOCUMENTED = (
    "hydra.core",
    "megatron.core.dist_checkpointing.strategies",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.moe",
    "tensorboard.compat",
    "tensorboard.summary.writer",
    "torch.distributed.distributed_c10d",
    "torch.multiprocessing.reductions",
    "transfer_queue.client",
    "transfer_queue.controller",
    "transfer_queue.metadata",
    "transfer_queue.storage",
    "transfer_queue.utils",
    "transformers.core_model_loading",
    "transformers.pytorch_utils",
    "vllm.distributed.weight_transfer.factory",
    "vllm.model_executor",
)

Nodes = tuple[ast.AST, ...]  # of a module


@dataclass(frozen=True, slots=True, order=True)
class ReachIn:
    """``name`` of something that is not ours, in a file below the package's directory."""

    file: str
    name: str


def reach_ins(package: Path, *beside: Path) -> set[ReachIn]:
    """Return every reach-in of a package: private names, assignments to another project's objects, imports
    of undocumented modules, and methods that replace a private one of another project's class. What the
    packages ``beside`` it define is of the same project."""
    own = {name for one in (package, *beside) for nodes in _modules(one).values() for name in _defined(nodes)}
    found = set()
    for path, nodes in _modules(package).items():
        module = _Module(nodes, own, package.name)
        found |= {ReachIn(path.relative_to(package).as_posix(), name) for name in module.names()}
    return found


@cache
def _modules(package: Path) -> dict[Path, Nodes]:
    """Return the nodes of each module of a package, which are walked once for all that is asked of them."""
    files = sorted(package.rglob("*.py"))
    return {path: tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in files}


class _Module:
    def __init__(self, nodes: Nodes, own: set[str], package: str) -> None:
        self._nodes, self._own = nodes, own
        others = {
            alias: path
            for alias, path in _imported(nodes)
            if path.split(".")[0] not in {*sys.stdlib_module_names, package}
        }
        self._others, self._package = others, package
        self._internals = {alias for alias, module in others.items() if _is_internal(module)}
        self._called = {node.attr for node in nodes if _is_of_self(node, or_super=False)}

    def names(self) -> Iterator[str]:
        for node in self._nodes:
            match node:
                case ast.Attribute():
                    yield from self._attribute(node)
                case ast.keyword(arg=str(name)) if _is_private(name):
                    yield name
                case ast.alias() if (node.asname or node.name) in self._internals:
                    yield node.asname or node.name
                case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr")):
                    yield from self._by_name(node)
                case ast.ClassDef():
                    yield from self._replaced_methods(node)

    def _attribute(self, node: ast.Attribute) -> Iterator[str]:
        if isinstance(node.ctx, ast.Store) and self._is_of_others(node.value):
            yield node.attr
        elif _is_private(node.attr):
            if not (_is_of_self(node) and node.attr in self._own):
                yield node.attr
        elif not node.attr.startswith("__") and self._is_internal(node.value):
            yield node.attr

    def _by_name(self, call: ast.Call) -> Iterator[str]:
        owner, name = call.args[:2]
        assert isinstance(call.func, ast.Name)
        if isinstance(name, ast.Constant) and _is_private(name.value):
            yield name.value
        elif call.func.id == "setattr" and self._is_of_others(owner):
            yield ast.unparse(owner)

    def _replaced_methods(self, node: ast.ClassDef) -> Iterator[str]:
        """Private methods of a class of another project's kind that nobody here calls: it does."""
        if any(self._is_of_others(base) for base in node.bases):
            methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            yield from (name for name in methods if _is_private(name) and name not in self._called)

    def _is_internal(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._internals

    def _is_of_others(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._others


def _is_private(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__ray_")  # Ray's own; other names of this form are Python's
    return name.startswith("_") and name not in {"_", *_DOCUMENTED}


def _is_internal(path: str) -> bool:
    """Whether a dotted path has a private part, or leads into an undocumented module."""
    return any(_is_private(part) for part in path.split(".")) or path.startswith(UNDOCUMENTED)


def _is_of_self(node: ast.AST, *, or_super: bool = True) -> bool:
    """Whether it is ``self.name`` or ``cls.name``, or else ``super().name``."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return True
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            return or_super
    return False


def _imported(nodes: Nodes) -> Iterator[tuple[str, str]]:
    """Yield each imported name with the dotted path that it stands for."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                yield alias.asname or root, alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _defined(nodes: Nodes) -> Iterator[str]:
    """Yield the private names that a module defines: methods, functions, attributes and fields."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) if _is_of_self(node):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Call(func=ast.Attribute(attr="__setattr__"), args=[_, ast.Constant(value=str(name)), _]):
                yield name
