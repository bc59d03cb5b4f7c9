"""How many bytes of logits are computed at once."""

from __future__ import annotations

from nemo_like.policy.options import Device

# Of the float32 logits that exist at once (algorithms.logprobs); beside them there are the softmax and, in
# the backward pass, its slope. Every chunk reads and writes the gradient of the whole output layer, which on
# a GPU costs a quarter of the time with the smaller size.
LOGIT_CHUNK_BYTES = {Device.cpu: 1 << 28, Device.cuda: 1 << 30}
