"""Multi-token prediction against the paper's equations, written here in fp64, and against transformers' module."""

import pytest
import torch
from tests.models.deepseek_reference import DEEPSEEK, exact_norms, hf_state, hf_twin
from tests.models.hf_reference import QWEN, make
from tests.models.moe_reference import with_moe
from transformers.modeling_layers import MtpModel

from drumline.models import decoder as decoder_module
from drumline.models.multi_token import MultiToken

AHEAD = DEEPSEEK.model_copy(update={"num_mtp_layers": 2, "mtp_loss_weight": 0.7})
DENSE = QWEN.model_copy(update={"num_mtp_layers": 3})
SHAPES = {"deepseek": AHEAD, "dense, tied": DENSE, "balanced by a loss": with_moe(AHEAD, balance="aux_loss")}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES)
B, T = 2, 40
STARTS = torch.tensor([[0] * 40, [0] * 9 + [9] * 2 + [11] * 29], dtype=torch.int32)


def relative(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def stream(depth):
    """Tokens of rows that go on behind the row, and the document of each."""
    tokens = torch.randint(101, (B, T + 1 + depth), generator=torch.Generator().manual_seed(1))
    last = STARTS[:, -1:].expand(-1, 1 + depth)
    return tokens, torch.cat((STARTS, last), dim=1)


def shifted(tokens, starts, by):
    """Tokens `by` places on, and as labels those that belong to the same document."""
    there = tokens[:, by : by + T]
    return there, there.masked_fill(starts[:, by : by + T] != starts[:, :T], -100)


def inputs(model):
    tokens, starts = stream(model.num_mtp_layers)
    ahead = tuple(
        (shifted(tokens, starts, depth)[0], shifted(tokens, starts, depth + 1)[1])
        for depth in range(1, model.num_mtp_layers + 1)
    )
    return {"starts_BT": STARTS, "labels_BT": shifted(tokens, starts, 1)[1], "ahead": ahead}, tokens[:, :T]


def run(decoder):
    options, tokens_BT = inputs(decoder.shape)
    told = []
    loss = decoder(tokens_BT, **options, on_ahead=told.append)
    loss.backward()
    return loss.detach(), told, {name: p.grad for name, p in decoder.named_parameters()}


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def by_the_paper(decoder):
    """Equations 21 to 25; blocks and the main model are the decoder's own, everything between them is written here."""
    model, eps = decoder.shape, decoder.shape.norm_eps
    tokens, starts = stream(model.num_mtp_layers)
    rope = decoder_module.tables(model, T, "cpu")
    mask = decoder.attend.prepare(STARTS, torch.float64)
    table = decoder.embedding.weight
    head = table if model.tie_embeddings else decoder.output.weight
    balance = torch.zeros((), dtype=torch.float64)

    def through(block, x):
        nonlocal balance
        found = block(x, rope, mask)
        if isinstance(found, tuple):
            balance = balance + found[1].aux_loss
            found = found[0]
        return found

    def cross_entropy(hidden, by):
        total = torch.zeros((), dtype=torch.float64)
        log_p = (hidden @ head.T).log_softmax(-1)
        for row in range(B):
            for i in range(T):
                if starts[row, i + by] == starts[row, i]:
                    total = total - log_p[row, i, tokens[row, i + by]]
        return total

    hidden = table[tokens[:, :T]]
    for block in decoder.layers:
        hidden = through(block, hidden)
    hidden = norm(hidden, decoder.norm.weight, eps)
    main, losses = cross_entropy(hidden, 1), []
    for k, module in enumerate(decoder.mtp, 1):
        embedded = norm(table[tokens[:, k : k + T]], module.embedding_norm.weight, eps)
        before = norm(hidden, module.hidden_norm.weight, eps)
        merge = module.merge_proj.weight
        merged = embedded @ merge[:, : model.dim].T + before @ merge[:, model.dim :].T
        hidden = norm(through(module.block, merged), module.norm.weight, eps)
        losses.append(cross_entropy(hidden, k + 1))
    return main, losses, balance


def differences(model, dtype=torch.float64):
    loss, told, gradients = run(make(model, dtype=dtype, loss_chunk_tokens=32))
    reference = make(model, dtype=torch.float64)
    main, losses, balance = by_the_paper(reference)
    (main + model.mtp_loss_weight / model.num_mtp_layers * sum(losses) + balance).backward()
    found = {"loss": relative(loss, main), "told": relative(told[0], torch.stack(losses))}
    return found | {name: relative(gradients[name], p.grad) for name, p in reference.named_parameters()}


@EVERY_SHAPE
def test_losses_and_gradients_are_the_papers(shape):
    assert max(differences(SHAPES[shape]).values()) < 1e-12


@EVERY_SHAPE
def test_fp32_is_near(shape):
    assert max(differences(SHAPES[shape], torch.float32).values()) < 1e-4


def labels_that_cross_documents(monkeypatch):
    right = shifted
    monkeypatch.setitem(globals(), "shifted", lambda tokens, starts, by: (right(tokens, starts, by)[0],) * 2)


def labels_of_the_token_before(monkeypatch):
    right = shifted
    monkeypatch.setitem(
        globals(),
        "shifted",
        lambda tokens, starts, by: (right(tokens, starts, by)[0], right(tokens, starts, by - (by > 1))[1]),
    )


def labels_of_the_next_tokens_document(monkeypatch):
    """Counted where t_{i+k} and t_{i+k+1} are of one document, whatever document place i is in."""
    right = shifted

    def fault(tokens, starts, by):
        there = right(tokens, starts, by)[0]
        return there, there.masked_fill(starts[:, by : by + T] != starts[:, by - 1 : by - 1 + T], -100)

    monkeypatch.setitem(globals(), "shifted", fault)


def no_gradient(monkeypatch):
    right = MultiToken.forward

    def forward(self, hidden_BTD, *rest):
        found = right(self, hidden_BTD, *rest)
        return (found[0].detach(), found[1]) if isinstance(found, tuple) else found.detach()

    monkeypatch.setattr(MultiToken, "forward", forward)


def no_gradient_into_the_model(monkeypatch):
    right = MultiToken.forward
    monkeypatch.setattr(MultiToken, "forward", lambda self, hidden, *rest: right(self, hidden.detach(), *rest))


@pytest.mark.parametrize(
    "fault",
    [
        labels_that_cross_documents,
        labels_of_the_token_before,
        labels_of_the_next_tokens_document,
        no_gradient,
        no_gradient_into_the_model,
    ],
)
def test_the_comparison_catches_a_fault(fault, monkeypatch):
    decoder = make(AHEAD, dtype=torch.float64)
    main, losses, _ = by_the_paper(decoder)
    (main + 0.35 * sum(losses)).backward()
    expected = {name: p.grad for name, p in decoder.named_parameters()}
    fault(monkeypatch)
    _, _, gradients = run(make(AHEAD, dtype=torch.float64))
    wrong = [name for name, grad in gradients.items() if grad is None or not relative(grad, expected[name]) < 1e-3]
    assert wrong


def test_hidden_states_are_those_of_transformers_modules():
    decoder = make(AHEAD, dtype=torch.float64)
    twin = hf_twin(decoder)
    modules = MtpModel(twin, 2).double()
    for k, layer in enumerate(modules.layers):
        module = decoder.mtp[k]
        exact_norms(layer)
        layer.enorm.weight, layer.hnorm.weight = module.embedding_norm.weight, module.hidden_norm.weight
        layer.eh_proj.weight, layer.post_norm.weight = module.merge_proj.weight, module.norm.weight
        block = hf_state({f"layers.0.{name}": x for name, x in module.block.state_dict().items()})
        layer.mtp_block.load_state_dict({name.removeprefix("model.layers.0."): x for name, x in block.items()})
    tokens, _ = stream(2)
    rope = decoder_module.tables(AHEAD, T, "cpu")
    with torch.no_grad():
        theirs = twin.model(tokens[:, :T]).last_hidden_state
        ours = theirs.clone()
        for k, module in enumerate(decoder.mtp, 1):
            at = tokens[:, k : k + T]
            theirs = modules.forward_layer(k - 1, theirs, torch.arange(T)[None] + k, None, input_ids=at)
            ours, _ = module(ours, decoder.embedding(at), rope)
            assert relative(ours, theirs) < 1e-6  # their router is fp32


def test_the_value_is_the_next_tokens_loss_alone():
    decoder = make(AHEAD, dtype=torch.float64)
    options, tokens_BT = inputs(AHEAD)
    with_modules = decoder(tokens_BT, **options)
    without = decoder(tokens_BT, **options | {"ahead": ()})
    assert torch.equal(with_modules, without)


def test_a_token_of_another_document_reaches_no_loss():
    decoder = make(AHEAD, dtype=torch.float64)
    options, tokens_BT = inputs(AHEAD)
    told = []
    decoder(tokens_BT, **options, on_ahead=told.append)
    strange = tuple(
        (torch.where(previous == -100, (tokens + 7) % 101, tokens), labels)
        for previous, (tokens, labels) in zip(
            (options["labels_BT"], options["ahead"][0][1]), options["ahead"], strict=True
        )
    )
    assert any(not torch.equal(one[0], other[0]) for one, other in zip(strange, options["ahead"], strict=True))
    decoder(tokens_BT, **options | {"ahead": strange}, on_ahead=told.append)
    assert torch.equal(told[0], told[1])


def test_other_depths_than_the_model_has_are_refused():
    decoder = make(AHEAD)
    options, tokens_BT = inputs(AHEAD)
    with pytest.raises(ValueError, match="zip"):
        decoder(tokens_BT, **options | {"ahead": options["ahead"][:1]})
