"""Mixture of experts on one device: the router, the stacked experts, what carries tokens between them, the balance.

In: the recipe's model section, hidden states, a dispatcher. Out: hidden states, and per layer who was chosen how often.
"""

from drumline.models.moe.balance import balance_loss, next_bias, next_load
from drumline.models.moe.dispatch import (
    Dispatch,
    Dispatched,
    Plan,
    combine_rows,
    dispatch_locally,
    gather_rows,
    sort_by_expert,
)
from drumline.models.moe.experts import Experts, grouped_linear
from drumline.models.moe.layer import MixtureOfExperts, Routed, update_balance
from drumline.models.moe.router import Router, Routing, choose, within_capacity

__all__ = [
    "Dispatch",
    "Dispatched",
    "Experts",
    "MixtureOfExperts",
    "Plan",
    "Routed",
    "Router",
    "Routing",
    "balance_loss",
    "choose",
    "combine_rows",
    "dispatch_locally",
    "gather_rows",
    "grouped_linear",
    "next_bias",
    "next_load",
    "sort_by_expert",
    "update_balance",
    "within_capacity",
]
