# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of the bounds and refusals that keep hostile input out."""

from __future__ import annotations

from tests.mutation.mutant import Mutant
from tests.mutation.rules import rules

_ERRORS = ("tests/test_errors.py",)
_JSON = ("tests/checkpoint/test_json_file.py",)

HOSTILE_MUTANTS: list[Mutant] = [
    *rules(
        "hostile input",
        "gpu_runtime.errors",
        _ERRORS,
        ("if type(value) is int and value.bit_length() > MOST_VALUE:", "if False:"),
        ("    except Exception:\n        return f", "    except KeyError:\n        return f"),
        ("text[-(most // 4) :]", "text[-(most // 3) :]"),
        ("if len(text) <= most else", "if len(text) < most else"),
    ),
    *rules(
        "hostile input",
        "metrale.errors",
        _ERRORS,
        ("cut(got, MOST_VALUE) if", "got if"),
        ("[cut(problem, _MOST_PROBLEM) for problem in listed]", "list(listed)"),
        ("self.problems[:_MOST_PROBLEMS]", "self.problems[:]"),
        ("len(self.problems) - len(shown)} more", "len(self.problems)} more"),
    ),
    *rules(
        "hostile input",
        "metrale.checkpoint.json_file",
        _JSON,
        ('(b",", b":", b"[", b"{")', '(b":", b"[", b"{")'),
        ('(b",", b":", b"[", b"{")', '(b",", b"[", b"{")'),
        ('(b",", b":", b"[", b"{")', '(b",", b":", b"{")'),
        ('(b",", b":", b"[", b"{")', '(b",", b":", b"[")'),
        (")) > MAX_JSON_VALUES:", ")) > MAX_JSON_VALUES + 3:"),
        ("            object_pairs_hook=_without_twins,\n", ""),
    ),
    *rules(
        "hostile input",
        "metrale.checkpoint.json_fields",
        _JSON,
        ("    except RecursionError:", "    except KeyError:"),
    ),
    *rules(
        "hostile input",
        "metrale.checkpoint.name_patterns",
        ("tests/checkpoint/test_name_patterns.py",),
        ("                break\n        self._left", "                pass\n        self._left"),
        ("                self._patterns = []\n                break", "                break"),
        ("        self._left = end - time.thread_time()\n        return default", "        return default"),
        ("            if time.thread_time() > end:", "            if False:"),
    ),
    *rules(
        "hostile input",
        "metrale.checkpoint.safetensors_file",
        ("tests/checkpoint/test_folder.py",),
        ("            _refuse_large_header(path)\n", ""),
        ("if _MOST_HEADER < length <= path.stat().st_size - 8:", "if _MOST_HEADER < length:"),
        ("if _MOST_HEADER < length <=", "if _MOST_HEADER <= length <="),
    ),
    *rules(
        "hostile input",
        "metrale.checkpoint.paths",
        ("tests/checkpoint/test_folder.py",),
        ("if not isinstance(path, str) or not path:", "if not isinstance(path, str):"),
        ("if not isinstance(path, str) or not path:", "if not path:"),
        ("path.exists() or (", "("),
    ),
    *rules(
        "hostile input",
        "metrale.engine.worker",
        ("tests/engine/test_engine_ends.py",),
        ("if not self._turn() and not self._is_over():", "if not self._turn():"),
    ),
]
