"""House rules as pure functions of a module's text, so that each can be shown to fail on a mutant."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "drumline"
MODULES = sorted(SOURCE.rglob("*.py"))
ROOMS = sorted(path.parent for path in SOURCE.rglob("__init__.py"))

MAY_READ_ENVIRONMENT = {"comm/environment.py", "cli/environment.py"}
FORBIDDEN_NAMES = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
MAX_LINES = 500

# Functions that draw from, or seed, a generator that the whole process shares.
_TORCH_DRAWS = {
    "alpha_dropout",
    "bernoulli",
    "dropout",
    "feature_dropout",
    "manual_seed",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "seed",
}
_TENSOR_DRAWS = {"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"}
_INIT_DRAWS = {
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
}
_OWN_GENERATORS = {"Generator", "PCG64", "Philox", "Random", "SeedSequence", "SystemRandom", "default_rng"}


def label(path: Path) -> str:
    """A module's path within the package."""
    return path.relative_to(SOURCE).as_posix()


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; empty when it starts with something else than a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def environment_reads(text: str) -> list[str]:
    """Lines that read or change the process's environment."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and dotted(node) in ("os.environ", "os.environb", "os.getenv", "os.putenv"):
            found.append(f"line {node.lineno}: {dotted(node)}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names} & {"environ", "environb", "getenv", "putenv"}
            found += [f"line {node.lineno}: from os import {name}" for name in sorted(names)]
    return found


def global_draws(text: str) -> list[str]:
    """Calls that draw from a shared generator: torch without `generator=`, `random`, and numpy's legacy functions."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in ("random", "numpy.random", "torch.random"):
            names = sorted({alias.name for alias in node.names} - _OWN_GENERATORS)
            found += [f"line {node.lineno}: from {node.module} import {name}" for name in names]
        if isinstance(node, ast.Call) and (draw := _draw(node)):
            found.append(f"line {node.lineno}: {draw}")
    return found


def _draw(call: ast.Call) -> str:
    if any(keyword.arg == "generator" for keyword in call.keywords):
        return ""
    name = dotted(call.func)
    *path, last = name.split(".") if name else ["", call.func.attr if isinstance(call.func, ast.Attribute) else ""]
    module = ".".join(path)
    if module in ("torch", "torch.cuda", "torch.random") and last in _TORCH_DRAWS | {"manual_seed_all"}:
        return name
    if module in ("F", "nn", "nn.functional", "torch.nn", "torch.nn.functional") and "dropout" in last.lower():
        return name
    if module in ("random", "np.random", "numpy.random") and last not in _OWN_GENERATORS:
        return name
    if module in ("nn.init", "torch.nn.init", "init") and last in _INIT_DRAWS:
        return name
    return f".{last}()" if last in _TENSOR_DRAWS and isinstance(call.func, ast.Attribute) else ""


def export_faults(text: str) -> list[str]:
    """What is wrong with a room's `__init__`: no docstring, or an `__all__` that is absent, unsorted or incomplete."""
    tree = ast.parse(text)
    faults = [] if ast.get_docstring(tree) else ["has no docstring"]
    exported = next(_all(tree), None)
    if exported is None:
        return [*faults, "has no __all__"]
    if exported != sorted(exported, key=_kind_then_name):
        faults.append(f"__all__ is not sorted: {exported}")
    public = {name for name in _bound(tree) if not name.startswith("_") or name == "__version__"}
    faults += [f"{name} is bound but not in __all__" for name in sorted(public - set(exported))]
    faults += [f"{name} is in __all__ but not bound" for name in sorted(set(exported) - public)]
    return faults


def _kind_then_name(name: str) -> tuple[int, str]:
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)  # as ruff's RUF022 sorts


def _all(tree: ast.Module) -> Iterator[list[str]]:
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            yield list(ast.literal_eval(node.value))  # pyright: ignore[reportAttributeAccessIssue]


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name) and target.id != "__all__")


def user_asserts(text: str) -> int:
    """How many `assert` statements a module has; they vanish under `python -O`."""
    return sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text)))
