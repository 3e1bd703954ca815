"""The sections of a recipe: a tree of frozen, typed tables that says all that defines a run.

A section checks one field at a time (type, range); rules that join fields, and rules about a machine, live in `rules`.
Types are strict: a number in quotes is no number, and `true` is no 1.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from drumline.recipe.layout import Layout
from drumline.recipe.model import Mla, Model, Moe, RopeScaling, Yarn
from drumline.recipe.section import Fraction, Natural, Positive, Section

__all__ = [
    "Checkpoint",
    "Data",
    "Layout",
    "Memory",
    "Metrics",
    "Mla",
    "Model",
    "Moe",
    "Numerics",
    "Optimizer",
    "Precision",
    "Recipe",
    "Resilience",
    "RopeScaling",
    "Run",
    "Schedule",
    "Section",
    "Source",
    "Yarn",
]


class Source(Section):
    """One stream of the mixture. Accepts a bare path wherever a table is accepted."""

    path: str = Field(description="`stdlib` (built in, no download) or a folder made by `drumline data prepare`.")
    weight: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Share of samples, relative to the other sources."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class Data(Section):
    """Which tokens, in which order and in which batches."""

    sources: Annotated[tuple[Source, ...], Field(strict=False)] = Field(
        default=(Source(path="stdlib"),), description="The mixture, by weight: a list, or one path."
    )
    tokenizer: str = Field(
        default="bpe:2048", description="`bytes`, `bpe:SIZE` (trained on the source) or a tokenizer.json."
    )
    cache_dir: str = Field(
        default="", description="Where built-in sources are prepared; empty: the user's cache folder."
    )
    seq_len: Positive = Field(default=512, description="Tokens T in a sequence.")
    global_batch: Positive = Field(default=8, description="Sequences in one optimizer step, over all ranks.")
    micro_batch: Positive = Field(default=2, description="Sequences that one rank runs at a time.")
    document_mask: bool = Field(
        default=True, description="Attention does not cross from one packed document into another."
    )
    shuffle: bool = Field(default=True, description="Visit samples in a keyed permutation; off: in stored order.")
    validation_fraction: Fraction = Field(
        default=0.01, description="Share of documents kept for validation, unless a prepared folder fixed its own."
    )
    num_workers: Natural = Field(default=1, description="Threads that prepare batches ahead; 0: none.")
    prefetch: Positive = Field(default=2, description="Steps that the loader keeps ready.")

    @field_validator("sources", mode="before")
    @classmethod
    def _from_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value


class Optimizer(Section):
    """AdamW (arXiv:1711.05101) and clipping."""

    name: Literal["adamw"] = Field(default="adamw", description="The optimizer.")
    lr: Annotated[float, Field(ge=0)] = Field(default=1e-3, description="Peak learning rate.")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="Decay of the first moment.")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.95, description="Decay of the second moment.")
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="Decoupled decay of matrices (not of norms)."
    )
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="Clip gradients to this global norm; 0: never."
    )
    implementation: Literal["auto", "foreach", "fused"] = Field(
        default="auto",
        description="torch's AdamW implementation; auto: fused, and in exact mode a kernel or foreach, whose bits do "
        "not depend on how tensors are cut. With bf16 states there is one, drumline's own.",
    )
    state_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="What holds the two moments; bf16: half the bytes, rounded stochastically."
    )


class Schedule(Section):
    """Learning rate over steps: linear warm-up, then the kind's shape down to min_lr_ratio."""

    kind: Literal["wsd", "cosine", "constant"] = Field(
        default="wsd", description="Warm-up-stable-decay, cosine or constant."
    )
    warmup_steps: Natural = Field(default=10, description="Steps of linear warm-up.")
    decay_fraction: Fraction = Field(default=0.2, description="WSD: last share of the run that decays linearly.")
    min_lr_ratio: Fraction = Field(default=0.0, description="Final learning rate as a share of the peak.")


class Precision(Section):
    """Which bytes hold what."""

    compute: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Matmuls and activations; weights stay fp32 (master)."
    )
    reduce: Literal["fp32"] = Field(default="fp32", description="Gradient reduction.")


class Memory(Section):
    """What is kept for the backward and what is computed again."""

    activation_checkpointing: Literal["none", "full", "every_n", "selective"] = Field(
        default="none",
        description="none; full: each block; every_n: each n-th block; selective: keep matmuls and attention.",
    )
    every_n: Positive = Field(default=2, description="For every_n: checkpoint blocks 0, n, 2n, ...")
    loss_chunk_tokens: Positive = Field(
        default=1024,
        description="Tokens whose logits exist at a time in the loss; with numerics.blocks over 1 those of a chunk do.",
    )


