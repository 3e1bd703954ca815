"""Batches are a pure function of the step: the same for every data degree, after a resume, and with threads."""

import random
import shlex
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.texts import ListSource

from drumline.data import Batch, Loader, check_vocabulary, open_dataset
from drumline.data.corpus import Corpus
from drumline.data.prepare import prepare
from drumline.recipe import load
from drumline.recipe.errors import DrumlineError
from drumline.recipe.sections import Data, Source

TEXTS = [f"document {number}: " + "la " * (number % 13) + "\n" for number in range(300)]


@pytest.fixture
def data(make_folder):
    return Data(sources=(Source(path=str(make_folder(TEXTS))),), seq_len=16, global_batch=8, micro_batch=2)


@pytest.fixture
def mixed(make_folder):
    sources = (
        Source(path=str(make_folder(TEXTS, name="one")), weight=0.7),
        Source(path=str(make_folder([text.upper() for text in TEXTS], name="two")), weight=0.3),
    )
    return Data(sources=sources, seq_len=16, global_batch=8, micro_batch=1)


def loader(dataset, **options):
    return Loader(dataset, **{"global_batch": 8, "micro_batch": 1, **options})


def stacked(batches: list[Batch]) -> list:
    return [
        torch.cat([getattr(batch, name) for batch in batches]).tolist()
        for name in ("tokens_BT", "labels_BT", "starts_BT")
    ]


def test_a_batch_has_the_contracts_types_and_shapes(data):
    batches = loader(open_dataset(data, 0), micro_batch=2).batches(3)
    assert len(batches) == 4
    for batch in batches:
        assert (batch.tokens_BT.dtype, batch.tokens_BT.shape) == (torch.int64, (2, 16))
        assert (batch.labels_BT.dtype, batch.labels_BT.shape) == (torch.int64, (2, 16))
        assert (batch.starts_BT.dtype, batch.starts_BT.shape) == (torch.int32, (2, 16))
        assert batch.num_tokens == (batch.labels_BT != -100).sum()


def test_without_a_document_mask_there_are_no_starts_but_labels_still_end_with_documents(data):
    masked, plain = (
        loader(open_dataset(data.model_copy(update={"document_mask": mask}), 0)).batches(0) for mask in (True, False)
    )
    assert all(batch.starts_BT is None for batch in plain)
    assert all(torch.equal(a.labels_BT, b.labels_BT) for a, b in zip(masked, plain, strict=True))


@pytest.mark.parametrize("form", ["{one},{two}", "{one}, {two}", "[{one},{two}]", "['{one}',{two}]", "[{one}]"])
def test_a_mixture_that_is_read_as_one_path_says_how_one_is_written(mixed, form):
    one, two = (source.path for source in mixed.sources)
    recipe = load("llama3-debug", [f"data.sources={form.format(one=one, two=two)}"])
    with pytest.raises(DrumlineError, match="is read as the path of one folder, which does not exist") as raised:
        open_dataset(recipe.data, 0)
    offered = [shlex.split(line.partition(": ")[2]) for line in str(raised.value).splitlines()[1:]]
    for words, weight in zip(offered, (1, 3), strict=True):
        sources = open_dataset(load("llama3-debug", words).data, 0).sources
        assert [source.path for source in sources] == ([one, two] if "two" in form else [one])
        assert sources[0].weight == weight


def test_a_shard_of_which_a_byte_was_changed_is_named_before_training(make_folder):
    folder = make_folder(TEXTS)
    data = Data(sources=(Source(path=str(folder)),), seq_len=16)
    open_dataset(data, 0)
    (shard, *_) = [entry.tokens for entry in Corpus(folder).manifest.shards]
    with open(folder / shard.name, "r+b") as file:
        file.seek(100)
        file.write(b"\x21\x00")  # a byte's token like any other
    with pytest.raises(DrumlineError, match=rf"{shard.name} is damaged: its digest is .*, the manifest says"):
        open_dataset(data, 0)


def test_a_comma_in_the_name_of_a_folder_that_exists_is_no_mixture(make_folder):
    path = str(make_folder(TEXTS, name="a,b"))
    assert open_dataset(Data(sources=(Source(path=path),), seq_len=16), 0).sources[0].path == path


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_data_degree_sees_the_same_global_batches(mixed, split):
    dataset = open_dataset(mixed, 5, split)
    for step in (0, 7, 1000):
        whole = stacked(loader(dataset).batches(step))
        for degree in (2, 4, 8):
            ranks = [loader(dataset, data_rank=rank, data_degree=degree).batches(step) for rank in range(degree)]
            assert stacked([batch for batches in ranks for batch in batches]) == whole


