"""Rates of GPUs by their data sheets, and the assumed shares of these rates that kernels reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDataSheet:
    """One GPU of a node of eight. Rates of links are for one direction; data sheets give the sum of both."""

    name: str
    bf16_flops_per_s: float  # dense: half of what sheets give with sparsity
    hbm_bytes: float  # sheets write GB for 2**30 bytes
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float
    network_bytes_per_s: float  # of one GPU's share of the node's network adapters
    host_bytes_per_s: float  # PCIe, to the host's memory
    per_node: int = 8


GPUS = {
    gpu.name: gpu
    for gpu in (
        # "NVIDIA A100 Tensor Core GPU" data sheet, SXM 80 GB; DGX A100: eight adapters of 200 Gb/s.
        GpuDataSheet(
            name="a100-sxm",
            bf16_flops_per_s=312e12,
            hbm_bytes=80 * 2**30,
            hbm_bytes_per_s=2.039e12,
            nvlink_bytes_per_s=300e9,
            network_bytes_per_s=25e9,
            host_bytes_per_s=32e9,
        ),
        # "NVIDIA H100 Tensor Core GPU" data sheet, SXM; DGX H100: eight adapters of 400 Gb/s.
        GpuDataSheet(
            name="h100-sxm",
            bf16_flops_per_s=989.5e12,
            hbm_bytes=80 * 2**30,
            hbm_bytes_per_s=3.35e12,
            nvlink_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
        ),
        # "NVIDIA H200 Tensor Core GPU" data sheet, SXM; DGX H200: eight adapters of 400 Gb/s.
        GpuDataSheet(
            name="h200",
            bf16_flops_per_s=989.5e12,
            hbm_bytes=141 * 2**30,
            hbm_bytes_per_s=4.8e12,
            nvlink_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
        ),
        # There is no public data sheet of the H20. Its peak is the one that verl's table has (docs/advance/
        # mtp.md); memory and links are as resellers list them; the network is taken to be that of a DGX H100.
        GpuDataSheet(
            name="h20",
            bf16_flops_per_s=148e12,
            hbm_bytes=96 * 2**30,
            hbm_bytes_per_s=4.0e12,
            nvlink_bytes_per_s=450e9,
            network_bytes_per_s=50e9,
            host_bytes_per_s=64e9,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Numbers that nobody has measured with this framework. docs/explanation/scaling.md says how much each
    matters."""

    # Shares of peak FLOP/s. 128 H100 train Llama 3 70B in bf16 at 389 TFLOP/s each, and eight train
    # Qwen3-30B-A3B at 277 (NeMo AutoModel, docs/performance-summary.md, April 2026). Those figures include
    # communication, which this plan adds; kernels alone do better.
    matmul_share: float = 0.55
    expert_share: float = 0.4  # grouped products of a few thousand rows, dispatch and sorting
    # FlashAttention-2 reaches 35 % of an H100 and FlashAttention-3 75 % (Shah et al. 2024, forward, long
    # sequences); packed samples are short, and backward passes slower.
    attention_share: float = 0.4
    decode_matmul_share: float = 0.5  # matters for batches of several hundred only
    # Shares of a link's rate.
    hbm_share: float = 0.8
    nvlink_share: float = 0.75
    network_share: float = 0.75
    host_share: float = 0.5
    # Seconds of a decoding step besides reading and computing. An A100 takes 9.6 ms per token of
    # Qwen3-30B-A3B at batch 1 (tenstorrent/tt-inference-server, issue 340), where reading takes 3.6 ms.
    decode_host_s: float = 1e-3  # the scheduler, per step
    decode_layer_s: float = 20e-6  # kernels too small to fill a GPU, per layer
    decode_expert_layer_s: float = (
        100e-6  # the same of a layer with experts: routing and grouping are kernels too
    )
    decode_sequence_s: float = 15e-6  # sampling, log-probs and bookkeeping, per sequence
    allreduce_s: float = 15e-6  # latency in one node, twice per layer with tensor parallelism
    network_allreduce_s: float = 40e-6  # latency where an engine spans nodes
    reserved_hbm_bytes: float = 4e9  # of a generating GPU: activations and CUDA graphs
    load_tensor_s: float = 50e-6  # an engine loads one tensor of a weight update
    # Facts about the workload that configurations do not determine.
    mean_response_share: float = 1 / 3  # mean response length over the maximum
    length_sigma: float = 0.8  # of the logarithm of response lengths, as in scripts/bench/driver_scale.py
    prompt_tokens: int = 200
