"""``LOGIT_CHUNK_BYTES``: how many bytes of float32 logits are computed at once, by device."""

from __future__ import annotations

from nemo_like.policy.options import Device

# ``algorithms.logprobs`` also holds the softmax of these logits and, in the backward pass, their gradient.
# Every chunk reads and writes the gradient of the whole output layer; on a GPU this costs a quarter of the
# time with the smaller size.
LOGIT_CHUNK_BYTES = {Device.cpu: 1 << 28, Device.cuda: 1 << 30}
