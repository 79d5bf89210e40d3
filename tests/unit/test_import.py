"""What importing the package costs and needs, and that its errors travel."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fabric_kv
from fabric_kv import errors

PACKAGE = Path(fabric_kv.__file__).parent
# Each takes longer to import than the package itself may, or needs hardware or a library that may be absent.
HEAVY = {"numpy", "cuda", "pyhwloc", "rich", "asyncio", "fabric_kv._native", "fabric_kv.engine"}
ERRORS = [getattr(errors, name) for name in errors.__all__]


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    added = python(
        "import sys; before = set(sys.modules); import fabric_kv; print(*sorted(set(sys.modules) - before))"
    ).split()
    assert "fabric_kv" in added
    assert not HEAVY & set(added)


def test_import_and_plan_work_without_libfabric(tmp_path: Path) -> None:
    loaded = python(
        "import sys; from fabric_kv import KVLayout, errors, sharding, plan_transfer; print(*sys.modules)",
        FABRIC_KV_LIBFABRIC_HOME=str(tmp_path),
    ).split()
    assert not (HEAVY - {"numpy"}) & set(loaded)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling_with_their_fields(cls: type[errors.FabricKVError]) -> None:
    fields = {name: f"<{name}>" for name in cls._fields}
    copy = pickle.loads(pickle.dumps(cls("writing page 7 of 5 failed", **fields)))
    assert type(copy) is cls
    assert str(copy) == "writing page 7 of 5 failed"
    assert {name: getattr(copy, name) for name in cls._fields} == fields


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_error_fields_not_given_read_none_and_unknown_ones_are_refused(cls: type[errors.FabricKVError]) -> None:
    assert all(getattr(cls("x"), name) is None for name in cls._fields)
    with pytest.raises(TypeError, match="colour"):
        cls("x", colour="red")


def test_package_never_executes_bytes() -> None:
    forbidden = re.compile(r"\b(import\s+(pickle|marshal|shelve|dill)|from\s+(pickle|marshal)\b|(?<!\.)(eval|exec)\()")
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if forbidden.search(line)
    ]
    assert not found
