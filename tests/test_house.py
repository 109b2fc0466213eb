"""The laws of the house: who may import what, no circles, door-plates, registries, no torch.

Read from the source with `ast`: an import inside a function or under TYPE_CHECKING counts as well.
Not here: what the code does.
"""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kernels", "adapter_store", "model_runner", "deployments")

_SCHEDULING = "adapter_store.ref model_runner.request model_runner.config model_runner.stats"
_FACE = (
    "adapter_store.ref model_runner.request model_runner.config model_runner.stats "
    "model_runner.context_length model_runner.tokenizer model_runner.text "
    "model_runner.sequence_text model_runner.chat_prompts model_runner.template_sandbox "
    "adapter_store.extras deployments"
)

# Who may import what, besides the standard library. The longest name that fits rules alone.
LAW = {
    "kernels": "torch triton kernels",
    "adapter_store": "torch safetensors adapter_store",
    "adapter_store.ref": "",
    "adapter_store.errors": "",
    "adapter_store.regular_file": "adapter_store.errors",
    "adapter_store.extras": "",
    "adapter_store.contents": "adapter_store.sources",
    "adapter_store.load_threads": "",
    "adapter_store.weights": "torch adapter_store.ref",
    "adapter_store.slot_table": "adapter_store.ref adapter_store.errors",
    "adapter_store.sources": (
        "adapter_store.ref adapter_store.errors adapter_store.sources adapter_store.regular_file"
    ),
    "adapter_store.sources.s3": (
        "boto3 botocore adapter_store.ref adapter_store.errors adapter_store.sources"
    ),
    "model_runner": "torch safetensors kernels adapter_store model_runner",
    "model_runner.request": "adapter_store.ref adapter_store.extras",
    "model_runner.config": "",
    "model_runner.stats": "adapter_store.ref",
    "model_runner.context_length": "",
    "model_runner.command_line": "yaml adapter_store.ref model_runner",
    "model_runner.tokenizer": "transformers model_runner.request",
    "model_runner.stop_strings": "",
    "model_runner.template_worker": "jinja2",
    "model_runner.template_sandbox": "model_runner.template_worker",
    "model_runner.chat_prompts": (
        "adapter_store.ref adapter_store.extras model_runner.template_sandbox "
        "model_runner.tokenizer"
    ),
    "model_runner.text": (
        "adapter_store.ref adapter_store.extras model_runner.request model_runner.tokenizer "
        "model_runner.template_sandbox model_runner.chat_prompts model_runner.stop_strings "
        "model_runner.harmony model_runner.sequence_text"
    ),
    "model_runner.sequence_text": (
        "adapter_store.extras model_runner.request model_runner.tokenizer "
        "model_runner.stop_strings model_runner.harmony"
    ),
    "model_runner.harmony": "model_runner.tokenizer",
    "model_runner.engine_face": "model_runner.request model_runner.stats",
    "model_runner.scheduling": f"{_SCHEDULING} model_runner.scheduling",
    "model_runner.layers": "torch kernels model_runner.layers",
    "model_runner.models": (
        "torch kernels model_runner.layers model_runner.models adapter_store.weights "
        "model_runner.context_length"
    ),
    "model_runner.execution": (
        "torch numpy safetensors kernels adapter_store.arena adapter_store.weights "
        "model_runner.config model_runner.request model_runner.models model_runner.layers "
        "model_runner.execution model_runner.scheduling.batch model_runner.scheduling.page_pool"
    ),
    "deployments": _FACE,
    "deployments.config": f"{_FACE} pydantic yaml",
    "deployments.tenant_settings": f"{_FACE} pydantic",
    "deployments.generation_defaults": f"{_FACE} pydantic",
    "deployments.short_form": f"{_FACE} pydantic",
    "deployments.openai_schema": f"{_FACE} pydantic",
    "deployments.application": f"{_FACE} ray click",
    "deployments.router": f"{_FACE} ray",
    "deployments.router_link": f"{_FACE} ray",
    "deployments.replica_backend": f"{_FACE} ray",
    "deployments.request_router": f"{_FACE} ray",
    "deployments.adapter_actor": f"{_FACE} ray adapter_store",
    "deployments.catalog": f"{_FACE} adapter_store.contents",
    "deployments.catalog_link": f"{_FACE} ray adapter_store.contents",
    "deployments.replica": f"{_FACE} ray adapter_store model_runner",
    "deployments.ingress": f"{_FACE} ray fastapi starlette pydantic",
    "deployments.connection": f"{_FACE} uvicorn",
    "deployments.edge": f"{_FACE} starlette uvicorn",
    "deployments.metric_registry": f"{_FACE} prometheus_client",
    "deployments.usage_store": "boto3 botocore",
    "deployments.keeper": "",
    "deployments.serve_flags": "",
    "deployments.local_s3": "boto3 botocore deployments.keeper",
    "deployments.demo": f"{_FACE} ray yaml",
}
# Files and folders that load with no torch in reach, however long the chain of imports.
TORCH_FREE = (
    "adapter_store.ref",
    "adapter_store.extras",
    "adapter_store.errors",
    "adapter_store.slot_table",
    "model_runner.request",
    "model_runner.config",
    "model_runner.stats",
    "model_runner.context_length",
    "model_runner.tokenizer",
    "model_runner.text",
    "model_runner.engine_face",
    "model_runner.engine_loop",
    "model_runner.engine_process",
    "model_runner.scheduling",
    "deployments.ingress",
    "deployments.router",
    "deployments.placement",
    "deployments.config",
    "deployments.catalog_link",
)


@cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Every module of the rooms -> its file and tree; a package goes by its own name."""
    found = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = (path, parse(path))
    return found


def parse(path: Path) -> ast.Module:
    """The file's tree. CPython 3.11's parser gives up now and then when another thread parses at
    the same time (SystemError, github.com/python/cpython/issues/106905): then once more."""
    for _ in range(9):
        with suppress(SystemError):
            return ast.parse(path.read_text(encoding="utf-8"), str(path))
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def arrows(module: str) -> tuple[str, ...]:
    """What a module imports: modules of the house by full name, others by their first name."""
    targets: list[str] = []
    for node in ast.walk(sources()[module][1]):
        if isinstance(node, ast.Import):
            targets += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            targets += [name if name in sources() else str(node.module) for name in inner]
    house = [name if name.split(".")[0] in ROOMS else name.split(".")[0] for name in targets]
    return tuple(dict.fromkeys(n for n in house if n not in sys.stdlib_module_names))


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def modules_below(prefix: str) -> list[str]:
    return [name for name in sources() if covers(prefix, name)]


def test_rooms_import_only_what_the_table_allows() -> None:
    broken = []
    for module in sources():
        law = max((key for key in LAW if covers(key, module)), key=len)
        allowed = LAW[law].split()
        for target in arrows(module):
            if not any(covers(name, target) for name in allowed):
                broken.append(f"{module} -> {target}")
    assert not broken, "\n".join(broken)


def test_law_names_only_files_that_can_break_it() -> None:
    """A renamed file must not slip out of its row: every row of the table names something real."""
    missing = [key for key in (*LAW, *TORCH_FREE) if not modules_below(key)]
    assert not missing, missing


@pytest.mark.parametrize("depth", [1, 2, None], ids=["rooms", "folders", "files"])
def test_no_circles(depth: int | None) -> None:
    graph: dict[str, set[str]] = {}
    for module, (path, _) in sources().items():
        if path.name == "__init__.py":
            continue  # a door-plate imports nothing; `deployments` answers `app` when asked
        here = _place(module, depth)
        there = {_place(t, depth) for t in arrows(module) if t in sources()} - {here}
        graph.setdefault(here, set()).update(there)
    while leaves := {name for name, out in graph.items() if not out & graph.keys()}:
        graph = {name: out for name, out in graph.items() if name not in leaves}
    assert not graph, f"each of these lies on a circle or above one: {sorted(graph)}"


def _place(module: str, depth: int | None) -> str:
    """The room (1), the folder (2: a file at the top of a room stands for itself), or the file."""
    return module if depth is None else ".".join(module.split(".")[:depth])


def test_imports_are_absolute_and_name_the_file() -> None:
    packages = {name for name, (path, _) in sources().items() if path.name == "__init__.py"}
    broken = []
    for module, (_, tree) in sources().items():
        relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        broken += [f"{module}: relative import in line {node.lineno}" for node in relative]
        broken += [
            f"{module}: imports from the folder {t}" for t in arrows(module) if t in packages
        ]
        house = [target for target in arrows(module) if target.split(".")[0] in ROOMS]
        broken += [f"{module}: no such file {t}" for t in house if t not in sources()]
    assert not broken, "\n".join(broken)


def test_every_folder_has_a_door_plate() -> None:
    broken = []
    for room in ROOMS:
        for folder in {path.parent for path in (ROOT / room).rglob("*.py")}:
            if not (folder / "__init__.py").exists():
                broken.append(f"{folder}: no __init__.py")
    for module, (path, tree) in sources().items():
        if path.name != "__init__.py":
            if ast.get_docstring(tree) is None:
                broken.append(f"{module}: does not open with a docstring")
            continue
        body = tree.body[1:] if ast.get_docstring(tree) else tree.body
        if module == "deployments":  # `serve run deployments:app` reads an attribute of the package
            body = [n for n in body if getattr(n, "name", "") != "__getattr__"]
            body = [n for n in body if not isinstance(n, ast.Import | ast.ImportFrom)]
        if body or (module == "kernels" and tree.body):
            broken.append(f"{module}: its __init__.py holds more than a docstring")
    assert not broken, "\n".join(broken)


def test_no_torch_at_the_end_of_any_chain() -> None:
    """Not followed: registries (they import by string) and the engine in `replica`."""
    for prefix in TORCH_FREE:
        for start in modules_below(prefix):
            path = next((p for p in _chains(start) if p[-1] in ("torch", "triton")), None)
            assert path is None, " -> ".join(path or ())


def _chains(start: str) -> Iterator[tuple[str, ...]]:
    seen = {start}
    waiting = [(start,)]
    while waiting:
        chain = waiting.pop()
        for target in arrows(chain[-1]) if chain[-1] in sources() else ():
            if target not in seen and chain[-1] != "deployments.replica":
                seen.add(target)
                waiting.append((*chain, target))
                yield waiting[-1]


@pytest.mark.parametrize("module", ["deployments.ingress", "deployments.router"])
def test_loads_with_torch_hidden(module: str) -> None:
    _run(f"import sys; sys.modules['torch'] = sys.modules['triton'] = None; import {module}")


def test_the_service_starts_without_torch_where_there_is_one() -> None:
    """It is two seconds and 300 MB in every process that needs none of it."""
    load = "from model_runner.tokenizer import Tokenizer; Tokenizer('tests/data/demo/base')"
    _run(f"import sys, deployments.application; {load}; assert 'torch' not in sys.modules")


def _run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_no_pattern_repeats_possessively() -> None:
    """Python 3.11.2, which is Debian's, matches such patterns wrongly.

    Source: https://github.com/python/cpython/issues/106052
    """
    possessive = re.compile(r"[])\w.](?:[*+?]|\{[\d,]+\})\+|\(\?>")
    for module, (path, tree) in sources().items():
        if "import re\n" not in path.read_text():
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not possessive.search(node.value), f"{module}, line {node.lineno}"


def test_tests_with_ray_stand_where_the_makefile_looks_for_them() -> None:
    """`make test` collects those folders alone for them: all the others take half a minute."""
    line = next(x for x in (ROOT / "Makefile").read_text().splitlines() if "(ray or e2e)" in x)
    folders = tuple(re.findall(r"tests/\w+", line))
    marked = re.compile(r"pytest\.mark\.(?:ray|e2e)\b")
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if marked.search(path.read_text())
    }
    inside = {name for name in files if name.startswith(folders)}
    assert len(folders) == 2 and len(inside) > 4
    assert files == inside


def test_registries_are_literal_dicts() -> None:
    registries = [name for name in sources() if name.endswith(".registry")]
    assert len(registries) >= 4, registries
    for module in registries:
        tree = sources()[module][1]
        tables = [
            node.target.id if isinstance(node, ast.AnnAssign) else node.targets[0].id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        ]
        assert tables, f"{module}: no dict at the top"
        for node in ast.walk(tree):
            written = (
                isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Store | ast.Del)
                and getattr(node.value, "id", "") in tables
            ) or (
                isinstance(node, ast.Attribute)
                and node.attr in ("update", "setdefault", "pop", "clear")
                and getattr(node.value, "id", "") in tables
            )
            assert not written, f"{module}: changed at run time in line {node.lineno}"


def test_model_families_stand_where_the_registry_says() -> None:
    tree = sources()["model_runner.models.registry"][1]
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    places = [
        s for s in strings if isinstance(s, str) and s.startswith("model_runner.") and ":" in s
    ]
    assert places
    for place in places:
        module, _, name = place.partition(":")
        classes = [n.name for n in ast.walk(sources()[module][1]) if isinstance(n, ast.ClassDef)]
        assert name in classes, f"no class {place}"


def test_names_that_would_shadow_something() -> None:
    assert "deployments.app" not in sources(), "it would shadow the attribute `deployments.app`"
    assert not list((ROOT / "infra").rglob("*.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    major, minor = (int(part) for part in project["version"].split(".")[:2])
    # transformers takes a distribution that owns `kernels` with a version in its range for another.
    assert (major, minor) < (0, 16)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


def test_fixtures_of_a_folder_end_with_it() -> None:
    """pytest takes a folder without `__init__.py` for none: they would live as long as the run."""
    for path in (ROOT / "tests").rglob("*.py"):
        if 'scope="package"' in path.read_text() and path != Path(__file__):
            assert (path.parent / "__init__.py").exists(), path