class Numerics(Section):
    """How bits are kept."""

    mode: Literal["default", "exact"] = Field(default="default", description="exact: the same bits under every layout.")
    deterministic: bool = Field(
        default=True, description="Only operators that give the same bits each time they run; torch refuses others."
    )
    lanes: Natural = Field(
        default=0,
        description="For exact: equal parts of the global batch that ranks own and gradients are summed by, a power of "
        "two and at least dp x fsdp. 0: as many as hold whole micro-batches, up to 8.",
    )
    blocks: Positive = Field(
        default=1,
        description="For exact: fixed slices that products are summed by, a power of two, and half as many as fixed "
        "chunks of a sequence; tp and cp divide it. 1: plain products, which tp, cp and ep cannot share.",
    )
    invariant: bool = Field(
        default=False,
        description="Compute the model with operators whose bits no batch, position, chunk or thread moves, alone.",
    )


class Checkpoint(Section):
    """When the run is committed and how much is kept."""

    every: Natural = Field(default=100, description="Steps between commits; 0: only at the end.")
    keep: Positive = Field(default=3, description="Newest commits that are kept.")
    asynchronous: bool = Field(default=True, description="Write in the background while training goes on.")
    at_end: bool = Field(default=True, description="Commit after the last step.")


class Resilience(Section):
    """What happens when something goes wrong."""

    max_restarts: Natural = Field(
        default=0, description="Times that a failed local launch is started again from its last commit."
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="Longest that a collective may take, seconds."
    )
    replay_every: Natural = Field(
        default=0,
        description="Steps between checks for silent data corruption, which compute a micro-batch twice; 0: none.",
    )


class Metrics(Section):
    """What is reported."""

    log_every: Positive = Field(default=1, description="Steps between console lines; metrics.jsonl has every step.")
    peak: str = Field(
        default="measure", description="Peak for MFU: `measure`, an accelerator's name, or TFLOP/s as a number."
    )
    tensorboard: bool = Field(default=False, description="Also write TensorBoard events.")
    wandb: str = Field(default="", description="Also log to this Weights & Biases project.")
    expert_load_every: Natural = Field(
        default=1, description="Steps between rows of metrics.jsonl that have the load of every expert; 0: none."
    )


class Run(Section):
    """Where, how long and from which seed."""

    name: str = Field(default="", description="Name of the run; empty: the recipe's.")
    dir: str = Field(default="", description="Run directory; empty: runs/<name>. Holds metrics, checkpoints, report.")
    steps: Natural = Field(default=100, description="Optimizer steps in the whole run.")
    stop_after: Natural = Field(
        default=0, description="Step after which to stop, with the schedule of the whole run; 0: run.steps."
    )
    seed: Natural = Field(default=0, description="The seed of initialization, data order, dropout and rounding.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA where there is one.")
    threads: Natural = Field(
        default=0,
        description="CPU threads a rank computes with; 0: cores divided by local ranks, and in exact mode 1, since "
        "threads can move bits.",
    )
    compile: bool = Field(default=False, description="torch.compile each block.")
    validate_every: Natural = Field(
        default=0, description="Steps between validations; 0: only before the first and after the last."
    )
    validation_batches: Natural = Field(default=8, description="Global batches in one validation; 0: no validation.")
    timeline: Natural = Field(
        default=0, description="Step whose forwards and backwards are timed into `pipeline.json`; 0: none."
    )
    profile: str = Field(default="", description="Steps to trace, `START:STOP`; writes a Chrome trace. Empty: none.")


class Recipe(Section):
    """All that defines a run."""

    name: str = Field(default="custom", description="The recipe's name.")
    model: Model = Field(default=Model(), description="The model.")
    data: Data = Field(default=Data(), description="The tokens.")
    optimizer: Optimizer = Field(default=Optimizer(), description="The optimizer.")
    schedule: Schedule = Field(default=Schedule(), description="The learning rate over steps.")
    layout: Layout = Field(
        default=Layout(), description="How the run is spread over ranks: a table or a string like dp2.fsdp4."
    )
    precision: Precision = Field(default=Precision(), description="Which bytes hold what.")
    memory: Memory = Field(default=Memory(), description="What is kept for the backward.")
    numerics: Numerics = Field(default=Numerics(), description="How bits are kept.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="When the run is committed.")
    resilience: Resilience = Field(default=Resilience(), description="What happens when something goes wrong.")
    metrics: Metrics = Field(default=Metrics(), description="What is reported.")
    run: Run = Field(default=Run(), description="Where, how long and from which seed.")
