# SPDX-License-Identifier: MIT OR Apache-2.0
"""A mutant for every site of `tests.mutation.order_sites`: some seeded test must notice it, without exception."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutant import ROOT
from tests.mutation.order_sites import Site, all_sites

_BEAMS = tuple(f"tests/nllb/test_model_{name}.py" for name in ("resources", "beam_orders"))
_TESTS = {
    "metrale.nllb.beams": _BEAMS,
    "metrale.nllb.beam_batch": _BEAMS,
    "metrale.nllb.scoring": ("tests/nllb/test_model_score_orders.py",),
    "metrale.model": ("tests/model/test_interface.py",),
    "metrale.nllb": tuple(
        f"tests/nllb/test_{name}.py"
        for name in (
            "model_orders",
            "model_mixed",
            "model_rows",
            "model_prefix",
            "model_score_orders",
            "model_streams",
            "model_feed",
            "model_swap",
            "model_adapter_orders",
            "staging",
        )
    ),
    "metrale.engine": ("tests/engine/test_engine_orders.py", "tests/engine/test_engine_faults.py"),
}
"""By module, or else by package. Those that notice most stand first."""


@dataclass(frozen=True, slots=True)
class OrderMutant:
    """A `tests.mutation.mutant.Mutant` that is made of a site."""

    site: Site

    @property
    def group(self) -> str:
        return f"the order of {self.package}"

    @property
    def package(self) -> str:
        return self.module.rpartition(".")[0]

    @property
    def module(self) -> str:
        return self.site.module

    @property
    def tests(self) -> tuple[str, ...]:
        return _TESTS.get(self.module) or _TESTS[self.package]

    @property
    def path(self) -> Path:
        return ROOT.joinpath(*self.module.split(".")).with_suffix(".py")

    def source(self) -> str:
        """Return the mutated source."""
        return self.site.source

    def __str__(self) -> str:
        return str(self.site)


def order_mutants() -> list[OrderMutant]:
    """Return a mutant for each site."""
    return [OrderMutant(site) for site in all_sites()]
