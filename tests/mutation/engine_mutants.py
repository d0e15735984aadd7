# SPDX-License-Identifier: MIT OR Apache-2.0
"""Mutants of the engine where it serves searches and targets that begin with a prefix."""

from __future__ import annotations

from tests.mutation.mutant import Mutant
from tests.mutation.rules import rules

_RESULTS = ("tests/engine/test_request.py", "tests/engine/test_engine_beams.py")
_WIDTHS = ("tests/engine/test_engine_widths.py",)
_PLAIN = tuple(
    f"tests/engine/test_{name}.py"
    for name in ("engine", "engine_faults", "engine_cancel", "engine_kv", "engine_sampling", "engine_property")
)
_FAULTS = ("tests/engine/test_engine_beam_faults.py",)

ENGINE_MUTANTS: list[Mutant] = [
    *rules(
        "requests with beams",
        "metrale.engine.steps",
        _RESULTS,
        ("sorted(decoding, key=_IS_SEARCH, reverse=True)", "list(decoding)"),
        ("sorted(joining, key=_IS_SEARCH)", "list(joining)"),
        ("row += lane.rows", "row += 1"),
        ("self._buffers[buffer][-self._rows :]", "self._buffers[buffer][: self._rows]"),
    ),
    *rules(
        "requests with beams",
        "metrale.engine.steps",
        _FAULTS,
        ("if failure.lane.is_search}", "if False}"),
        ("decoded = sum(lane.rows for lane in decoding)", "decoded = len(decoding)"),
        ("self._select(searched, rows, buffer), 1)", "self._select(searched, rows, buffer), 2)"),
        ("first, buffer, logprobs), 2)", "first, buffer, logprobs), 1)"),
    ),
    *rules(
        "requests with beams",
        "metrale.engine.worker",
        _RESULTS,
        ("            if state & BEAM_DONE_FLAG and not lane.ended\n", "            if not lane.ended\n"),
        ("            if state & BEAM_DONE_FLAG and not lane.ended\n", "            if state & BEAM_DONE_FLAG\n"),
        ("generated(handle.length - handle.request.counted_from)", "generated(handle.length)"),
        ("        self._note_first_token(handle)\n        self._recorder", "        self._recorder"),
        ("for token in handle.tokens:", "for token in ():"),
        ("sum([lane.width for lane in decoding if not lane.ended])", "len([1 for lane in decoding if not lane.ended])"),
    ),
    *rules(
        "requests with beams",
        "metrale.engine.worker",
        _FAULTS,
        (
            "NOT_FINITE if state & BEAM_NOT_FINITE_FLAG else nothing",
            "nothing if state & BEAM_NOT_FINITE_FLAG else NOT_FINITE",
        ),
        ("if state & (BEAM_NOT_FINITE_FLAG | BEAM_NO_CHOICE_FLAG):", "if False:"),
        ("        if not found:", "        if False:"),
        ("error_text)\n                return\n", "error_text)\n"),
        ("take_beams(lane.seq)\n        except Exception as", "take_beams(lane.seq)\n        except KeyError as"),
    ),
    *rules(
        "plain tokens",
        "metrale.engine.worker",
        _PLAIN,
        ("if plain and not flag and token not in lane.ends:", "if plain and token not in lane.ends:"),
        ("if plain and not flag and token not in lane.ends:", "if plain and not flag:"),
        ("if plain and not flag and token not in lane.ends:", "if not flag and token not in lane.ends:"),
        ("            if lane.ended:\n                continue\n            if plain", "            if plain"),
        ("one.handle.cancel_requested or one.deadline <= now]", "one.deadline <= now]"),
        ("one.handle.cancel_requested or one.deadline <= now]", "one.handle.cancel_requested]"),
        ("if one.seq.seq_len >= one.limit and", "if one.seq.seq_len > one.limit and"),
    ),
    *rules(
        "plain tokens",
        "metrale.engine.steps",
        _PLAIN,
        ("lane.is_plain and 1 < lane.chosen < lane.most", "1 < lane.chosen < lane.most"),
        ("lane.is_plain and 1 < lane.chosen < lane.most", "lane.is_plain and lane.chosen < lane.most"),
        ("lane.is_plain and 1 < lane.chosen < lane.most", "lane.is_plain and 1 < lane.chosen"),
        ("not lane.chosen or lane.pending is not None])", "not lane.chosen])"),
        ("not lane.chosen or lane.pending is not None])", "lane.pending is not None])"),
    ),
    *rules(
        "plain tokens",
        "metrale.engine.handle",
        ("tests/engine/test_handle.py",),
        ("        if self._token_waiters:\n            with", "        if False:\n            with"),
        (
            "                self._token_waiters.remove(waiter)\n                return False\n",
            "                return True\n",
        ),
    ),
    *rules(
        "lanes by width",
        "metrale.engine.worker",
        _WIDTHS,
        ("sum([lane.width for lane in tuple(self._lanes)])", "len(self._lanes)"),
        ("self._taken() + handle.request.width > self._policy", "self._taken() + 1 > self._policy"),
        ("not (one in joining or one.is_search) and", "one not in joining and"),
        (
            "if not others or self._taken() - len(others) + handle.request.width > self._policy.max_lanes:",
            "if not others:",
        ),
        (
            "if not others or self._taken() - len(others) + handle.request.width > self._policy.max_lanes:",
            "if not others or self._taken() - len(others) + handle.request.width >= self._policy.max_lanes:",
        ),
        ("self._move_out(others[:1])", "self._move_out(others[-1:])"),
        ("self._move_out(others[:1])", "self._move_out(others)"),
    ),
    *rules(
        "lanes by width",
        "metrale.engine.admission",
        _WIDTHS,
        ("if request.beams is None else self._alloc_beams(request)", ""),
        ("alloc_beams, request.width, source, most)", "alloc_beams, request.width, source, most - 1)"),
        ("source + request.width * most)", "source + most)"),
        ("source + request.width * most)", "source + request.width * (most + 1))"),
        ("place(one.handle), reverse=True)", "place(one.handle))"),
    ),
    *rules(
        "lanes by width",
        "metrale.engine.lane",
        _RESULTS,
        ("self.width if self.chosen else 1", "self.width"),
        ("self.width if self.chosen else 1", "1"),
    ),
    *rules(
        "lanes by width",
        "metrale.engine.checked",
        _WIDTHS,
        ("widest = min(max(capacity.max_beams, 1), lanes)", "widest = lanes"),
        ("widest = min(max(capacity.max_beams, 1), lanes)", "widest = min(capacity.max_beams, lanes)"),
        ("widest = min(max(capacity.max_beams, 1), lanes)", "widest = max(capacity.max_beams, 1)"),
        ("if request.width > widest:", "if request.width >= widest:"),
    ),
    *rules(
        "requests with beams",
        "metrale.engine.checked",
        _RESULTS,
        ("beams.num_beams == 1:", "beams.num_beams == 0:"),
        ("if beams is not None or ((sampling", "if ((sampling"),
        ("(sampling.min_new_tokens or sampling.bad_words) and", "sampling.min_new_tokens and"),
        ("sampling.min_new_tokens if ending else 0", "sampling.min_new_tokens"),
        ("if beams is not None or sampling.forced_eos_id is not None:", "if beams is not None:"),
        ("if beams is not None or sampling.forced_eos_id is not None:", "if sampling.forced_eos_id is not None:"),
    ),
    *rules(
        "requests with beams",
        "metrale.engine.request",
        _RESULTS,
        ("            if self.sampling.temperature:\n", "            if False:\n"),
        ("            if not isinstance(self.beams, BeamParams):\n", "            if False:\n"),
        ("return 1 if self.beams is None else self.beams.num_beams", "return 1"),
    ),
    *rules(
        "requests with beams",
        "metrale.engine.handle",
        _RESULTS,
        ("given = 1 + len(request.prefix_tokens)", "given = 1"),
        ("best.ids[given : len(best.ids) - is_eos]", "best.ids[given:]"),
        ("best.logprobs[given:]", "best.logprobs"),
        ('return "eos" if is_eos else "length"', 'return "length"'),
        ("self._found[0].score if self._found else logprob", "logprob"),
        ("else list(self._found)", "else self._found"),
        (
            "        self.first_token_at = self._clock()\n        with self._lock:\n            if self._reason",
            "        with self._lock:\n            if self._reason",
        ),
    ),
    *rules(
        "targets with a prefix",
        "metrale.engine.request",
        _RESULTS,
        ("return 0 if self.prefix_tokens else 1", "return 1"),
        ("return 1 + len(self.prefix_tokens) if", "return len(self.prefix_tokens) if"),
        ('for name in ("prompt_tokens", "prefix_tokens"):', 'for name in ("prompt_tokens",):'),
    ),
    *rules(
        "targets with a prefix",
        "metrale.engine.handle",
        _RESULTS,
        ("return self.request.counted_from + len(self._tokens)", "return 1 + len(self._tokens)"),
    ),
    *rules(
        "targets with a prefix",
        "metrale.engine.lane",
        _RESULTS,
        ("request.most_tokens - request.counted_from", "request.most_tokens - 1"),
    ),
    *rules(
        "targets with a prefix",
        "metrale.engine.engine",
        _RESULTS,
        ("if request.most_tokens == request.counted_from:", "if request.most_tokens == 1:"),
    ),
    *rules(
        "targets with a prefix",
        "metrale.engine.checked",
        _WIDTHS,
        ("together = request.given_tokens + request.most_tokens", "together = request.most_tokens"),
        ('        ("prefix_tokens", request.prefix_tokens),\n', ""),
    ),
    *rules(
        "targets with a prefix",
        "metrale.engine.checked",
        _RESULTS,
        ("room = capacity.max_new_tokens - request.given_tokens", "room = capacity.max_new_tokens"),
    ),
    *rules(
        "targets with a prefix",
        "metrale.engine.admission",
        _WIDTHS,
        ("len(request.prefix_tokens) + _SPARE", "_SPARE"),
        (
            "seq.adapter_slot, seq.prefix_tokens = request.adapter_slot, request.prefix_tokens",
            "seq.adapter_slot = request.adapter_slot",
        ),
        (
            "source, most = self._source(request), request.target_positions\n        least",
            "source, most = self._source(request), request.most_tokens\n        least",
        ),
    ),
]
