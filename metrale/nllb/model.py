# SPDX-License-Identifier: MIT OR Apache-2.0
"""NllbModel: NLLB-200 and M2M-100 behind the Model interface."""

from __future__ import annotations

from metrale.nllb.adapter_calls import AdapterCalls
from metrale.nllb.lifecycle_calls import LifecycleCalls
from metrale.nllb.logits_calls import LogitsCalls
from metrale.nllb.scoring import ScoringCalls
from metrale.nllb.stream_calls import StreamCalls


class NllbModel(LifecycleCalls, ScoringCalls, LogitsCalls, AdapterCalls, StreamCalls):
    """A translation model on one device.

    Calls from several threads are served one at a time; threads that share rows or slots hold `exclusive` over a step
    and its reads. Forward calls enqueue and return the address of a logits row; the calls that read rows wait for them.
    A row holds until the next call that writes it: decode lane ``i`` is the same row for everyone.

    A call that is refused leaves every sequence as it was; so does one that the device fails to enqueue, except that a
    sequence which was being prefilled *again* is left empty. What fails later, on the device, is raised by the next
    call that waits for it.

    Parameters
    ----------
    gpu : GpuBackend
        Stays the caller's, unless ``owns_gpu``.
    shape : ModelShape
    checkpoint : Checkpoint
        Read during construction only.
    weights : WeightMap
        Where the checkpoint keeps each tensor.
    languages : Languages
    tokenizer : Tokenizer or None
        For those who want text; the model itself uses ids.
    owns_gpu : bool
        Whether `close` closes the backend.
    legacy_order : bool
        Whether a source's language follows it; see `metrale.nllb.source.framed`.
    step_graphs : bool or None
        Whether decode steps are captured and replayed (`metrale.nllb.step_graphs`). None: where the device prefers it.

    Raises
    ------
    OutOfMemory
        When weights, KV, logits and workspace do not fit; nothing stays allocated.
    """
