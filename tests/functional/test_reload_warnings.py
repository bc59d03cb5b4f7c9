"""What vLLM warns of at every weight update, and what of it an engine's log keeps."""

from __future__ import annotations

import logging

import pytest
from vllm.config import LoggingConfig
from vllm.logger import configure_logging

from nemo_like.generation import weight_receiver


def test_layers_without_weights_of_their_own_are_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger(weight_receiver.initialize_layerwise_reload.__module__)
    configure_logging(LoggingConfig())  # as an engine's start does, after it has imported the receiver
    logger.addHandler(caplog.handler)
    try:
        logger.warning("RotaryEmbedding: Failed to load weights")
        logger.error("a layer is broken")
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records] == ["a layer is broken"]
