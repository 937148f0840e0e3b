"""When is a run the same run? Same config, and same source files behind it."""

import ast
import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from metabayfl.config import RunConfig
from metabayfl.methods import find

ROOT = Path(__file__).parent
START = "metabayfl.experiment"
METHODS = "metabayfl.methods"


def config_hash(config: RunConfig) -> str:
    """Hash every value of a config but whether checksums are verified, which changes no number."""
    values = config.model_dump(mode="json", exclude={"data": {"verify"}})
    return _digest(json.dumps(values, sort_keys=True).encode())


def source_hash(config: RunConfig) -> str:
    """Hash the source files behind a run: of this package without other methods, of a method or model from outside."""
    behind = [cls.__module__ for cls in find(config.method["name"]).__mro__]
    ours = [name for name in behind if name.startswith("metabayfl.")]
    names = set().union(*(imported_by(name) for name in (START, *ours))) - {METHODS}
    outside = {name for name in behind if name.partition(".")[0] not in ("metabayfl", "pydantic", "builtins")}
    if ":" in config.model.name:
        outside.add(config.model.name.partition(":")[0])
    paths = [_path(name) for name in sorted(names)] + [path for name in sorted(outside) if (path := _outside(name))]
    return _digest(b"".join(path.read_bytes() for path in paths))


@cache
def imported_by(module: str) -> frozenset[str]:
    """Names of the modules of this package that a module imports, directly or not, and its own."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name != METHODS:  # the name table imports every method; a run uses one
            waiting += [other for other in _imports(name) if other not in found]
    return frozenset(found)


def _imports(module: str) -> list[str]:
    """Modules of this package named in the import statements of a file."""
    names: list[str] = []
    for node in ast.walk(ast.parse(_path(module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [name for name in names if name.startswith("metabayfl") and _exists(name)]


def _path(module: str) -> Path:
    base = ROOT.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _outside(module: str) -> Path | None:
    found = find_spec(module)
    return Path(found.origin) if found and found.origin and found.has_location else None


def _exists(module: str) -> bool:
    return _path(module).is_file()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
