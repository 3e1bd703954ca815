"""An environment of its own for the peer torchtitan, and the text and tokenizer that its wheel does not bring."""

import importlib.metadata
import json
import random
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PACKAGES = [
    "torchtitan==0.3.0",
    "spmd_types==0.2.3",
    "torchdata==0.11.0",
    "torch_checkpointing==0.1.1",
    "triton==3.9.0",
]
DEPENDENCIES = ["datasets>=3.6,<4.8", "tokenizers", "safetensors", "tyro", "tensorboard", "einops", "pillow"]


class PeerMissingError(Exception):
    """The peer does not install here; the message is pip's last word."""


def ensure(folder: Path) -> Path:
    """Makes the environment and the assets where they are missing.

    Args:
        folder: kept between runs; a few hundred MB.

    Returns:
        The environment's Python.

    Raises:
        PeerMissingError: pip could not install a package.
    """
    python, done = folder / "venv" / "bin" / "python", folder / "installed"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        venv.create(folder / "venv", with_pip=True, clear=True)
        version = importlib.metadata.version("torch")
        try:
            _pip(python, f"torch=={version}")
        except PeerMissingError:  # a local build label that the index does not have
            _pip(python, f"torch=={version.split('+')[0]}")
        _pip(python, "--no-deps", *PACKAGES)  # its own pins ask for a torch of the night
        _pip(python, *DEPENDENCIES)
        done.touch()
    if not (folder / "tests/assets/tokenizer/tokenizer.json").exists():
        _make_assets(folder)
    return python


def _pip(python: Path, *packages: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeerMissingError((done.stderr.strip().splitlines() or ["pip failed"])[-1])


def _make_assets(folder: Path) -> None:
    """Random sentences of words from Python's own sources, and a tokenizer of 2,000 entries trained on them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    texts = [path.read_text(errors="ignore") for path in sources]
    words = sorted({word for text in texts for word in text.split() if word.isalpha()})
    draw = random.Random(0)
    corpus = folder / "tests/assets/c4_test"
    corpus.mkdir(parents=True, exist_ok=True)
    with (corpus / "data.json").open("w") as lines:
        for _ in range(4000):
            lines.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(60, 400)))}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=special))
    place = folder / "tests/assets/tokenizer"
    place.mkdir(parents=True, exist_ok=True)
    (place / "tokenizer_config.json").write_text(json.dumps({"bos_token": special[0], "eos_token": special[1]}))
    tokenizer.save(str(place / "tokenizer.json"))


if __name__ == "__main__":
    print(ensure(Path(sys.argv[1])))
