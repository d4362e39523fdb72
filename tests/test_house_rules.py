"""The rules of this code base that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_branch"
FOLDERS = ("rollouts", "tree", "plan", "schedule", "state", "attention", "objective", "engine", "tracking")
TORCH_FREE = ("rollouts", "tree", "plan", "schedule", "tracking")
RUNNER = ("schedule/runner.py", "schedule/link.py")  # the part of the schedule that touches tensors
TENSOR_LIBRARIES = {"torch", "megatron", "deepspeed", "transformers"}
OWNERS = {
    "megatron": ("engine/", "launch/megatron_loop.py"),
    "deepspeed": ("engine/",),
    "wandb": ("tracking/wandb_sink.py",),
}
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    ".mypy.ini",
    ".pre-commit-config.yaml",
    ".pytest.ini",
    ".ruff.toml",
    "Makefile",
    "README.md",
    "configs",
    "launch",
    "megatron_branch",
    "setup.py",
    "tests",
    "tools",
}
# Modules that may read the process environment, with the reason.
ENVIRONMENT: dict[str, str] = {}


@cache
def _files() -> tuple[str, ...]:
    """Every file of the repository that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=True,
    )
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), filename=name)


def _modules(*folders: str) -> list[str]:
    return [name for name in _files() if name.endswith(".py") and name.startswith(folders)]


def _package_modules() -> list[str]:
    return _modules(f"{PACKAGE}/")


def _imports(name: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, inside functions too."""
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _inside(name: str) -> str:
    """Path within the package."""
    return str(PurePosixPath(name).relative_to(PACKAGE))


def _folder(name: str) -> str:
    return _inside(name).partition("/")[0]


def _is_torch_free(name: str) -> bool:
    return _folder(name) in TORCH_FREE and _inside(name) not in RUNNER


def test_hosts_and_services_have_one_owner() -> None:
    wrong = [
        f"{name}:{line}: {module}"
        for name in _modules(f"{PACKAGE}/", "launch/", "tools/")
        for line, module in _imports(name)
        for owners in [OWNERS.get(module.partition(".")[0])]
        if owners is not None and not name.removeprefix(f"{PACKAGE}/").startswith(owners)
    ]
    assert not wrong


def test_planning_imports_no_tensor_library() -> None:
    wrong = [
        f"{name}:{line}: {module}"
        for name in _package_modules()
        if _is_torch_free(name)
        for line, module in _imports(name)
        if module.partition(".")[0] in TENSOR_LIBRARIES
    ]
    assert not wrong


def test_left_knows_nothing_of_right() -> None:
    """`engine/` is where everything meets; `tracking/` stands apart and knows of nobody."""
    wrong = []
    for name in _package_modules():
        own = _folder(name)
        if own not in FOLDERS or own == "engine":
            continue
        if own == "tracking":
            known = {"tracking"}
        else:
            last = "objective" if _inside(name) in RUNNER else own
            known = set(FOLDERS[: FOLDERS.index(last) + 1])
        for line, module in _imports(name):
            parts = module.split(".")
            if parts[0] == PACKAGE and parts[1] not in known:
                wrong.append(f"{name}:{line}: {module}")
    assert not wrong


def test_torch_free_modules_state_what_is_always_true() -> None:
    silent = [
        name
        for name in _package_modules()
        if _folder(name) in ("rollouts", "tree", "plan", "schedule")
        and not name.endswith("__init__.py")
        and not re.search(r"^Always true\b.*:$", ast.get_docstring(_tree(name)) or "", re.MULTILINE)
    ]
    assert not silent


def test_every_module_says_what_it_is_for() -> None:
    modules = [name for name in _modules(f"{PACKAGE}/", "launch/", "tools/") if _tree(name).body]
    assert not [name for name in modules if not ast.get_docstring(_tree(name))]


def test_no_globals() -> None:
    assert not [
        f"{name}:{node.lineno}"
        for name in _modules(f"{PACKAGE}/", "launch/", "tools/", "tests/")
        for node in ast.walk(_tree(name))
        if isinstance(node, ast.Global)
    ]


def _environment_reads(tree: ast.Module) -> Iterator[int]:
    """Lines that read `os.environ` or call `os.getenv`; setting a variable for a child process is no read."""
    written = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            written.add(id(node.value))
        if isinstance(node, ast.Attribute) and node.attr in ("setdefault", "update", "pop"):
            written.add(id(node.value))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("os.environ", "os.getenv")
            and id(node) not in written
        ):
            yield node.lineno
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any("env" in alias.name for alias in node.names)
        ):
            yield node.lineno


def test_the_environment_switches_nothing() -> None:
    wrong = [
        f"{name}:{line}"
        for name in _package_modules()
        if _inside(name) not in ENVIRONMENT
        for line in _environment_reads(_tree(name))
    ]
    assert not wrong


def test_environment_reads_are_told_from_writes() -> None:
    writes = ["os.environ['A'] = 'b'", "os.environ.setdefault('A', 'b')", "del os.environ['A']"]
    reads = ["x = os.environ['A']", "os.getenv('A')", "'A' in os.environ", "from os import environ"]
    assert sorted(_environment_reads(ast.parse("\n".join([*writes, *reads])))) == [4, 5, 6, 7]


def test_every_argument_and_result_is_annotated() -> None:
    bare = []
    for name in _modules(f"{PACKAGE}/", "launch/", "tools/"):
        for node in ast.walk(_tree(name)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [extra for extra in (node.args.vararg, node.args.kwarg) if extra is not None]
            missing = [arg.arg for arg in arguments if arg.annotation is None and arg.arg not in ("self", "cls", "ctx")]
            if missing or node.returns is None:
                bare.append(f"{name}:{node.lineno}: {node.name} {missing}")
    assert not bare


def test_no_drawer_for_everything() -> None:
    names = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert not [name for name in _files() if PurePosixPath(name).name in names]


def test_top_level_layout() -> None:
    assert {name.partition("/")[0] for name in _files()} <= TOP_LEVEL


def test_unit_tests_mirror_the_package() -> None:
    """`tests/unit/x/test_y.py` tests `x/y.py` of the package, of the repository or of the tests."""
    astray = []
    for name in _modules("tests/unit/"):
        path = PurePosixPath(name).relative_to("tests/unit")
        if path.name.startswith("test_"):
            tested = path.with_name(path.name.removeprefix("test_"))
            if not any((ROOT / home / tested).exists() for home in (PACKAGE, ".", "tests")):
                astray.append(name)
    assert not astray


def test_no_path_of_one_machine() -> None:
    home = re.compile(r"(?<![\w.-])/(home|root|work|Users)/\w")
    wrong = []
    for name in _files():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [f"{name}:{number}" for number, line in enumerate(text.splitlines(), 1) if home.search(line)]
    assert not wrong


@pytest.mark.parametrize("script", [name for name in _files() if name.endswith(".sh") or name == ".ci/run"])
def test_scripts_stop_at_the_first_error(script: str) -> None:
    assert "set -euo pipefail" in (ROOT / script).read_text(encoding="utf-8")
