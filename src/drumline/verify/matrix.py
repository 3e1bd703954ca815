"""The built-in table: which layouts of which models `drumline verify --matrix` proves. Data, and nothing else.

A row is a small model, a layout, and what else is set. Its name is all three, so that a part can be picked by a
pattern: `dense/dp2.cp2`, `moe/fsdp2.ep2`, `dense/cp4 ulysses`.

Mixtures of experts in bf16 choose all experts: where two scores are closer than rounding, a choice may flip, and what
follows is another model. In fp32 flips are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from drumline.recipe import DrumlineError, Recipe, load
from drumline.verify.run import Case
from drumline.verify.shrink import steady, with_batch

_TINY = (
    "model.num_layers=4",
    "model.dim=32",
    "model.head_dim=8",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.hidden_dim=64",
    "model.vocab_size=80",
    "data.seq_len=32",
    "memory.loss_chunk_tokens=48",
    "precision.compute=fp32",
)
GLOBAL_BATCH = 16
"""Sequences in a step: two micro-batches on each of eight data-parallel ranks, or eight through a pipeline of four."""

_EXPERTS = ("model.num_layers=2", "model.moe.num_experts=4", "model.moe.expert_hidden_dim=32")

MODELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dense": ("llama3-debug", _TINY),
    "causal": ("llama3-debug", (*_TINY, "data.document_mask=false")),
    "deep": ("llama3-debug", (*_TINY, "model.num_layers=8")),
    "uneven": ("llama3-debug", (*_TINY, "model.num_layers=5", "model.vocab_size=67")),
    "tied": ("llama3-debug", (*_TINY, "model.tie_embeddings=true")),
    "qwen": ("qwen3-0.6b", (*_TINY, "model.num_kv_heads=2", "model.tie_embeddings=false")),
    "moe": ("qwen3-moe-debug", (*_TINY, *_EXPERTS)),
    "moe-shared": (
        "qwen3-moe-debug",
        (
            *_TINY,
            *_EXPERTS,
            "model.num_layers=3",
            "model.moe.num_dense_layers=1",
            "model.moe.num_shared_experts=1",
            "model.moe.shared_expert_gate=true",
            "model.moe.scoring=sigmoid",
            "model.moe.num_expert_groups=2",
            "model.moe.groups_per_token=1",
            "model.moe.balance=bias",
        ),
    ),
    "latent": (
        "deepseek-v3-debug",
        (
            *_TINY,
            "model.num_layers=2",
            "model.num_kv_heads=8",
            "model.head_dim=12",
            "model.mla.q_lora_rank=16",
            "model.mla.kv_lora_rank=16",
            "model.mla.qk_nope_head_dim=8",
            "model.mla.qk_rope_head_dim=4",
            "model.mla.v_head_dim=8",
            "model.moe.num_experts=4",
            "model.moe.expert_hidden_dim=32",
        ),
    ),
    "moe-capacity": ("qwen3-moe-debug", (*_TINY, *_EXPERTS, "model.moe.capacity_factor=1.0")),
    "moe-all": ("qwen3-moe-debug", (*_TINY, *_EXPERTS, "model.moe.experts_per_token=4")),
}
"""Name -> the built-in recipe that it is like, and what makes it small."""

_SHORT = {
    "zero1": "layout.zero=1",
    "zero2": "layout.zero=2",
    "gather": "layout.cp_method=gather",
    "ulysses": "layout.cp_method=ulysses",
    "ring_ulysses": "layout.cp_method=ring_ulysses layout.cp_ulysses=2",
    "async": "layout.tp_async=true",
    "no-sp": "layout.sequence_parallel=false",
    "full": "memory.activation_checkpointing=full",
    "selective": "memory.activation_checkpointing=selective",
    "every_n": "memory.activation_checkpointing=every_n",
    "bf16": "precision.compute=bf16",
    "sdpa": "model.attention=sdpa",
    **{
        name: f"layout.pp_schedule={name}"
        for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zero-bubble", "zbv", "dualpipev")
    },
}
"""Words of a row's name -> overrides."""

