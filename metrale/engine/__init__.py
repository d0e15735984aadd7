# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engine: requests in, tokens out, many at a time. It drives any model through the Model interface."""

from metrale.engine.checked import checked_request
from metrale.engine.engine import Engine
from metrale.engine.errors import EngineClosed, EngineError, QueueFull, RequestFailed
from metrale.engine.handle import RequestHandle
from metrale.engine.request import FinishReason, Generated, Request
from metrale.engine.stats import EngineStats

__all__ = [
    "Engine",
    "EngineClosed",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "Generated",
    "QueueFull",
    "Request",
    "RequestFailed",
    "RequestHandle",
    "checked_request",
]