def test_iteration_resumed_at_a_step_equals_iteration_that_went_on(mixed):
    dataset = open_dataset(mixed, 5)
    with loader(dataset, num_workers=2, prefetch=3) as without_a_stop:
        steps = [stacked(next(without_a_stop)) for _ in range(40)]
    for first_step in (1, 17, 39):
        with loader(open_dataset(mixed, 5), first_step=first_step, num_workers=1) as resumed:
            assert [stacked(next(resumed)) for _ in range(40 - first_step)] == steps[first_step:]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_iteration_gives_the_steps_in_order_whatever_the_number_of_threads(mixed, num_workers):
    dataset = open_dataset(mixed, 5)
    with loader(dataset, num_workers=num_workers, prefetch=4) as iterated:
        for step in range(20):
            assert iterated.step == step
            assert stacked(next(iterated)) == stacked(iterated.batches(step))


def test_an_epoch_visits_every_sample_once_and_the_next_in_another_order(data):
    dataset = open_dataset(data, 0)
    size = dataset.sources[0].num_rows
    epochs = [dataset.rows(np.arange(epoch * size, (epoch + 1) * size)).tokens_BT.tolist() for epoch in range(2)]
    stored = dataset.sources[0].stream.rows(np.arange(size), 16).tokens_BT.tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(stored)
    assert epochs[0] != epochs[1]


def test_without_shuffling_samples_come_as_stored(data):
    dataset = open_dataset(data.model_copy(update={"shuffle": False}), 0)
    stored = dataset.sources[0].stream.rows(np.arange(24), 16)
    assert dataset.rows(np.arange(24)).tokens_BT.tolist() == stored.tokens_BT.tolist()


def test_another_seed_orders_training_otherwise_and_leaves_validation_alone(data):
    train = [stacked(loader(open_dataset(data, seed)).batches(0)) for seed in (0, 1)]
    validation = [stacked(loader(open_dataset(data, seed, "validation")).batches(0)) for seed in (0, 1)]
    assert train[0] != train[1]
    assert validation[0] == validation[1]


def test_validation_counts_every_token_of_its_documents_once(data):
    dataset = open_dataset(data.model_copy(update={"validation_fraction": 0.1}), 0, "validation")
    stream = dataset.sources[0].stream
    steps = [loader(dataset).batches(step) for step in range(dataset.num_steps(8))]
    counted = sum(batch.num_tokens for batches in steps for batch in batches)
    assert counted == stream.num_tokens - stream.num_documents  # all but each document's first token
    assert sum(batch.num_tokens for batch in loader(dataset).batches(dataset.num_steps(8))) == 0


def test_weights_are_kept_in_each_run_of_samples(mixed):
    dataset = open_dataset(mixed, 0)
    tokens = dataset.rows(np.arange(400)).tokens_BT
    upper = np.isin(tokens, list(b"DOCUMENTLA")).any(axis=1).sum()
    assert abs(int(upper) - 120) <= 2


def test_loading_touches_no_global_generator(mixed):
    def states():
        return random.getstate(), [str(part) for part in np.random.get_state()], torch.get_rng_state().tolist()

    before = states()
    with loader(open_dataset(mixed, 5), num_workers=2) as iterated:
        for _ in range(5):
            next(iterated)
    assert states() == before


def test_global_generators_do_not_change_what_is_loaded(mixed):
    batches = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        with loader(open_dataset(mixed, 5), num_workers=1) as iterated:
            batches.append([stacked(next(iterated)) for _ in range(3)])
    assert batches[0] == batches[1]


def test_an_error_in_a_thread_reaches_the_caller_at_its_step_and_says_where(data, monkeypatch):
    dataset = open_dataset(data, 0)
    good = dataset.rows

    def rows(index_B):
        if index_B[0] >= 3 * 8:
            raise RuntimeError("disk on fire")
        return good(index_B)

    monkeypatch.setattr(dataset, "rows", rows)
    with loader(dataset, num_workers=2, prefetch=4) as iterated:
        for _ in range(3):
            next(iterated)
        with pytest.raises(RuntimeError, match="disk on fire") as caught:
            next(iterated)
        assert "data of step 3" in caught.value.__notes__[0]
        assert iterated.step == 3


def test_a_damaged_token_names_the_step_and_the_folder(data):
    dataset = open_dataset(data, 0)
    path = dataset.sources[0].corpus.folder / "tokens-00000.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with loader(dataset, num_workers=1) as iterated, pytest.raises(DrumlineError, match=r"data of step 0.*vocabulary"):
        next(iterated)


