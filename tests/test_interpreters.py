# SPDX-License-Identifier: MIT OR Apache-2.0
"""A subinterpreter is refused in clear words, whatever was imported before; the main interpreter goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import importlib, pathlib, sys
{first}
try:
    module = importlib.import_module("_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters")
except ImportError:
    print("this Python shows no interpreters")
    sys.exit()
if sys.version_info < (3, 13):
    interpreter = module.create(isolated={isolated})
else:
    interpreter = module.create("isolated" if {isolated} else "legacy")
code = '''
import pathlib, sys, warnings
warnings.simplefilter("error")
try:
    import {package}
except ImportError as error:
    told = str(error)
else:
    told = "imported"
pathlib.Path({path!r}).write_text(told + " " + str("numpy" in sys.modules))
'''
failed = module.run_string(interpreter, code)
assert not failed, failed
print(pathlib.Path({path!r}).read_text())
module.destroy(interpreter)
import {package}
"""

WORDS = (
    "gpu_runtime: expected the main interpreter, got a subinterpreter, which NumPy and CuPy do not support; "
    "import it in the main interpreter, or in a process of its own"
)


@pytest.mark.parametrize("package", ["gpu_runtime", "metrale"])
@pytest.mark.parametrize("isolated", [False, True], ids=["legacy", "isolated"])
@pytest.mark.parametrize("first", ["", "import gpu_runtime"], ids=["alone", "beside the main one"])
def test_a_subinterpreter_is_refused(tmp_path: Path, package: str, isolated: bool, first: str) -> None:
    """Before NumPy is imported there, which would warn, or say that it cannot be loaded twice."""
    path = str(tmp_path / "words")
    script = SCRIPT.format(package=package, isolated=isolated, first=first, path=path)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    if "shows no interpreters" in done.stdout:
        pytest.skip(done.stdout.strip())
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{WORDS} False\n", "")
