"""A module for ``policy.external_lib``: it tells transformers and vLLM of ``halved_llama``."""

from __future__ import annotations

import sys

from transformers import AutoConfig, AutoModelForCausalLM

from tests.functional.halved_llama import HalvedConfig, HalvedForCausalLM

AutoConfig.register("halved_llama", HalvedConfig)
AutoModelForCausalLM.register(HalvedConfig, HalvedForCausalLM)
if "vllm" in sys.modules:  # so in an engine and its workers, which have imported it before
    from vllm import ModelRegistry

    ModelRegistry.register_model("HalvedForCausalLM", "tests.functional.halved_engine:HalvedForCausalLM")
