"""The code of a checkpoint: Llama with half of what each feed-forward part adds, which is no Llama any more.

Neither transformers nor vLLM knows its type. This file is copied beside the weights.
"""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaMLP


class HalvedConfig(LlamaConfig):
    model_type = "halved_llama"


class HalvedMLP(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * super().forward(x)


class HalvedModel(LlamaModel):
    config_class = HalvedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = HalvedMLP(config)


class HalvedForCausalLM(LlamaForCausalLM):
    config_class = HalvedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = HalvedModel(config)
        self.post_init()


class HalvedTokenizer(PreTrainedTokenizerFast):
    pass
