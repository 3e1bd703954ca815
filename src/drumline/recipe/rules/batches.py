"""Rules of the tokens, the batches and the steps."""

import re
from collections.abc import Iterator

from drumline.recipe.nearest import nearest_multiples
from drumline.recipe.problem import Problem, override, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe

SMALLEST_BPE = 257  # 256 bytes and the end of a document
_TOKENIZER = re.compile(r"bytes|bpe:([1-9][0-9]{0,9})")


def sources_exist(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A mixture has at least one source, and each has a path."""
    if not recipe.data.sources:
        rule = "is an empty list; a run needs at least one source"
        remedy = override("data.sources", "stdlib")
        yield problem(recipe, "sources-empty", "data.sources", rule, remedy=remedy)
    for index, source in enumerate(recipe.data.sources):
        if not source.path.strip():
            yield problem(recipe, "source-path", f"data.sources.{index}.path", "names no source", ["stdlib"])


def tokenizer_is_readable(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """`bytes`, `bpe:SIZE` or a path."""
    text = recipe.data.tokenizer
    looks_like_path = "/" in text or text.endswith(".json") or "\\" in text
    if not _TOKENIZER.fullmatch(text) and not looks_like_path:
        nearest = [f"bpe:{recipe.model.vocab_size}", "bytes"] if recipe.model.vocab_size >= SMALLEST_BPE else ["bytes"]
        rule = "is no tokenizer: bytes, bpe:SIZE, or a path such as ./tokenizer.json"
        yield problem(recipe, "tokenizer-syntax", "data.tokenizer", rule, nearest)


def tokenizer_fits_vocabulary(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Every token has a row in the embedding."""
    match = _TOKENIZER.fullmatch(recipe.data.tokenizer)
    if match is None or all(source.path != "stdlib" for source in recipe.data.sources):
        return  # prepared sources bring their own tokenizer
    size = int(match[1]) if match[1] else SMALLEST_BPE
    vocabulary = recipe.model.vocab_size
    if size > vocabulary:
        rule = f"makes {size} tokens, but model.vocab_size = {vocabulary} has no row for all of them"
        fits = [f"bpe:{vocabulary}"] if match[1] and vocabulary >= SMALLEST_BPE else []
        remedy = "" if fits else override("model.vocab_size", size)
        yield problem(recipe, "tokenizer-vocab", "data.tokenizer", rule, fits, remedy)
    elif size < SMALLEST_BPE:
        rule = f"is too small: byte-level BPE starts with {SMALLEST_BPE} tokens"
        yield problem(recipe, "tokenizer-size", "data.tokenizer", rule, [f"bpe:{SMALLEST_BPE}"])


def sequence_fits_model(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """No position beyond what the model is meant for."""
    longest = recipe.model.max_seq_len
    if recipe.data.seq_len > longest:
        rule = f"is longer than model.max_seq_len = {longest}"
        yield problem(recipe, "seq-len-max", "data.seq_len", rule, [longest])


def batch_is_dealt_evenly(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Every data-parallel rank runs the same number of whole micro-batches."""
    if recipe.numerics.mode == "exact":
        return  # lanes are dealt, for which there are rules of their own
    degree, micro, batch = recipe.layout.data_degree, recipe.data.micro_batch, recipe.data.global_batch
    if batch % (degree * micro):
        rule = (
            f"is no multiple of {degree * micro} = {degree} data-parallel ranks (dp x fsdp) "
            f"x data.micro_batch = {micro}, so ranks would run different numbers of sequences"
        )
        nearest = nearest_multiples(degree * micro, batch)
        yield problem(recipe, "batch-divisible", "data.global_batch", rule, nearest)


def validation_has_data(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Documents are kept for validation when it is asked for, and some are left for training."""
    data, run = recipe.data, recipe.run
    if data.validation_fraction >= 1:
        rule = "keeps every document for validation and leaves none to train on"
        yield problem(recipe, "validation-all", "data.validation_fraction", rule, [0.01])
    if run.validation_batches and data.validation_fraction == 0:
        rule = f"keeps no document, but run.validation_batches = {run.validation_batches} asks for validation"
        yield problem(recipe, "validation-none", "data.validation_fraction", rule, [0.01], "run.validation_batches=0")
    if run.validate_every and not run.validation_batches:
        rule = "asks for validations, but run.validation_batches = 0 leaves them nothing to run"
        yield problem(recipe, "validation-batches", "run.validate_every", rule, [0])


def every_n_is_within_model(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Checkpointing each n-th block needs more than n blocks to differ from checkpointing only the first."""
    every_n, layers = recipe.memory.every_n, recipe.model.num_layers
    if recipe.memory.activation_checkpointing == "every_n" and every_n > layers:
        rule = f"is more than model.num_layers = {layers}: only the first block would be checkpointed"
        yield problem(recipe, "every-n-layers", "memory.every_n", rule, [layers])


def profile_is_a_range(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """`START:STOP`, within the run."""
    text, steps = recipe.run.profile, recipe.run.steps
    if not text:
        return
    match = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    example = [f"{min(3, steps - 1)}:{min(5, steps)}"] if steps else []  # a run of no steps has none to trace
    if match is None:
        rule = "is no range of steps, START:STOP"
        yield problem(recipe, "profile-syntax", "run.profile", rule, example)
    elif int(match[1]) >= int(match[2]):
        yield problem(recipe, "profile-order", "run.profile", "ends before it starts", example)
    elif int(match[1]) >= steps:
        rule = f"starts after the last step, run.steps = {steps}"
        yield problem(recipe, "profile-range", "run.profile", rule, example)


def timeline_is_within_the_run(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """The step that is timed is one of the run's."""
    steps = recipe.run.steps
    if recipe.run.timeline > steps:
        rule = f"is after the last step, run.steps = {steps}"
        yield problem(recipe, "timeline-range", "run.timeline", rule, [min(3, steps)])


def names_make_folders(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A name becomes a folder's name, and no path holds a NUL byte."""
    if not recipe.name:
        yield problem(recipe, "name-empty", "name", "is empty, so that a run would have no folder", ["custom"])
    for key, name in (("name", recipe.name), ("run.name", recipe.run.name)):
        if not re.fullmatch(r"[^/\\\x00-\x1f\x7f]*", name) or name in (".", "..") or len(name.encode()) > 200:
            fixed = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
            rule = "cannot name a folder: no slash, no control character, at most 200 bytes"
            yield problem(recipe, "name-folder", key, rule, [fixed] if fixed else [])
    paths = (("run.dir", recipe.run.dir), ("data.cache_dir", recipe.data.cache_dir))
    for key, path in (*paths, ("data.tokenizer", recipe.data.tokenizer)):
        if "\0" in path:
            yield problem(recipe, "path-nul", key, "holds a NUL byte, which no path can")


BATCH_RULES = (
    sources_exist,
    tokenizer_is_readable,
    tokenizer_fits_vocabulary,
    sequence_fits_model,
    batch_is_dealt_evenly,
    validation_has_data,
    every_n_is_within_model,
    profile_is_a_range,
    timeline_is_within_the_run,
    names_make_folders,
)
