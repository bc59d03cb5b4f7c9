"""Warm servers import this: the demo's configuration has been loaded when a run's driver is forked."""

from nemo_like.configuration import load_config
from tests.functional.warm_servers import ROOT

load_config(ROOT / "configs" / "grpo_arithmetic_cpu.yaml", [])
