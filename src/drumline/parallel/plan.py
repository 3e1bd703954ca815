"""The plan of a decoder as data: which dim of which parameter is cut along which axis; and the cutting itself.

A parameter that no line names is held whole by every rank of the axis. Cutting happens on meta, before memory is taken:
a rank's module simply has a smaller weight, and what communicates around it is applied by `drumline.parallel.tensor`
and handed in as a dispatcher by `drumline.parallel.expert`.
Source of column and row: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from drumline.parallel.mesh import Mesh
from drumline.parallel.place import DATA_AXES, EXPERT_DATA_AXES, Place


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut.

    Attributes:
        tp: the dim that tensor-parallel ranks share out; None: they hold it whole.
        ep: the dim that expert-parallel ranks share out; None: it is no expert's.
        by_head: held whole, but applied to the heads of a rank, so that its gradient is always partial over tp.
        pads: the dim may be cut unevenly; all ranks then hold as much as the first, the last ones with padding.
    """

    tp: int | None = None
    ep: int | None = None
    by_head: bool = False
    pads: bool = False


COLUMN, ROW = Cut(tp=0), Cut(tp=1)
DECODER = {
    "embedding.weight": Cut(tp=0, pads=True),
    "output.weight": Cut(tp=0, pads=True),
    "*.attention.[qkv]_proj.weight": COLUMN,
    "*.attention.[qk]_norm.weight": Cut(by_head=True),
    "*.attention.q_b_proj.weight": COLUMN,
    "*.attention.kv_b_proj.weight": COLUMN,
    "*.attention.q_a_*.weight": Cut(by_head=True),
    "*.attention.kv_a_*.weight": Cut(by_head=True),
    "*.attention.o_proj.weight": ROW,
    "*.mlp.gate_proj.weight": COLUMN,
    "*.mlp.up_proj.weight": COLUMN,
    "*.mlp.down_proj.weight": ROW,
    "*.mlp.shared.gate_proj.weight": COLUMN,
    "*.mlp.shared.up_proj.weight": COLUMN,
    "*.mlp.shared.down_proj.weight": ROW,
    "*.mlp.experts.gate_proj.weight": Cut(tp=1, ep=0),
    "*.mlp.experts.up_proj.weight": Cut(tp=1, ep=0),
    "*.mlp.experts.down_proj.weight": Cut(tp=2, ep=0),
}
"""Pattern of a logical name -> its cut."""


def cut_parameters(model: nn.Module, mesh: Mesh, *, shares_tokens: bool, blocks: int = 1) -> dict[str, Place]:
    """Replaces each parameter of a model on meta by this rank's part of it.

    Args:
        model: on meta, with logical names.
        mesh: of the layout.
        shares_tokens: tensor-parallel ranks share out the tokens between matmuls (sequence parallelism), so that the
            gradient of what they all hold whole is partial.
        blocks: fixed pieces that the operators compute in, so that cuts lie between them, and gradients come summed
            over all that a micro-batch is spread over; 1: there are none.

    Returns:
        The place of each parameter.
    """
    places = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        cut = next((cut for pattern, cut in DECODER.items() if fnmatchcase(name, pattern)), Cut())
        place, local_shape = place_of(tuple(param.shape), cut, mesh, shares_tokens=shares_tokens, blocks=blocks)
        places[name] = place
        if local_shape != place.shape:
            owner, _, leaf = name.rpartition(".")
            smaller = torch.empty(local_shape, dtype=param.dtype, device=param.device)
            setattr(model.get_submodule(owner), leaf, nn.Parameter(smaller, requires_grad=param.requires_grad))
    return places


def place_of(
    shape: tuple[int, ...], cut: Cut, mesh: Mesh, *, shares_tokens: bool, blocks: int = 1
) -> tuple[Place, tuple[int, ...]]:
    """Where this rank's part of a parameter lies.

    Args:
        shape: of the logical tensor.
        cut: how it is cut.
        mesh: of the layout.
        shares_tokens: as for `cut_parameters`.
        blocks: likewise.

    Returns:
        The place, and the shape of the part with its padding.
    """
    local, offsets = list(shape), [0] * len(shape)
    for axis, dim in (("tp", cut.tp), ("ep", cut.ep)):
        degree = mesh.degree(axis)
        if dim is None or degree == 1:
            continue
        assert cut.pads or local[dim] % degree == 0, "the recipe's rules refuse what does not divide"
        num_pieces = max(degree, blocks) if cut.pads else degree
        local[dim] = -(-local[dim] // num_pieces) * (num_pieces // degree)
        offsets[dim] += mesh.coordinate(axis) * local[dim]
    data = EXPERT_DATA_AXES if cut.ep is not None and mesh.layout.ep > 1 else DATA_AXES
    is_cut = cut.tp is not None or mesh.layout.tp == 1
    if blocks > 1:
        copied = data if is_cut else (*data, "tp")
        return Place(shape, tuple(offsets), copied, tuple(axis for axis in data if axis != "cp")), tuple(local)
    if is_cut:
        return Place(shape, tuple(offsets), data, data), tuple(local)
    is_partial = shares_tokens or cut.by_head
    return Place(shape, tuple(offsets), (*data, "tp"), (*data, "tp") if is_partial else data), tuple(local)
