# SPDX-License-Identifier: MIT OR Apache-2.0
"""ModelStreams: streams, events and waiting, as the other supertraits use them."""

from __future__ import annotations

from gpu_runtime.streams import StreamLike


class ModelStreams:
    """Streams and events of the model's backend.

    The defaults are those of a model that has only one stream and whose calls finish before they return: every handle
    is 0 and nothing needs waiting for.
    """

    def default_stream(self) -> int:
        """Return the handle of the stream that ``stream=0`` stands for. Default: 0."""
        return 0

    def runs_ahead(self) -> bool:
        """Return whether enqueued work runs while the host goes on. Default: False."""
        return False

    def create_stream(self) -> int:
        """Return the handle of a new stream. Default: 0, the default stream."""
        return 0

    def destroy_stream(self, stream: int) -> None:
        """Give back what ``create_stream`` returned; its work is finished first. Default: nothing."""

    def create_event(self) -> int:
        """Return the handle of a new event, recorded nowhere yet. Default: 0."""
        return 0

    def record_event(self, event: int, stream: StreamLike = 0) -> None:
        """Make ``event`` stand for all work enqueued on ``stream`` so far. Default: nothing."""

    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        """Hold back later work of ``stream`` until ``event`` has happened; the host goes on. Default: nothing."""

    def synchronize(self, stream: StreamLike = 0) -> None:
        """Wait on the host until everything enqueued on ``stream`` is done. Default: nothing.

        Raises
        ------
        gpu_runtime.errors.DeviceError
            When work on the stream failed, or the stream is being captured.
        """
