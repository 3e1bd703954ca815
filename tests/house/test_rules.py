"""The house rules hold for every module, and each rule fails on what it is for."""

import pytest
from tests.house.rules import (
    FORBIDDEN_NAMES,
    MAX_LINES,
    MAY_READ_ENVIRONMENT,
    MODULES,
    ROOMS,
    environment_reads,
    export_faults,
    global_draws,
    label,
)


def each_module(test):
    return pytest.mark.parametrize("path", MODULES, ids=label)(test)


@each_module
def test_only_two_modules_read_the_environment(path):
    if label(path) not in MAY_READ_ENVIRONMENT:
        assert environment_reads(path.read_text()) == []


@pytest.mark.parametrize(
    "mutant",
    [
        "import os\nos.environ['RANK']",
        "import os\nos.environ.get('RANK')",
        "import os\nos.getenv('RANK')",
        "from os import environ",
        "def f():\n    import os\n    return os.environ",
    ],
)
def test_a_read_of_the_environment_is_found(mutant):
    assert environment_reads(mutant)


@each_module
def test_nothing_draws_from_a_global_generator(path):
    assert global_draws(path.read_text()) == []


@pytest.mark.parametrize(
    "mutant",
    [
        "torch.manual_seed(0)",
        "torch.cuda.manual_seed_all(0)",
        "x = torch.randn(3)",
        "x = torch.randperm(3, device='cpu')",
        "weight.normal_(0, 1)",
        "F.dropout(x, 0.1)",
        "layer = nn.Dropout(0.1)",
        "weight.data.uniform_()",
        "f(x).random_()",
        "nn.init.trunc_normal_(weight)",
        "torch.nn.init.kaiming_uniform_(weight)",
        "random.shuffle(x)",
        "np.random.permutation(3)",
        "np.random.seed(0)",
        "from random import shuffle",
        "from numpy.random import rand",
    ],
)
def test_a_draw_from_a_global_generator_is_found(mutant):
    assert global_draws(mutant)


@pytest.mark.parametrize(
    "sound",
    [
        "torch.randn(3, generator=generator)",
        "weight.normal_(generator=generator)",
        "random.Random(3).shuffle(x)",
        "np.random.default_rng(3).permutation(4)",
        "np.random.Generator(np.random.Philox(3))",
        "normal(seed, 'weights', 0, 10)",
        "from drumline.numerics.random import normal",
    ],
)
def test_a_draw_from_an_own_generator_is_no_fault(sound):
    assert global_draws(sound) == []


@pytest.mark.parametrize("room", ROOMS, ids=label)
def test_a_room_exports_sorted_and_complete(room):
    assert export_faults((room / "__init__.py").read_text()) == []


@pytest.mark.parametrize(
    "mutant",
    [
        "from a import b\n__all__ = ['b']",
        '"""Doc."""\nfrom a import b',
        '"""Doc."""\nfrom a import b, c\n__all__ = ["c", "b"]',
        '"""Doc."""\nfrom a import b, c\n__all__ = ["b"]',
        '"""Doc."""\nfrom a import b\n__all__ = ["b", "c"]',
        '"""Doc."""\nfrom a import B, c\n__all__ = ["c", "B"]',
        '"""Doc."""\nCONSTANT = 3\n__all__ = []',
    ],
)
def test_a_fault_of_exports_is_found(mutant):
    assert export_faults(mutant)


def test_sound_exports_have_no_fault():
    assert export_faults('"""Doc."""\nfrom a import B, C_D, e as f\n__all__ = ["C_D", "B", "f"]') == []


@each_module
def test_no_module_is_longer_than_a_reader_can_hold(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES


@each_module
def test_a_module_is_named_by_what_it_is_and_says_what_it_is_for(path):
    assert path.name not in FORBIDDEN_NAMES
    assert path.read_text().lstrip().startswith(('"""', 'r"""'))


@each_module
def test_source_is_ascii(path):
    assert path.read_text().isascii()
