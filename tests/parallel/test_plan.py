import itertools

import pytest
import torch

from drumline.models import build
from drumline.parallel.mesh import Mesh
from drumline.parallel.place import DATA_AXES
from drumline.parallel.plan import cut_parameters
from drumline.recipe import Layout
from drumline.recipe.sections import Model, Moe
from drumline.recipe.shapes import parameter_shapes

MODEL = Model(
    num_layers=2, dim=16, num_heads=4, num_kv_heads=4, head_dim=4, hidden_dim=12, vocab_size=33, qk_norm=True,
    moe=Moe(num_experts=4, expert_hidden_dim=8, num_dense_layers=1, num_shared_experts=1),
)  # fmt: skip
LAYOUTS = ["tp2", "tp4", "fsdp2.ep2", "fsdp2.cp2.ep4.tp2", "cp2.ep2", "dp2.fsdp4.ep2.tp2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_cover_every_parameter_once_on_the_ranks_that_speak_for_them(layout):
    parsed = Layout.model_validate(layout)
    covered = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in parameter_shapes(MODEL).items()}
    for rank in range(parsed.num_ranks):
        mesh = Mesh(parsed, None, rank)
        model = build(MODEL)
        places = cut_parameters(model, mesh, shares_tokens=True)
        for name, param in model.named_parameters():
            place = places[name]
            if not place.is_first(mesh):
                continue
            box = tuple(
                slice(offset, min(offset + size, whole))
                for offset, size, whole in zip(place.offsets, param.shape, place.shape, strict=True)
            )
            covered[name][box] += 1
    # What FSDP will share out counts once for each rank that it shares among: all of those are first here.
    for name, count in covered.items():
        shares = 1 if parsed.fsdp == 1 else parsed.fsdp * parsed.cp // (parsed.ep if "experts" in name else 1)
        assert (count == shares).all(), name


def test_all_ranks_hold_equally_many_rows_of_a_vocabulary_that_does_not_divide():
    sizes = []
    for rank in range(4):
        model = build(MODEL)
        cut_parameters(model, Mesh(Layout(tp=4), None, rank), shares_tokens=True)
        sizes.append(model.embedding.weight.shape[0])
    assert sizes == [9] * 4  # 36 rows for 33 tokens


@pytest.mark.parametrize(("shares_tokens", "name", "is_partial"), [
    (True, "norm.weight", True),
    (False, "norm.weight", False),
    (False, "layers.0.attention.q_norm.weight", True),
    (True, "layers.1.mlp.router.weight", True),
    (False, "layers.0.attention.q_proj.weight", False),
])  # fmt: skip
def test_what_all_ranks_hold_has_partial_gradients_where_each_sees_part_of_the_tokens_or_heads(
    shares_tokens, name, is_partial
):
    places = cut_parameters(build(MODEL), Mesh(Layout(tp=2), None, 0), shares_tokens=shares_tokens)
    assert places[name].partial == ((*DATA_AXES, "tp") if is_partial else DATA_AXES)


def test_experts_are_cut_by_expert_and_hidden_width_together():
    for ep, tp in itertools.product(range(2), range(2)):
        model, mesh = build(MODEL), Mesh(Layout(cp=2, ep=2, tp=2), None, ep * 2 + tp)
        place = cut_parameters(model, mesh, shares_tokens=True)["layers.1.mlp.experts.down_proj.weight"]
        assert model.layers[1].mlp.experts.down_proj.weight.shape == (2, 16, 4)
        assert place.offsets == (2 * ep, 0, 4 * tp)
        assert place.copied == place.partial == ("dp", "efsdp")
