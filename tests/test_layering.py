"""The tree is the architecture: imports go one way, and every folder's `__init__` is its map."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("quant", "rollout", "proposers", "actors", "recipes")
"""Each may import itself and what is left of it."""
FOLDERS = (*LAYERS, "actors/vllm")
MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of every import, at any depth, also by `import_module("name")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.module or ""
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def top_level_names(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def breaches(layer: str, names: set[str]) -> set[str]:
    """What a module of `layer` must not import."""
    above = set(LAYERS[LAYERS.index(layer) + 1 :]) | {"tests", "scripts"}
    return names & (above if layer in ("actors", "recipes") else above | {"ray"})


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way_and_ray_is_above_the_algorithm(path: Path) -> None:
    assert breaches(layer_of(path), top_level_names(path)) == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_wandb_is_imported_by_its_sink_only(path: Path) -> None:
    assert ("wandb" in top_level_names(path)) == (name_of(path) == "recipes/sink.py")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_vllm_is_imported_by_its_engine_only(path: Path) -> None:
    assert "vllm" not in top_level_names(path) or name_of(path).startswith("actors/vllm/")


@pytest.mark.parametrize("layer", ["quant", "rollout", "proposers"])
def test_lower_layers_see_no_trainer_and_no_command_line(layer: str) -> None:
    names = {n for p in MODULES if p.parent.name == layer for n in top_level_names(p)}
    assert names & {"omegaconf", "rich", "matplotlib", "argparse", "wandb", "ray"} == set()


def test_quant_sees_tensors_only() -> None:
    names = {n for p in MODULES if p.parent.name == "quant" for n in top_level_names(p)}
    assert "transformers" not in names and names & set(LAYERS) == {"quant"}


def test_a_wrong_import_is_seen_wherever_it_stands() -> None:
    """Negative control."""
    source = """
def late():
    import ray.util
    from proposers.none import NoProposer
    importlib.import_module("wandb.sdk")
"""
    names = {name.split(".")[0] for name in imported(ast.parse(source))}
    assert names == {"ray", "proposers", "wandb"}
    assert breaches("rollout", names) == {"ray", "proposers"}
    assert breaches("recipes", names) == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_init_of_a_folder_is_a_map_of_its_files(folder: str) -> None:
    tree = ast.parse((ROOT / folder / "__init__.py").read_text())
    files = sorted(path.stem for path in (ROOT / folder).glob("*.py") if path.stem != "__init__")
    docstring, exported = tree.body  # a docstring and __all__, no code
    assert isinstance(exported, ast.Assign)
    assert [target.id for target in exported.targets if isinstance(target, ast.Name)] == ["__all__"]
    assert ast.literal_eval(exported.value) == files
    lines = (ast.get_docstring(tree) or "").split("\n\n", 1)[1].splitlines()
    assert isinstance(docstring, ast.Expr) and [line.split()[0] for line in lines] == files
    assert all(len(line.split()) > 1 for line in lines)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_does(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("layer", ["quant", "rollout", "proposers"])
def test_the_map_leads_to_modules_that_import(layer: str) -> None:
    for name in importlib.import_module(layer).__all__:
        importlib.import_module(f"{layer}.{name}")
