# SPDX-License-Identifier: MIT OR Apache-2.0
"""The sites that the order mutants are made of: what is found, and what is made of it."""

from __future__ import annotations

import pytest

from tests.mutation.order_sites import all_sites, row_parameters, sites_of

PARAMETERS = row_parameters(["class Rows:\n    def put(self, what, row, more): ...\n"])


@pytest.mark.parametrize(
    ("source", "kind", "without"),
    [
        ("gpu.synchronize(s)", "synchronize", "(None)"),
        ("undo.callback(gpu.event_synchronize, e)", "event_synchronize", "undo.callback(((lambda *_: None)), e)"),
        ("def f():\n    self._gpu.record_event(e, s)", "record_event", "def f():\n    (None)"),
        ("model.stream_wait_event(s, e)", "stream_wait_event", "(None)"),
        ("gpu.copy_d2h_on_stream(p, out)", "waiting", "(gpu.copy_d2h_async)(p, out)"),
        ("self.turn.wait(stream)", "wait", "(None)"),
        ("arena.row(first)", "row shift", "arena.row((0))"),
        ("arena.row(first + i)", "row shift", "arena.row((first))"),
        ("rows.put(x, len(y), 1)", "row shift", "rows.put(x, (0), 1)"),
        ("rows.put(x, more=1, row=n)", "row shift", "rows.put(x, more=1, row=(0))"),
        ("row = a + b", "row shift", "row = (a)"),
        ("def slot_row(s):\n    return n + s", "row shift", "def slot_row(s):\n    return (n)"),
    ],
)
def test_a_site_is_found_and_removed(source: str, kind: str, without: str) -> None:
    sites = list(sites_of(source, "metrale.nllb.made_up", PARAMETERS))
    assert (sites[0].kind, sites[0].source) == (kind, without)
    assert len(sites) == (2 if "+" in source else 1)


def test_a_use_of_a_turn_is_two_sites() -> None:
    source = "def f():\n    with self.turn.use(stream):\n        pass\n"
    sites = list(sites_of(source, "metrale.nllb.made_up", {}))
    assert [site.kind for site in sites] == ["wait", "record"]
    assert ".without_wait(self.turn, stream)" in sites[0].source
    assert ".without_record(self.turn, stream)" in sites[1].source


@pytest.mark.parametrize("source", ["arena.row(0)", "rows.put(x, 3, y)", "thread.wait()", "row: int", "x.synchronized"])
def test_what_is_no_site(source: str) -> None:
    assert list(sites_of(source, "metrale.engine.made_up", PARAMETERS)) == []


def test_every_site_is_source_that_compiles() -> None:
    """How many there are is for the mutation run to print."""
    sites = all_sites()
    for site in sites:
        compile(site.source, site.module, "exec")
    assert {site.kind for site in sites} >= {"synchronize", "record_event", "stream_wait_event", "wait", "row shift"}
    assert {site.module.split(".")[1] for site in sites} == {"model", "nllb", "engine"}
