"""Commits from and to Hugging Face folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import drumline
from drumline.checkpoint.commit import Commit
from drumline.checkpoint.errors import CommitError
from drumline.checkpoint.folder import COMMITS
from drumline.checkpoint.huggingface import HuggingFaceFolder, export_huggingface, parameter_shapes
from drumline.checkpoint.huggingface_moe import OF_TRAINING
from drumline.checkpoint.importing import import_weights
from drumline.recipe.sections import Model

_MODEL = "model."
# What config.json does not define: how attention is computed, how weights that are there would have been initialized,
# and how experts are trained.
_NOT_IMPORTED: Any = {
    "attention": True,
    "init_std": True,
    "mtp_loss_weight": True,
    "moe": dict.fromkeys(OF_TRAINING, True),
}


def export_commit(
    commit: Commit,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[Path]:
    """Writes the weights of a commit as a Hugging Face folder.

    Args:
        commit: with weights `model.*` and a recipe that says the model's shape.
        folder: to be made; it must not exist, or be empty.
        dtype: of the weights; None: as they are stored.
        progress: is told about bytes that were read since the last call.

    Returns:
        The files that were written.

    Raises:
        CommitError: the commit's recipe describes no model, or its bytes are damaged.
        DrumlineError: the folder has something in it.
    """
    try:
        model = Model.model_validate(commit.recipe["model"])
    except (KeyError, ValidationError) as error:
        raise CommitError(f"{commit.path}: its recipe does not describe a model, so it cannot be exported") from error

    model = _with_stored_bias(model, commit)

    def read(name: str) -> torch.Tensor:
        tensor = commit.tensor(_MODEL + name)
        progress(tensor.nbytes)
        return tensor

    return export_huggingface(folder, model, read, dtype=dtype)


def _with_stored_bias(model: Model, commit: Commit) -> Model:
    """The model with the routers' bias where the commit has one: the recipe of imported weights does not say so."""
    moe = model.moe
    if moe is None or not commit.has(f"{_MODEL}layers.{moe.num_dense_layers}.mlp.router.bias"):
        return model
    return model.model_copy(update={"moe": moe.model_copy(update={"balance": "bias"})})


def import_huggingface(source: Path, run: Path) -> Path:
    """Makes step 0 of a run from a Hugging Face folder.

    Weights are kept in fp32, as training keeps them. The commit's state says `has_optimizer: false`, so that a run that
    starts from it starts its optimizer anew; its recipe holds the model's shape and nothing else.

    Args:
        source: holds config.json and safetensors.
        run: a run directory without commits.

    Returns:
        The folder of the commit.

    Raises:
        DrumlineError: the folder cannot be read, or the run has commits.
    """
    folder = HuggingFaceFolder(source)
    shapes = parameter_shapes(folder.model)
    return import_weights(
        run / COMMITS,
        {_MODEL + name: 4 * torch.Size(shapes[name]).numel() for name in folder.names},
        lambda name: folder.read(name.removeprefix(_MODEL)).float(),
        recipe={"model": folder.model.model_dump(mode="json", exclude=_NOT_IMPORTED)},
        environment={"drumline": drumline.__version__, "imported_from": str(source)},
        state={"step": 0, "num_samples": 0, "has_optimizer": False},
    )
