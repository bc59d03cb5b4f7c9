"""OLMo 2: norms after attention and feed-forward part in place of those before, and of whole projections."""

from nemo_like.models.family import SWIGLU, Family, Part, without
from nemo_like.models.weight_names import Cut, Rule

KIND = Family(
    about="OLMo 2: norms after attention and feed-forward part, and of whole queries and keys",
    model_types=("olmo2",),
    trained_values=(*without("attention_bias"), SWIGLU),
    has_qk_norm=True,
    parts=frozenset({Part.post_norms, Part.no_pre_norms, Part.whole_qk_norm}),
    defaults={"rms_norm_eps": 1e-5},
    layer_rules={
        "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",), Cut.rows),
        "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",), Cut.rows),
    },
)
