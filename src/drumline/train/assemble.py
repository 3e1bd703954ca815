"""Putting a run's parts together, short of data and values: the model on its mesh, its gradients, its optimizer.

What trains and what verifies a layout begin with the same parts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from drumline import models, precision
from drumline.capture import Subject
from drumline.checkpoint import Piece
from drumline.data import Batch
from drumline.optimizers import build_adamw
from drumline.parallel import Gradients, Mesh, Places
from drumline.parallel.context import context_attend, context_groups
from drumline.parallel.exact import exact_attend
from drumline.parallel.expert import expert_dispatch
from drumline.recipe.lanes import num_blocks
from drumline.recipe.sections import Recipe
from drumline.train.spread import spread
from drumline.train.state import (
    Buffers,
    Parameters,
    buffer_pieces,
    buffers_of,
    model_pieces,
    optimizer_pieces,
    parameters_of,
)
from drumline.train.step import Passes
from drumline.train.strictly import Strictly

Share = Callable[[Batch], Batch]


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A model in its layout.

    Attributes:
        mesh: of the layout.
        model: spread over the mesh; its parameters have memory, but no values yet.
        parameters: by logical name.
        places: where each lies in its logical tensor.
        buffers: by logical name.
        gradients: brings them to their sum.
        passes: takes micro-batches through the model.
        optimizer: over this rank's parts.
        share: what this rank keeps of a micro-batch whose rows it shares with others; None: all of it.
        attention: one line that says what computes attention, and why.
    """

    mesh: Mesh
    model: nn.Module
    parameters: Parameters
    places: Places
    buffers: Buffers
    gradients: Gradients
    passes: Passes
    optimizer: torch.optim.Optimizer
    share: Share | None
    attention: str

    def pieces(self) -> list[Piece]:
        """All that a commit holds of this rank: weights, buffers and moments, once there are moments; the tensors are
        the live ones.
        """
        return [
            *model_pieces(self.parameters, self.places, self.mesh),
            *buffer_pieces(self.buffers, self.mesh),
            *optimizer_pieces(self.parameters, self.places, self.optimizer, self.mesh),
        ]


def subject_of(made: Assembled) -> Subject:
    """An assembled model, as far as it is recorded."""
    return Subject(
        model=made.model,
        mesh=made.mesh,
        parameters=made.parameters,
        places=made.places,
        buffers=made.buffers,
        optimizer=made.optimizer,
    )


def assemble(recipe: Recipe, mesh: Mesh, device: torch.device) -> Assembled:
    """Builds the model on meta, spreads it, and gives it memory. All ranks of the world must call it.

    Args:
        recipe: without problems for this world.
        mesh: of its layout.
        device: of this rank.

    Returns:
        The parts.

    Raises:
        DrumlineError: what is asked for does not run on this device.
    """
    dtypes = precision.policy(recipe.precision)
    attend, attention = models.select(recipe.model.attention, device)
    is_invariant = recipe.numerics.invariant
    if is_invariant:
        attend, attention = models.InvariantAttend(), "attention: drumline's, in tiles at absolute positions"
    share = None
    groups = context_groups(mesh, recipe.layout.ulysses_degree) if recipe.layout.cp > 1 else None
    if groups is not None:
        attend, share = context_attend(recipe.layout.cp_method, groups, attend), groups.split.shard_batch
        attention = f"attention: {recipe.layout.cp_method} over {recipe.layout.cp} ranks"
    if num_blocks(recipe) > 1:
        attend, attention = exact_attend(recipe, groups), "attention: fixed tiles of torch SDPA (numerics.blocks > 1)"
    dispatch = expert_dispatch(mesh)

    def build(part: models.Part | None) -> models.Decoder:
        chunk_tokens = recipe.memory.loss_chunk_tokens
        model = models.build(
            recipe.model,
            compute_dtype=dtypes.compute,
            attend=attend,
            cross_entropy=models.invariant_cross_entropy(chunk_tokens) if is_invariant else None,
            loss_chunk_tokens=chunk_tokens,
            dispatch=dispatch,
            num_shares=recipe.layout.cp,
            part=part,
            seed=recipe.run.seed,
        )
        return models.make_invariant(model) if is_invariant else model

    ours = spread(recipe, mesh, build, dtypes, device)
    return Assembled(
        mesh=mesh,
        model=ours.model,
        parameters=parameters_of(ours.model),
        places=ours.places,
        buffers=buffers_of(ours.model),
        gradients=ours.gradients,
        passes=Strictly(ours.passes) if is_invariant else ours.passes,
        optimizer=build_adamw(
            ours.model, recipe.optimizer, ours.places, recipe.run.seed, exact=recipe.numerics.mode == "exact"
        ),
        share=share,
        attention=attention,
    )
