"""vLLM has what is used of it without being documented. Its source is read, since loading it takes long."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

SPEC = find_spec("vllm")
assert SPEC is not None
assert SPEC.origin is not None
VLLM = Path(SPEC.origin).parent
MOE = "model_executor/layers/fused_moe"
SPECULATION = "v1/worker/gpu/spec_decode"


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("v1/engine/llm_engine.py", r"self\.model_executor = "),
        ("v1/executor/multiproc_executor.py", r"def register_failure_callback\(self, callback"),
        # What an engine over several nodes is made of, as vLLM's own command makes it (``run_headless``).
        ("v1/executor/__init__.py", r'"Executor"'),
        ("engine/arg_utils.py", r"headless: bool = False"),
        ("config/parallel.py", r"    def node_rank_within_dp\(self\)"),
        ("envs.py", r"VLLM_HOST_IP"),
        ("sampling_params.py", r"skip_clone: bool = False"),
        # What an engine sets where it sleeps, and the counts that stay meanwhile.
        ("engine/arg_utils.py", r"    sleep_mode_offload_cudagraph: bool = "),
        (
            "v1/worker/gpu/sample/penalties.py",
            r"self\.output_bin_counts = torch\.zeros\(\s+max_num_reqs, vocab_size, dtype=torch\.int32",
        ),
        ("model_executor/model_loader/reload/__init__.py", r'"initialize_layerwise_reload",'),
        ("model_executor/model_loader/reload/__init__.py", r'"finalize_layerwise_reload",'),
        (
            "model_executor/layers/vocab_parallel_embedding.py",
            r"def process_weights_after_loading\(self, layer",
        ),
        (f"{MOE}/fused_moe_method_base.py", r"self\.moe_kernel: "),
        (f"{MOE}/unquantized_fused_moe_method.py", r"layer\.w13_weight"),
        (f"{MOE}/modular_kernel.py", r"def process_weights_after_loading\(self, layer"),
        (f"{MOE}/router/base_router.py", r"def set_capture_fn\(self, capture_fn"),
        (f"{MOE}/layer.py", r"MoERunner"),
        (f"{MOE}/routed_experts.py", r"full_load = len\(loaded_weight\.shape\) == 3"),
        (f"{MOE}/routed_experts.py", r"self\.ckpt_(gate|up|down)_proj_name = "),
        (f"{MOE}/expert_map_manager.py", r"def expert_map\(self\) -> torch\.Tensor \| None"),
        (f"{MOE}/runner/moe_runner.py", r"def layer_id\("),
        ("forward_context.py", r"slot_mapping: dict\[str, torch\.Tensor\]"),
        ("v1/worker/gpu_input_batch.py", r"block_ids: tuple\[list\[int\], \.\.\.\]"),
        ("v1/worker/gpu_input_batch.py", r"def num_tokens\(self\)"),
        ("v1/worker/gpu_model_runner.py", r"def execute_model\("),
        (
            "v1/worker/gpu/model_runner.py",
            r"    def sample\(\s+self,\s+hidden_states: torch.Tensor,\s+input_batch",
        ),
        ("v1/worker/gpu/model_runner.py", r"return sampler_output, sampler_output\.num_sampled"),
        ("v1/worker/gpu/model_runner.py", r"self\.structured_outputs_worker\.apply_grammar_bitmask\("),
        ("v1/worker/gpu/model_runner.py", r"self\.num_speculative_steps = "),
        (
            "v1/worker/gpu/structured_outputs.py",
            r"logits: torch\.Tensor,\s+input_batch: InputBatch,\s+grammar_req_ids: list\[str\],",
        ),
        ("v1/worker/gpu/input_batch.py", r"    req_ids: list\[str\]"),
        ("v1/worker/gpu/input_batch.py", r"    idx_mapping: torch\.Tensor"),
        ("v1/worker/gpu/sample/states.py", r"self\.temperature = UvaBackedTensor\("),
        ("v1/core/sched/output.py", r"finished_req_ids: set\[str\]"),
        ("v1/core/sched/output.py", r"preempted_req_ids: set\[str\] \| None"),
        ("platforms/cpu.py", r"scheduler_config\.async_scheduling = False"),
        ("v1/engine/parallel_sampling.py", r'child_req_id = f"\{index\}_\{self\.request_id\}"'),
        ("sampling_params.py", r"routed_experts_prompt_start: int = 0"),
        ("outputs.py", r"routed_experts: np\.ndarray \| None = None  # \[seq_len,layer_num,topk\]"),
        ("distributed/aux_output_connector/connector.py", r"token_end = request\.num_tokens - 1"),
        ("utils/network_utils.py", r"/vllm_dist_\{"),
        # Where it drafts, V2 computes log-probs of what it sampled from, draws by seed and position alone,
        # and has a draft share layers, which a weight update then reaches, rather than their weights.
        (f"{SPECULATION}/rejection_sampler.py", r"logprobs_mode in PROCESSED_LOGPROBS_MODES"),
        (
            f"{SPECULATION}/rejection_sampler.py",
            r"processed_logits if use_processed_logits else logits\[lo:hi\]",
        ),
        (f"{SPECULATION}/rejection_sampler_utils.py", r"u = tl_rand32\(seed, pos, includes_zero=False\)"),
        (
            f"{SPECULATION}/rejection_sampler_utils.py",
            r"accepted = target_logprob > tl\.log\(u\) \+ draft_logprob",
        ),
        ("v1/worker/gpu/sample/gumbel.py", r"_DRAFT_NOISE_SALT = "),
        (f"{SPECULATION}/eagle/utils.py", r"draft_inner\.embed_tokens = target_embed"),
        (f"{SPECULATION}/eagle/utils.py", r"eagle_model\.lm_head = target_lm_head"),
        (f"{SPECULATION}/__init__.py", r"elif speculative_config\.use_ngram\(\):"),
        # What has a seed give other samples beside others: drafts that are cut, and those that are lost.
        ("v1/core/sched/scheduler.py", r"num_new_tokens, token_budget, input_budget - draft_slots"),
        (
            "v1/core/sched/scheduler.py",
            r"request\.status = RequestStatus\.PREEMPTED\n.*\n\s+if request\.spec_token_ids:",
        ),
        ("v1/sample/rejection_sampler.py", r"\n    temperature = expand_batch_to_tokens\("),
        # The kernel for CPUs that writes into a copy of its output, and so needs no mending in vain.
        ("utils/cpu_triton_utils.py", r"expand_kernel_impl\(\n\s+_ensure_int64\(output\),"),
        ("engine/arg_utils.py", r"    per_request_spec_decode_metrics: "),
        ("outputs.py", r"    spec_decode_metrics: "),
        ("config/quantization.py", r'"fp8_per_channel": QuantizationConfigArgs'),
        ("model_executor/layers/quantization/online/fp8.py", r'replace_parameter\(layer, "weight_scale"'),
    ],
)
def test_it_is_there(file: str, pattern: str) -> None:
    assert re.search(pattern, (VLLM / file).read_text(encoding="utf-8"))
