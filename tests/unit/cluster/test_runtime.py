from __future__ import annotations

import socket
import sys

import psutil
import pytest
from ray.exceptions import AuthenticationError

from nemo_like.cluster.actors import runtime_env
from nemo_like.cluster.runtime import free_port, interface_of, why_not_joined


def test_any_loopback_address_belongs_to_loopback() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") == "lo"


def test_an_address_of_this_machine_leads_to_its_interface() -> None:
    own = {
        item.address: name
        for name, items in psutil.net_if_addrs().items()
        for item in items
        if item.family == socket.AF_INET and name != "lo"
    }
    assert {address: interface_of(address) for address in own} == own


def test_an_address_of_no_interface_leads_nowhere() -> None:
    assert interface_of("203.0.113.7") is None  # reserved for documentation


def test_a_free_port_can_be_bound() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] > 0


def test_a_ray_that_asks_for_a_token_is_told_from_one_that_is_not_there() -> None:
    assert "no Ray can be reached there (refused)" in why_not_joined(ConnectionError("refused"))
    try:
        try:
            raise AuthenticationError("InvalidAuthToken")
        except AuthenticationError as error:
            raise ConnectionError("Failed to connect") from error
    except ConnectionError as error:
        assert "Set RAY_AUTH_MODE=token" in why_not_joined(error)


def test_ray_is_given_a_quoted_path_where_a_shell_would_split_the_interpreters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", "/opt/env/bin/python")
    assert runtime_env({"A": "1"}) == {"env_vars": {"A": "1"}}
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python")
    assert runtime_env({"A": "1"}) == {
        "env_vars": {"A": "1"},
        "py_executable": "'/opt/my env/bin/python'",
    }


def test_a_process_finds_modules_where_the_starting_process_finds_them_after_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/env/bin/python")
    monkeypatch.setenv("PYTHONPATH", "/mine:/yours")
    assert runtime_env({}) == {"env_vars": {"PYTHONPATH": "${PYTHONPATH}:/mine:/yours"}}
