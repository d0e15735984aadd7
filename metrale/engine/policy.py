# SPDX-License-Identifier: MIT OR Apache-2.0
"""The limits under which the engine's thread shares the model among requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """How the engine shares the model.

    Attributes
    ----------
    max_lanes : int
    max_prefill_tokens : int
        Source tokens that one step prefills, unless a single prompt has more: it bounds how much longer a step with
        new requests takes than one without.
    prefill_interval : int
        While lanes run, new ones join at every n-th step at most, so that they join together.
    lag : int
        Steps that may be in flight while the next one is enqueued.
    """

    max_lanes: int
    max_prefill_tokens: int
    prefill_interval: int
    lag: int
