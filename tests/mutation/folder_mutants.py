# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of what comes before loading: ids of the Hugging Face Hub, and the report on a folder."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import Mutant
from tests.mutation.rules import rules

_HUB: Final = ("tests/hub/test_hub.py", "tests/hub/test_hub_failures.py")
_INSPECT: Final = (
    "tests/cli/test_inspect_damage.py",
    "tests/cli/test_inspect_values.py",
    "tests/cli/test_value_check.py",
)

FOLDER_MUTANTS: list[Mutant] = [
    *rules(
        "ids of the Hub",
        "metrale.hub",
        _HUB,
        ("if wanted is None or os.path.lexists(path):", "if wanted is None:"),
        ('startswith((".", "~"))', 'startswith("~")'),
        ('startswith((".", "~"))', 'startswith(".")'),
        ('or path.endswith("/") or "\\\\" in path', 'or "\\\\" in path'),
        ('or "\\\\" in path or ".." in path', 'or ".." in path'),
        ('or "\\\\" in path or ".." in path', 'or "\\\\" in path'),
        ("(?P<name>[^/@:]+/[^/@:]+)", "(?P<name>[^/@]+/[^/@]+)"),
        ("if not _REVISION.fullmatch(wanted.revision):", "if False:"),
        ("_REVISION.fullmatch(wanted.revision)", "_REVISION.match(wanted.revision)"),
        ("not isinstance(path, str) or path.startswith", "str(path).startswith"),
        ("_cached(huggingface_hub, wanted) or _fetched", "_fetched"),
        ("    revision = wanted.revision\n", '    revision = "main"\n'),
        ("        revision = Path(found).parent.name\n", ""),
        ("            raise _NotCached(name)\n", "            return None\n"),
        ("revision=commit or wanted.revision", "revision=wanted.revision"),
        ("commit = commit or path.parent.name", "pass"),
        ("_usable(hub, wanted) if _unreachable(error) else None", "_usable(hub, wanted)"),
        ("_usable(hub, wanted) if _unreachable(error) else None", "None"),
        ("_status(error) >= 500 or", ""),
        ("        get(name)\n    for single", "        name\n    for single"),
        ("            return config.parent\n        listed", "            pass\n        listed"),
        ("if get(shard) is None:", "if False:"),
        ("        except LocalEntryNotFoundError:  #", "        except ZeroDivisionError:  #"),
    ),
    *rules(
        "ids of the Hub",
        "metrale.checkpoint.forms",
        _HUB,
        ('if isinstance(name, str) and not set(name) & set("/\\\\:\\0")', "if isinstance(name, str)"),
        ("sorted({name for name in names", "sorted({name for name in list(names)[:1]"),
    ),
    *rules(
        "a report on a folder",
        "metrale.cli.inspection",
        _INSPECT,
        ('found.report["ok"] = not found.problems', 'found.report["ok"] = True'),
        ("        except CheckpointError as error:\n", "        except ZeroDivisionError as error:\n"),
        ("for problem in error.problems]", "for problem in error.problems[:1]]"),
        ('f"{where.name}: " if where != self.folder else ""', '""'),
        ("        refuse_adapter(found.folder)\n", ""),
        ("read = NllbConfig.from_dict(config, generation,", "read = NllbConfig.from_dict(config, None,"),
        (
            '            with found.part("weights"):\n                matched = match',
            "            if True:\n                matched = match",
        ),
        ("if watch is not None:", "if False:"),
        ("open_tokenizer(found.folder, vocab_size=rows)", "_open_tokenizer(found.folder, None)"),
        ("M2M if set(FLORES_200)", "NLLB if set(FLORES_200)"),
        ("        check_memory(gpu, plan)\n", "        pass\n"),
        ("    check_launches(gpu, shape, found.folder)\n", ""),
        ("fits = plan.total <= gpu.free_memory()", "fits = True"),
        ("if use is None and taken and _is_weights(name)", "if use is None and taken"),
        ("size = None if path.is_dir() else _size(path)", "size = _size(path)"),
        ('count["values"] += info.rows * info.row_elements', 'count["values"] += info.rows'),
    ),
    *rules(
        "a report on a folder",
        "metrale.cli.value_check",
        _INSPECT,
        ("magnitude.max() < infinity", "magnitude.max() <= infinity"),
        ("np.count_nonzero(magnitude > infinity)", "np.count_nonzero(magnitude >= infinity)"),
        ("& unsigned.type(np.iinfo(unsigned).max >> 1)", "& unsigned.type(np.iinfo(unsigned).max)"),
        ("counts.nan + here.nan", "here.nan"),
        ("            advance(rows.nbytes)\n", ""),
    ),
]
