"""Corpora, tokenizers, packing, sample order and the loader.

In: a recipe's `data` section and a seed. Out: `Batch`es, each a pure function of the step. Imports torch where a
batch is made.
"""

from drumline.data.batch import IGNORED, Ahead, Batch
from drumline.data.corpus import Corpus, verify
from drumline.data.dataset import Dataset, check_vocabulary, open_dataset
from drumline.data.loader import Loader

__all__ = ["IGNORED", "Ahead", "Batch", "Corpus", "Dataset", "Loader", "check_vocabulary", "open_dataset", "verify"]