_TABLE: tuple[tuple[str, str], ...] = (
    # Every axis alone.
    ("dense", "dp1, dp2, dp4, fsdp2, fsdp4, cp2, cp4, tp2, tp4, pp2, pp4"),
    ("dense", "fsdp2 zero1, fsdp2 zero2, fsdp4 zero1, fsdp4 zero2, tp2 no-sp, tp4 no-sp"),
    ("moe", "dp2, fsdp2, cp2, tp2, tp2 no-sp, pp2, fsdp2.ep2, fsdp4.ep4, cp2.ep2, cp4.ep4"),
    # Every method of context parallelism, with documents and without.
    ("dense", "cp2 gather, cp4 gather, cp2 ulysses, cp4 ulysses, cp4 ring_ulysses, cp4 sdpa"),
    ("causal", "cp2, cp4, cp4 gather, cp4 ulysses, cp4 ring_ulysses, dp2, tp2, pp2"),
    # Every schedule.
    ("dense", "pp2 gpipe, pp2 zb-h1, pp2 interleaved-1f1b, pp2 interleaved-zero-bubble, pp2 zbv, pp2 dualpipev"),
    ("deep", "pp4 gpipe, pp4 zb-h1, pp4 interleaved-1f1b, pp4 interleaved-zero-bubble, pp4 zbv, pp4 dualpipev"),
    # Pairs of axes.
    ("dense", "dp2.fsdp2, dp2.cp2, dp2.tp2, dp2.pp2, fsdp2.cp2, fsdp2.tp2, fsdp2.pp2, tp2.cp2, cp2.pp2, tp2.pp2"),
    ("dense", "tp2.cp2 ulysses, tp2.cp2 gather, fsdp2.cp2 zero1, fsdp2.pp2 zero1, fsdp2.pp2 zero2"),
    (
        "moe",
        "dp2.fsdp2.ep2, fsdp2.tp2.ep2, fsdp2.cp2.ep2, fsdp2.cp2.ep4, fsdp2.pp2.ep2, cp2.tp2.ep2, tp2.cp2, fsdp4.ep2",
    ),
    # Three and four.
    ("dense", "dp2.tp2.pp2, fsdp2.tp2.cp2, tp2.cp2.pp2, dp2.fsdp2.cp2, dp2.fsdp2.tp2, dp2.fsdp2.tp2.pp2"),
    ("dense", "fsdp2.tp2.cp2.pp2, tp4.pp2, cp4.tp2"),
    ("moe", "fsdp2.pp2.ep2 zb-h1, fsdp2.tp2.pp2.ep2, fsdp2.cp2.tp2.ep2"),
    # What does not divide, what is shared, what is normed.
    ("uneven", "tp2, tp4, pp2, pp4, tp2.pp2, fsdp2.tp2, dp2.tp2, cp2.tp2"),
    ("tied", "fsdp2, tp2, pp2, pp4, tp2.pp2, pp2 zbv"),
    ("qwen", "dp2, cp2, tp2, tp2 no-sp, fsdp2.tp2, cp4 ulysses, pp2"),
    ("moe-shared", "dp2, fsdp2.ep2, tp2, pp2, cp2.ep2, fsdp2.tp2.ep2"),
    # DeepSeek-V3: latent attention, a token further ahead, experts.
    (
        "latent",
        "dp2, fsdp2, cp2, cp4 gather, fsdp2.cp2, tp2, tp2 no-sp, fsdp2.ep2, fsdp2.tp2.ep2, fsdp2 full, pp2, tp2.pp2",
    ),
    # Matmuls in chunks behind their transfers.
    ("dense", "tp2 async, tp4 async, fsdp2.tp2 async, pp2.tp2 async"),
    ("moe", "tp2 async"),
    # Experts without room for all who come.
    ("moe-capacity", "dp2, fsdp2.ep2"),
    # Recomputation.
    ("dense", "dp1 full, dp1 selective, fsdp2 full, fsdp2 selective, fsdp2 every_n, cp2 full, cp2 selective"),
    ("dense", "tp2 full, tp2 selective, pp2 full, pp2 zbv full"),
    ("moe", "fsdp2 full, fsdp2.ep2 full, fsdp2.ep2 every_n, dp2 selective"),
    # bf16.
    (
        "dense",
        "dp2 bf16, fsdp2 bf16, fsdp2 zero1 bf16, fsdp2 zero2 bf16, cp2 bf16, cp4 ulysses bf16, tp2 bf16, pp2 bf16",
    ),
    ("dense", "tp2.pp2 bf16, fsdp2.tp2 bf16, fsdp2 full bf16"),
    ("moe-all", "dp2 bf16, fsdp2.ep2 bf16, tp2 bf16"),
)


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        model: a key of `MODELS`.
        words: the layout, then words that stand for overrides.
    """

    model: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """What a pattern is held against."""
        return f"{self.model}/{' '.join(self.words)}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """What the words stand for."""
        return tuple(text for word in self.words[1:] for text in _SHORT[word].split())


def rows_of_table(table: Sequence[tuple[str, str]]) -> tuple[Row, ...]:
    """The rows of a table of (model, rows with commas between them)."""
    return tuple(Row(model, tuple(words.split())) for model, listed in table for words in listed.split(", "))


ROWS = rows_of_table(_TABLE)


def select(pattern: str, table: Sequence[Row] = ROWS) -> list[Row]:
    """The rows whose name matches a pattern with `*`, or contains it.

    Args:
        pattern: empty: all rows.
        table: to choose from.

    Returns:
        The rows, in the order of the table.

    Raises:
        DrumlineError: none matches.
    """
    found = [row for row in table if pattern in row.name or fnmatchcase(row.name, pattern)]
    if not found:
        some = ", ".join(row.name for row in table[:: max(1, len(table) // 4)])
        raise DrumlineError(f"--only {pattern!r} matches no row of the table; rows are named like {some}")
    return found


def recipe_of(row: Row) -> Recipe:
    """The recipe of a row, before its batch is cut for the layout.

    Args:
        row: of the table.

    Returns:
        The recipe. A key that this version does not know raises, as it does for a user.
    """
    name, small = MODELS[row.model]
    return steady(load(name, (*small, f"layout={row.words[0]}", *row.overrides)))


def case_of(row: Row) -> Case:
    """A row as a case: all rows of a model share one global batch, and so one reference."""
    recipe = recipe_of(row)
    return Case(" ".join(row.words), row.model, with_batch(recipe, GLOBAL_BATCH))
