from __future__ import annotations

import gc
import os
from collections.abc import Generator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

from tests.functional.warm_servers import FOLDER, warm
from tests.lacking import NO_GPU, judged

# A property holds however busy the machine is.
settings.register_profile(
    "untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Have the runs of this session of tests, which may be several processes, share warm servers."""
    if FOLDER not in os.environ:
        stack = ExitStack()
        stack.enter_context(warm())
        config.add_cleanup(stack.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without a look for garbage, and have none of the later looks go through what they and
    the modules that they import have made: millions of objects, which stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are collected everywhere, and say why where they do not run."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge each test's report after pytest's own plugins, which turn xfail into a kind of skip."""
    return judged((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge each module's report: a whole module may skip itself while it is collected."""
    return judged((yield))
