from __future__ import annotations

import os
import urllib.request

import pytest

from nemo_like.cluster.proxies import LOOPBACK, bypass_proxies, no_proxy


@pytest.mark.parametrize(
    ("environment", "value"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": ".corp,127.0.0.1"}, ".corp,127.0.0.1,localhost,::1"),
        ({"no_proxy": "a, b"}, "a,b,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, "a,b,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_hosts_are_added_to_those_that_are_reached_directly(environment: dict[str, str], value: str) -> None:
    assert no_proxy(environment, LOOPBACK) == {"NO_PROXY": value, "no_proxy": value}


def test_loopback_is_reached_without_the_proxy_and_others_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")  # put back after the test
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    bypass_proxies()
    assert urllib.request.proxy_bypass_environment("127.0.0.1")
    assert not urllib.request.proxy_bypass_environment("example.org")
    bypass_proxies(["10.1.2.3"])
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "localhost,127.0.0.1,::1,10.1.2.3"
