"""Evening the load of experts, from counts over the *global* batch.

    aux_loss   c E sum_e f_e p_e       f_e: choices of expert e a token, p_e: its mean probability
    bias       b_e += u sign(mean n - n_e)        n_e: choices of expert e in the step

Both need counts that no rank and no micro-batch has alone: an expert that one sequence prefers is not overloaded. The
counts that a step uses are those of the step before: they are there in time for every micro-batch, they cost one sum of
integers a step, and they are the same however the batch is cut and spread. f has no gradient, so this only makes it a
step older; at the first step it is 0. With f and the number of tokens given, the loss is a sum over tokens, so that it
adds up over micro-batches and ranks like the cross-entropy beside it.
Sources: Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6; why counts of the global batch: Qiu et al. 2025,
arXiv:2501.11873; the bias: Wang et al. 2024, arXiv:2408.15664, algorithm 1.

N tokens, E experts, K experts of a token.
"""

import torch


def balance_loss(probability_NE: torch.Tensor, load_E: torch.Tensor) -> torch.Tensor:
    """The balancing loss of these tokens, summed over them, before its coefficient.

    Args:
        probability_NE: of the router, summing to 1 over experts.
        load_E: choices of each expert a token over the global batch; it sums to K.

    Returns:
        Scalar; divided by N it is K where the load is even.
    """
    return probability_NE.shape[1] * (probability_NE.sum(0) @ load_E.to(probability_NE.dtype))


def next_load(counts_E: torch.Tensor, experts_per_token: int) -> torch.Tensor:
    """Choices of each expert a token: counts_E over the number of tokens that made them."""
    num_tokens = counts_E.sum().clamp(min=1).double() / experts_per_token
    return counts_E.double() / num_tokens


def next_bias(bias_E: torch.Tensor, counts_E: torch.Tensor, speed: float) -> torch.Tensor:
    """The bias after a step: up by `speed` for an expert below the mean load, down for one above."""
    # In integers, so that a load that is exactly even moves nothing: sign(mean - n) = sign(sum - E n).
    return bias_E + speed * (counts_E.sum() - len(counts_E) * counts_E).sign()
