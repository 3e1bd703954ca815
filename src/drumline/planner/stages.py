"""Which layers each pipeline stage holds, weighed by the FLOPs that a token costs in them.

A block counts its matrices (of experts, those that a token is sent to) and its attention; the embedding is a lookup and
costs nothing; the output projection, and modules of multi-token prediction, fall on the last stage.
"""

from drumline.planner.flops import flops_per_token
from drumline.recipe.sections import Model
from drumline.schedules import split_layers


def stage_layers(model: Model, seq_len: int, num_stages: int) -> tuple[range, ...]:
    """Cuts a model's layers into stages of nearly equal FLOPs.

    Args:
        model: the model's section.
        seq_len: tokens T of a sequence.
        num_stages: stages of the model.

    Returns:
        For each stage the indices of its layers, at least one.

    Raises:
        DrumlineError: there are fewer layers than stages.
    """
    costs, output_cost = layer_flops(model, seq_len)
    return split_layers(costs, num_stages, output_cost=output_cost)


def layer_flops(model: Model, seq_len: int) -> tuple[tuple[int, ...], int]:
    """FLOPs of training on one token, in each layer and in what comes behind the last.

    Args:
        model: the model's section.
        seq_len: tokens T of a sequence.

    Returns:
        Those of each layer, and those of the output; together `flops_per_token`.
    """
    num_dense = model.num_layers if model.moe is None else min(model.moe.num_dense_layers, model.num_layers)
    dense, sparse = (_one_layer(model, seq_len, has_experts) for has_experts in (False, True))
    costs = (dense,) * num_dense + (sparse,) * (model.num_layers - num_dense)
    return costs, flops_per_token(model, seq_len).total - sum(costs)


def _one_layer(model: Model, seq_len: int, has_experts: bool) -> int:
    """FLOPs of one more layer."""
    moe = model.moe
    if moe is not None:
        moe = moe.model_copy(update={"num_dense_layers": 0}) if has_experts else None
    one, two = (model.model_copy(update={"num_layers": n, "num_mtp_layers": 0, "moe": moe}) for n in (1, 2))
    return flops_per_token(two, seq_len).total - flops_per_token(one, seq_len).total
