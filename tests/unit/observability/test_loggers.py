from __future__ import annotations

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.observability.logger_kind import LoggerKind
from nemo_like.observability.loggers import ChosenLogger, chosen_loggers
from nemo_like.observability.options import LoggerConfig, shipped_loggers

OFF = "logger.wandb.mode=disabled"
TENSORBOARD = "nemo_like.observability.logger_kinds.tensorboard:KIND"


def test_the_keys_of_loggers_stand_in_the_order_of_their_places(demo):
    assert list(shipped_loggers()) == ["wandb", "tensorboard", "mlflow", "prometheus"]
    assert demo().logger.prometheus.host == "127.0.0.1"


def test_only_what_is_switched_on_is_chosen_and_ones_own_come_last(demo):
    assert [*chosen_loggers(demo(OFF).logger)] == []
    cfg = demo(OFF, "logger.prometheus.port=9400", f"logger.own.mine.kind={TENSORBOARD}")
    shipped, own = chosen_loggers(cfg.logger)
    assert (shipped.name, shipped.key, shipped.options) == (
        "prometheus",
        "logger.prometheus",
        cfg.logger.prometheus,
    )
    assert (own.name, own.key) == ("mine", "logger.own.mine.options")
    assert not own.options.enabled  # its default; to be named is enough


def test_results_that_raise_are_told_in_the_summary(demo):
    def results(options, run):
        raise KeyError("no shelf")

    kind = LoggerKind(about="a shelf", options=LoggerConfig, start=lambda *_: None, results=results)
    assert ChosenLogger("mine", "", kind, None).results(None) == {"mine": "unknown: KeyError: 'no shelf'"}


def test_what_names_no_logger_is_refused(demo):
    with pytest.raises(ConfigError, match=r"logger\.own\.mine\.kind='wandbb' must be one of mlflow, "):
        demo(OFF, "logger.own.mine.kind=wandbb")
    with pytest.raises(ConfigError, match=r"is no LoggerKind of .*, but StorageKind"):
        demo(OFF, "logger.own.mine.kind=nemo_like.data_plane.storage_kinds.simple:KIND")
