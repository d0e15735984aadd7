# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an NLLB model holds, and its beginning and end."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Final, Self

from gpu_runtime.backend import GpuBackend
from gpu_runtime.blocks import exported_error
from gpu_runtime.errors import DeviceError
from gpu_runtime.leaving import close_at_exit
from metrale.checkpoint import Checkpoint
from metrale.errors import SequenceError
from metrale.nllb.adapter_memory import AdapterMemory
from metrale.nllb.adapter_slots import AdapterSlots
from metrale.nllb.admission import Admission, Languages
from metrale.nllb.beams import BeamSearches
from metrale.nllb.device_weights import load_weights
from metrale.nllb.feed import TokenFeed
from metrale.nllb.kv import KvPool
from metrale.nllb.limits import ModelShape
from metrale.nllb.logits import LogitsRows
from metrale.nllb.passes import Passes
from metrale.nllb.plan import MemoryPlan, check_launches, check_memory, check_pool, plan_memory
from metrale.nllb.sequences import SequenceTable
from metrale.nllb.slot_rules import SlotRules
from metrale.nllb.slots import SlotColumns
from metrale.nllb.step_graphs import StepGraphs
from metrale.nllb.tokenizer import Tokenizer
from metrale.nllb.turns import Turn
from metrale.nllb.unsupported import TranslationOnly
from metrale.nllb.weights import WeightMap
from metrale.nllb.workspace import Workspace


class NllbCore(TranslationOnly):
    """The parts of a model and the lock that serves its callers one at a time. `NllbModel` has the parameters."""

    def __init__(
        self,
        gpu: GpuBackend,
        shape: ModelShape,
        checkpoint: Checkpoint,
        weights: WeightMap,
        *,
        languages: Languages | None = None,
        tokenizer: Tokenizer | None = None,
        owns_gpu: bool = False,
        legacy_order: bool = False,
        step_graphs: bool | None = None,
    ) -> None:
        self.shape: Final = shape
        self.config: Final = shape.config
        self.gpu: Final = gpu
        self.tokenizer: Final = tokenizer
        self.languages: Final = languages or Languages()
        self.legacy_order: Final = legacy_order
        self._owns_gpu = owns_gpu
        self.step_graphs: Final = gpu.limits().prefers_graphs if step_graphs is None else step_graphs
        self._lock = threading.RLock()
        with ExitStack() as undo:
            if owns_gpu:
                undo.callback(gpu.close)
            check_pool(shape)
            check_memory(gpu, plan_memory(shape))
            check_launches(gpu, shape, checkpoint.path)
            params = load_weights(gpu, shape, checkpoint, weights)
            undo.callback(params.arena.free)
            self._adapter_memory = AdapterMemory(gpu, shape)
            undo.callback(self._adapter_memory.free)
            params = self._adapter_memory.attach(params)
            self.device_weights: Final = params
            self._pool = KvPool(gpu, shape.kv_bytes, shape.position_bytes)
            undo.callback(self._pool.free)
            space = Workspace(gpu, shape)
            undo.callback(space.free)
            turns = []
            for _ in range(3):
                turns.append(Turn(gpu))
                undo.callback(turns[-1].free)
            decoding, prefilling, feeding = turns
            self._logits = LogitsRows(gpu, shape, space, prefilling)
            undo.callback(self._logits.free)
            self._graphs: StepGraphs | None = None
            if self.step_graphs:
                self._graphs = StepGraphs(gpu)
                undo.callback(self._graphs.free)
            self._columns = SlotColumns(shape, space["decoder.spare"] if shape.spare_rows else None)
            self._passes = Passes(
                gpu,
                shape,
                params,
                space,
                self._logits,
                self._columns,
                decoding,
                prefilling,
                feeding,
                self._graphs,
            )
            self._rules = rules = SlotRules(gpu, shape, space, self._passes)
            undo.callback(rules.free)
            self._feed = TokenFeed(gpu, shape, space, self._logits, self._passes, rules, self._columns)
            self._beams = BeamSearches(gpu, shape, space, self._logits, self._passes, rules, self._columns)
            undo.callback(self._beams.free)
            arenas = (params.arena, self._adapter_memory, self._pool, space.arena, self._logits.arena)
            self._blocks = tuple(one.base for one in arenas if not one.base.is_null)
            self._teardown: ExitStack | None = undo.pop_all()  # runs newest first
        self._table = SequenceTable(self._pool, shape.limits.max_batch, self._columns)
        self._adapters = AdapterSlots(shape.limits.max_adapters, self._table)
        self._admission = Admission(
            shape, self.languages, self._table, self._adapters, self._columns, legacy_order=legacy_order
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        close_at_exit(self.close, error)

    def close(self) -> None:
        """Free everything the model holds, newest first; work that is enqueued may still use it.

        Calling it again does nothing. Raises BufferError while somebody else uses any of it (an export of
        `metrale.model.ModelLogits.logits_view`, for example), or of the backend where the model owns that; the model
        stays open.
        """
        with self._lock:
            if self._teardown is not None:
                self._refuse_exported()
            teardown, self._teardown = self._teardown, None
            if teardown is not None:
                teardown.close()

    def _refuse_exported(self) -> None:
        try:
            each = [self.gpu.live_exports()] if self._owns_gpu else map(self.gpu.live_exports, self._blocks)
            count = sum(each)
        except DeviceError:  # the backend is closed, and was not while there were any
            return
        if count:
            raise exported_error("close", count, "the model's memory")

    def teardown(self) -> None:
        self.close()

    def exclusive(self) -> AbstractContextManager[object]:
        return self._lock

    def bind_gpu_to_thread(self) -> None:
        self.gpu.bind_to_thread()

    def memory_plan(self) -> MemoryPlan:
        """Return the device memory that the model holds."""
        return plan_memory(self.shape)

    def _check_open(self) -> None:
        if self._teardown is None:
            raise SequenceError("the model is closed")
