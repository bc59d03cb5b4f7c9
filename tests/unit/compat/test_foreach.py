from __future__ import annotations

import torch

from nemo_like.compat.foreach import GroupStepAdamW, _l2_norm, _scale

BETAS, EPS, DECAY = (0.9, 0.99), 1e-8, 0.01


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((4, 3), (5,), (2, 2, 2))]


def test_adamw_is_torchs_with_one_step_for_the_group() -> None:
    ours, theirs = ([torch.nn.Parameter(value) for value in tensors(0)] for _ in range(2))
    optimizer = GroupStepAdamW(ours, 1e-2, BETAS, EPS, DECAY, adam_w_mode=True)
    expected = torch.optim.AdamW(theirs, 1e-2, BETAS, EPS, DECAY, fused=True)
    for step in range(1, 4):
        for ours_one, theirs_one, grad in zip(ours, theirs, tensors(step), strict=True):
            ours_one.grad, theirs_one.grad = grad, grad.clone()
        optimizer.step()
        expected.step()
        assert optimizer.param_groups[0]["step"] == step
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        assert torch.equal(ours_one, theirs_one)
        assert optimizer.state[ours_one].keys() == {"exp_avg", "exp_avg_sq"}
        for moment, value in optimizer.state[ours_one].items():
            assert torch.equal(value, expected.state[theirs_one][moment])


def test_the_norm_is_that_of_all_tensors_together() -> None:
    norm, per_tensor = _l2_norm(0, torch.zeros(1), [[torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]], False)
    assert norm.tolist() == [5.0]
    assert per_tensor is None


def test_a_scaled_copy_leaves_its_sources_and_may_be_in_place_and_of_another_dtype() -> None:
    sources = [torch.tensor([1.0, 2.0]), torch.tensor([[-4.0]])]
    targets = [torch.empty(2, dtype=torch.bfloat16), torch.empty(1, 1)]
    _scale(0, torch.zeros(1), [sources, targets], 0.5)
    assert [target.tolist() for target in targets] == [[0.5, 1.0], [[-2.0]]]
    assert [source.tolist() for source in sources] == [[1.0, 2.0], [[-4.0]]]
    _scale(0, torch.zeros(1), [sources, sources], 2.0)
    assert [source.tolist() for source in sources] == [[2.0, 4.0], [[-8.0]]]
