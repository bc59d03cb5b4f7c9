"""What processes measure for the tripwires: the names of the numbers, and in which steps they take them.
Standard library only."""

from __future__ import annotations

from enum import StrEnum

from nemo_like.tripwires.options import Tripwires

# The metric under which the trainer reports the digest of the weights that it sent.
WEIGHTS_DIGEST = "weights_digest"


class Measured(StrEnum):
    """One measured number of a step; its comment says who measures it, and how numbers of several processes
    merge."""

    # The rollout actor, over the samples of a rollout; sums unless said otherwise.
    num_seeds = "num_seeds"  # seeds with which the engines were asked to sample
    num_repeated_seeds = "num_repeated_seeds"  # seeds among them that another response had already
    num_unended_responses = "num_unended_responses"  # without stop token, and not truncated
    num_misplaced_answers = "num_misplaced_answers"  # environments' answers that are about another turn
    num_impossible_logprobs = "num_impossible_logprobs"  # engines' log-probs that are above 0 or not finite
    num_equal_neighbours = "num_equal_neighbours"  # pairs of a group's samples with the same first response
    expected_equal_neighbours = "expected_equal_neighbours"  # such pairs by the responses' probabilities
    engine_digest_min = "engine_digest_min"  # least digest, over responses, of the weights that sampled
    engine_digest_max = "engine_digest_max"  # greatest digest

    # The policy workers; the greatest over all ranks unless said otherwise.
    num_wrong_samples = "num_wrong_samples"  # samples whose columns do not fit their tags
    has_policy_as_reference = "has_policy_as_reference"  # 1: equal log-probs, though their weights differ
    reference_gap = "reference_gap"  # mean |prev - reference log-prob| before any update or checkpoint, nats
    loss_gradient = "loss_gradient"  # largest d loss / d logprob, or d loss / d value, as it was seen
    loss_gradient_error = "loss_gradient_error"  # of d loss / d logprob, relative to its terms
    loss_error = "loss_error"  # of the loss, relative to its terms
    first_ratio_gap = "first_ratio_gap"  # mean |logprob - prev_logprob| in the first update, nats
    num_trained_tokens = "num_trained_tokens"  # over updates; summed over replicas
    num_updates = "num_updates"  # optimizer updates since the run's start, as the schedule counts them
    optimizer_step_gap = "optimizer_step_gap"  # difference of the optimizer's own count from num_updates
    learning_rate = (
        "learning_rate"  # in the optimizer after the step's last update, the greatest of its groups
    )
    learning_rate_spread = "learning_rate_spread"  # by which that of another group is less
    weight_decay = "weight_decay"  # in the optimizer, the greatest of its groups
    moment_excess = "moment_excess"  # by which a mean of gradients is too long for clipped ones
    weights_moved = "weights_moved"  # greatest change of a sampled weight in training
    largest_weight = "largest_weight"  # greatest magnitude of a sampled weight
    weights_moved_elsewhere = "weights_moved_elsewhere"  # 1: weights changed between two training phases
    reference_moved = "reference_moved"  # 1: the reference's weights are not those of the start
    num_wrong_advantages = "num_wrong_advantages"  # samples whose advantage is not the one the driver gave
    num_odd_entropies = "num_odd_entropies"  # tokens whose entropy their own log-prob excludes
    held_gradient = "held_gradient"  # norm of the gradients that an update begins with
    num_first_layers = "num_first_layers"  # 1: a rank has the model's first layer, whose output is trained
    first_layer_gradient = "first_layer_gradient"  # largest derivative of the loss by that output
    update_excess = "update_excess"  # distance of an update from its formula, in multiples of its rounding
    num_wrong_updates = "num_wrong_updates"  # tensors where that is more than 1
    num_still_tensors = "num_still_tensors"  # that have no gradient, and should
    betas_gap = "betas_gap"  # of a group of the optimizer from the configured ones
    eps_gap = "eps_gap"  # likewise
    weight_decay_gap = "weight_decay_gap"  # likewise, or from 0
    num_unequal_copies = "num_unequal_copies"  # sets of ranks whose copies of weights differ
    num_unlike_saved = "num_unlike_saved"  # weights that are not those with which the checkpoint was saved
    num_unlike_moments = "num_unlike_moments"  # likewise moments of the optimizer

    # The critic's workers, besides what they measure as the policy's do; the greatest over all ranks.
    advantage_error = "advantage_error"  # of GAE's equation, relative to its terms
    return_error = "return_error"  # likewise, of the returns
    first_value_gap = "first_value_gap"  # |value - column| in the first update, relative to the largest


# With debug.tripwires=cheap, the more expensive checks run this often.
_FIRST = 3
_PERIOD = 10


def is_due(number: int, level: Tripwires) -> bool:
    """Return whether a check is due at the ``number``-th occasion since the start of the process, counted
    from 1.

    With ``all`` every occasion is due; with ``cheap`` the first three and then every tenth: what is wrong in
    the code is wrong from the start, and what goes wrong later is seen soon enough.
    """
    if level is Tripwires.cheap:
        return number <= _FIRST or number % _PERIOD == 0
    return level is Tripwires.all