def test_closing_ends_the_threads_and_iteration_can_go_on(data):
    iterated = loader(open_dataset(data, 0), num_workers=2)
    first = [stacked(next(iterated)) for _ in range(2)]
    iterated.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("drumline-loader")]
    iterated.seek(0)
    assert [stacked(next(iterated)) for _ in range(2)] == first
    iterated.close()


@settings(max_examples=30)
@given(degree=st.sampled_from([1, 2, 4]), micro=st.sampled_from([1, 2]), step=st.integers(0, 10**9))
def test_any_split_of_any_step_is_a_slice_of_the_global_samples(built_in_dataset, degree, micro, step):
    whole = built_in_dataset.rows(np.arange(step * 8, step * 8 + 8)).tokens_BT
    for rank in range(degree):
        batches = loader(built_in_dataset, micro_batch=micro, data_rank=rank, data_degree=degree).batches(step)
        local = 8 // degree
        found = np.concatenate([batch.tokens_BT.numpy() for batch in batches])
        assert (found == whole[rank * local : (rank + 1) * local]).all()
        assert len(batches) == local // micro


@pytest.fixture(scope="module")
def built_in_dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "folder"
    prepare(ListSource(TEXTS), folder, tokenizer="bytes")
    return open_dataset(Data(sources=(Source(path=str(folder)),), seq_len=16, global_batch=8), 0)


def test_a_dataset_smaller_than_a_global_batch_is_refused(make_folder):
    path = str(make_folder(["a short text of fifty-two characters, more or less.", "x"], name="small"))
    dataset = open_dataset(Data(sources=(Source(path=path),), seq_len=16, validation_fraction=0.0), 0)
    with pytest.raises(DrumlineError, match=r"3 samples of 16 tokens, fewer than data.global_batch = 8"):
        loader(dataset)


def test_a_small_source_of_large_weight_repeats_within_a_batch(make_folder):
    small = Source(
        path=str(make_folder(["a text of two samples of sixteen tokens each", "x"], name="small")), weight=3.0
    )
    large = Source(path=str(make_folder(TEXTS, name="large")))
    dataset = open_dataset(Data(sources=(small, large), seq_len=16, validation_fraction=0.0), 0)
    batches = loader(dataset).batches(0)
    distinct = {tuple(batch.tokens_BT[0].tolist()) for batch in batches}
    assert len(distinct) == dataset.sources[0].num_rows + 2


def test_text_shorter_than_a_sample_is_refused(make_folder):
    data = Data(sources=(Source(path=str(make_folder(["tiny", "x"]))),), seq_len=16)
    with pytest.raises(DrumlineError, match=r"too small: its train split has \d tokens in 1 documents"):
        open_dataset(data, 0)


def test_a_batch_that_cannot_be_dealt_evenly_is_refused(data):
    with pytest.raises(DrumlineError, match=r"global_batch = 8 is not a multiple of data.micro_batch = 2 times the 3"):
        loader(open_dataset(data, 0), micro_batch=2, data_degree=3)


def test_a_vocabulary_larger_than_the_models_is_refused_and_a_smaller_one_is_not(data):
    dataset = open_dataset(data, 0)
    check_vocabulary(dataset, 257)
    check_vocabulary(dataset, 2048)
    with pytest.raises(DrumlineError, match=r"model.vocab_size = 256 .* vocabulary of 257 .*\n.*model.vocab_size=384"):
        check_vocabulary(dataset, 256)


def test_sources_with_different_tokenizers_are_refused(make_folder):
    sources = (
        Source(path=str(make_folder(TEXTS, name="bytes"))),
        Source(path=str(make_folder(TEXTS, name="bpe", tokenizer="bpe:300"))),
    )
    with pytest.raises(DrumlineError, match=r"different tokenizers: .*bytes \(bytes\) and .*bpe \(bpe:300\)"):
        open_dataset(Data(sources=sources, seq_len=16), 0)


def test_a_recipe_that_asks_for_another_tokenizer_than_the_folders_is_refused(data):
    with pytest.raises(DrumlineError, match=r"data.tokenizer = bpe:4096 but .* was prepared with bytes"):
        open_dataset(data.model_copy(update={"tokenizer": "bpe:4096"}), 0)


def test_the_digest_tells_data_and_order_apart(data, mixed):
    digests = {
        open_dataset(data, 0).digest,
        open_dataset(data, 1).digest,
        open_dataset(data, 0, "validation").digest,
        open_dataset(data.model_copy(update={"seq_len": 8}), 0).digest,
        open_dataset(mixed, 0).digest,
    }
    assert len(digests) == 5
    assert open_dataset(data, 0).digest in digests
