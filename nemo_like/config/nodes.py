"""Makes OmegaConf's nodes of trees of plain values.

That takes ten times as long as to read nodes from a pickle. So pickles are kept, and the nodes of a tree or a
group of keys that is equal to an earlier one are read.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf


def config_of(tree: Mapping[str, Any]) -> DictConfig:
    """Return what ``OmegaConf.create(tree)`` returns."""
    groups = {name: keys for name, keys in tree.items() if isinstance(keys, dict)}
    nodes = {name: _read(_config(pickle.dumps(keys))) for name, keys in groups.items()}
    return OmegaConf.create({**tree, **nodes}, flags={"no_deepcopy_set_nodes": True})


def merged(trees: Sequence[Mapping[str, Any]]) -> DictConfig:
    """Return the merge of ``trees``, in which a later one wins over those before it."""
    return _read(_merge(pickle.dumps(trees)))


def _read(pickled: bytes) -> DictConfig:
    return pickle.loads(pickled)


@lru_cache(maxsize=256)
def _config(tree: bytes) -> bytes:
    return pickle.dumps(config_of(pickle.loads(tree)))


@lru_cache(maxsize=64)
def _merge(trees: bytes) -> bytes:
    return pickle.dumps(OmegaConf.unsafe_merge({}, *map(OmegaConf.create, pickle.loads(trees))))
