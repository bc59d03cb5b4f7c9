"""What other frameworks call the keys of this one, for those who come from them. Standard library only.

``NAMES`` has, by framework, what each of its names is here. An earlier version of this framework counts as
another. The names of NeMo-RL and verl are full keys; those of TRL (``GRPOConfig`` and ``PPOConfig``) and
OpenRLHF (arguments) have no groups. The same tables feed scripts/convert_config.py and the pages
docs/from_*.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from nemo_like.config.frameworks.entries import Entry, Framework, heres, told
from nemo_like.config.frameworks.nemo_rl import NEMO_RL
from nemo_like.config.frameworks.openrlhf import OPENRLHF
from nemo_like.config.frameworks.trl import TRL
from nemo_like.config.frameworks.verl import VERL

# Of 1, for equal spelling.
_CLOSE = 0.85

_EARLIER = Framework(name="an earlier version", keys={"cluster.num_gpus": "cluster.gpus_per_node"})
NAMES: Mapping[str, Mapping[str, Entry]] = {
    framework.name: framework.keys for framework in (_EARLIER, NEMO_RL, VERL, TRL, OPENRLHF)
}


class KnownName(NamedTuple):
    """What a name of another framework is here."""

    framework: str
    name: str
    entry: Entry

    @property
    def here(self) -> str:
        """The key that it is here, or key=value; empty for none."""
        if isinstance(self.entry, str):
            return self.entry
        return next((each.key for each in heres(self.entry)), "")

    def __str__(self) -> str:
        return f"{self.framework}'s {self.name} {told(self.entry)}"


def known_name(key: str) -> KnownName | None:
    """Return what ``key`` means to another framework: as it stands, by a group of theirs that has no
    counterpart, or by its last part where that is a name without groups; None when none has such a name."""
    for framework, names in NAMES.items():
        if key in names:
            return KnownName(framework, key, names[key])
    for group in _groups(key):
        for framework, names in NAMES.items():
            if group in names and not heres(names[group]):
                return KnownName(framework, group, names[group])
    leaf = key.rpartition(".")[2]
    for framework, names in NAMES.items():
        if leaf in names:
            return KnownName(framework, leaf, names[leaf])
    return None


def nearest_name(key: str) -> KnownName | None:
    """Return the name of another framework that is spelled most like ``key``, in full or without its groups,
    among those with a counterpart; None when none is close."""
    every = {name for names in NAMES.values() for name, entry in names.items() if heres(entry)}
    for word in (key, key.rpartition(".")[2]):
        if close := get_close_matches(word, every, n=1, cutoff=_CLOSE):
            return known_name(close[0])
    return None


def has_names_below(key: str) -> bool:
    """Return whether a framework has a group of this name that the configuration here lacks."""
    return any(name.startswith(f"{key}.") for names in NAMES.values() for name in names)


def _groups(key: str) -> Iterator[str]:
    """Yield the groups of a key, the innermost first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
