# SPDX-License-Identifier: MIT OR Apache-2.0
"""The engine's thread: it sweeps, admits, enqueues a step, reads an older one, and begins again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

from metrale.engine.admission import Admission, those_giving_way
from metrale.engine.errors import text_of
from metrale.engine.handle import RequestHandle
from metrale.engine.lane import Lane, Swapped, place
from metrale.engine.policy import Policy
from metrale.engine.request import FinishReason
from metrale.engine.stats import Gauges, Recorder
from metrale.engine.steps import Outcomes, Steps
from metrale.engine.waiting import WaitingQueue
from metrale.model import (
    BEAM_DONE_FLAG,
    BEAM_NO_CHOICE_FLAG,
    BEAM_NOT_FINITE_FLAG,
    NO_CHOICE_FLAG,
    NOT_FINITE_FLAG,
    Model,
)

log = logging.getLogger(__name__)

NOT_FINITE: Final = "the model's logits hold a NaN or an infinity"
NO_CHOICE: Final = "every token is forbidden"
NO_MEMORY: Final = "out of memory: the KV cache is too small for this request, even with nothing else in it"
_NO_TOKEN: Final = NOT_FINITE_FLAG | NO_CHOICE_FLAG
_POLL_SECONDS: Final = 0.005


class Worker:
    """Everything that happens on the engine's thread. Other threads may call `wake`, `cancel`, `stop` and `gauges`.

    Parameters
    ----------
    model : Model
    queue : WaitingQueue
    calls : SimpleQueue
        What others want looked at: a handle that is cancelled, or None. Its ``put`` may interrupt its ``put``, as
        signal handlers do.
    recorder : Recorder
    policy : Policy
    clock : callable
    """

    def __init__(
        self,
        model: Model,
        queue: WaitingQueue,
        calls: SimpleQueue[RequestHandle | None],
        recorder: Recorder,
        policy: Policy,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._queue = queue
        self._recorder = recorder
        self._policy = policy
        self._clock = clock
        self._steps = Steps(model, policy.max_lanes, policy.lag + 1)
        self._admission = Admission(model)
        self._lanes: list[Lane] = []
        self._swapped: list[Swapped] = []
        self._since_join = policy.prefill_interval
        self._calls = calls
        self._stopping: FinishReason | None = None
        self._draining = False

    # any thread

    def wake(self) -> None:
        """Let the thread look around."""
        self._calls.put(None)

    def cancel(self, handle: RequestHandle) -> None:
        """Let the thread end a request whose handle says that it is cancelled."""
        self._calls.put(handle)

    def stop(self, *, drain: bool) -> None:
        """End the thread: when all requests have ended, or at once, with "cancelled" for those that have not."""
        if drain:
            self._draining = True
        else:
            self._stopping = "cancelled"
        self.wake()

    def gauges(self) -> Gauges:
        """Return what is the case."""
        usage = self._model.kv_usage() or (None, None)
        return Gauges(
            waiting=len(self._queue),
            running=self._taken(),
            max_lanes=self._policy.max_lanes,
            swapped_out=len(self._swapped),
            kv_used_bytes=usage[0],
            kv_total_bytes=usage[1],
            device_live_bytes=self._model.device_bytes(),
        )

    def _taken(self) -> int:
        """Return how many lanes the running requests take."""
        return sum([lane.width for lane in tuple(self._lanes)])

    # the thread

    def run(self) -> None:
        """Serve requests until told to stop."""
        try:
            self._model.bind_gpu_to_thread()
            while not self._is_over():
                # Looked at again: a turn takes the call by which `stop` would end a rest.
                if not self._turn() and not self._is_over():
                    self._rest()
        except Exception as error:
            log.exception("the engine stops: a fault of its own")
            self._queue.close()  # before anybody hears of it
            self._end_all("error", f"the engine stopped: {text_of(error)}")
        finally:
            self._queue.close()
            self._end_all(self._stopping or "cancelled", None)
            self._release()

    def _release(self) -> None:
        try:
            self._steps.close()
        except Exception as fault:  # the model's backend is closed, say: then it is gone with that
            log.warning("the engine could not give back what it had of the model: %s", fault)

    def _is_over(self) -> bool:
        return self._stopping is not None or (self._draining and self._is_idle())

    def _is_idle(self) -> bool:
        return not (self._lanes or self._swapped or len(self._queue) or self._queue.blocked)

    def _turn(self) -> bool:
        """Do what there is to do now; return whether there was a step, to enqueue or to read."""
        self._sweep()
        self._give_room_to_grow()
        joining = self._admit()
        decoding = [lane for lane in self._lanes if 0 < lane.chosen < lane.most]
        if decoding or joining:
            self._enqueue(decoding, joining)
        elif not len(self._steps):
            return False
        while len(self._steps) > (self._policy.lag if decoding or joining else 0):
            self._read()
        return True

    def _rest(self) -> None:
        """Wait until somebody calls; not for long when a request waits for room that another caller's work holds."""
        waits = len(self._queue) > 0 or bool(self._swapped)
        try:
            first = self._calls.get(timeout=_POLL_SECONDS if waits else None)
        except Empty:
            return
        self._calls.put(first)  # `_sweep` takes all

    # requests that end early

    def _sweep(self) -> None:
        """End what was cancelled or is late."""
        while not self._calls.empty():
            handle = self._calls.get()
            if handle is not None and self._queue.remove(handle):
                self._finish(handle, "cancelled")
        now = self._clock()
        for handle in self._queue.expired(now):
            self._finish(handle, "timeout")
        for swapped in [one for one in self._swapped if self._why_ended(one.handle, now)]:
            self._swapped.remove(swapped)
            self._admission.drop(swapped)
            self._finish(swapped.handle, self._why_ended(swapped.handle, now) or "cancelled")
        for lane in [one for one in self._lanes if one.handle.cancel_requested or one.deadline <= now]:
            self._end(lane, self._why_ended(lane.handle, now) or "cancelled")

    @staticmethod
    def _why_ended(handle: RequestHandle, now: float) -> FinishReason | None:
        if handle.cancel_requested:
            return "cancelled"
        return "timeout" if handle.deadline is not None and handle.deadline <= now else None

    def _end(self, lane: Lane, reason: FinishReason, error: str | None = None) -> None:
        """End a lane: its sequence first, so that whoever hears of the end finds the room."""
        self._lanes.remove(lane)
        self._admission.close(lane)
        self._finish(lane.handle, reason, error)

    def _finish(self, handle: RequestHandle, reason: FinishReason, error: str | None = None) -> None:
        self._recorder.finished(reason, self._clock() - handle.submitted_at)
        handle.finish(reason, error)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        for lane in list(self._lanes):
            try:
                self._end(lane, reason, error)
            except Exception as fault:  # the model cannot be trusted any more, but everybody must be told
                log.warning("a sequence could not be freed: %s", fault)
                lane.handle.finish(reason, error)
        for swapped in self._swapped:
            try:
                self._admission.drop(swapped)
            except Exception as fault:
                log.warning("an adapter could not be given back: %s", fault)
            self._finish(swapped.handle, reason, error)
        self._swapped.clear()
        while (handle := self._queue.pop()) is not None:
            self._finish(handle, reason, error)

    # requests that come in

    def _admit(self) -> list[Lane]:
        """Open lanes for requests that go first, as far as there is room; return those that are to be prefilled."""
        self._since_join += 1
        if self._lanes and self._since_join < self._policy.prefill_interval:
            return []
        joining: list[Lane] = []
        room = self._policy.max_prefill_tokens
        while (candidate := self._next()) is not None:
            is_new = isinstance(candidate, RequestHandle)
            if isinstance(candidate, RequestHandle):
                room -= len(candidate.request.prompt_tokens)
                if joining and room < 0:
                    break
            lane = self._open(candidate, joining)
            if lane is not None:
                self._since_join = 0
                if is_new:
                    joining.append(lane)
            elif not _handle(candidate).done:  # it has to wait, and so have those after it
                break
        return joining

    def _next(self) -> RequestHandle | Swapped | None:
        """Return the request that goes first, of those that wait and those in host memory."""
        waiting = self._queue.peek()
        first = min(self._swapped, key=lambda one: place(one.handle), default=None)
        if first is None or (waiting is not None and place(waiting) < place(first.handle)):
            return waiting
        return first

    def _open(self, candidate: RequestHandle | Swapped, joining: list[Lane]) -> Lane | None:
        """Return the candidate's lane, after moving others out of its way if it may.

        None when it has to wait, or has ended because it can never have one.
        """
        handle = _handle(candidate)
        while (lane := self._take_in(candidate)) is None and not handle.done:
            if self._admission.is_hopeless:
                self._give_up(candidate, NO_MEMORY)
                return None
            movable = [one for one in self._lanes if not (one in joining or one.is_search) and one.pending is None]
            others = those_giving_way(movable, handle)
            if not others or self._taken() - len(others) + handle.request.width > self._policy.max_lanes:
                return None  # nobody is moved out in vain
            if len(self._steps):
                self._land()  # what ends now may make room enough
            else:
                self._move_out(others[:1])
        return lane

    def _take_in(self, candidate: RequestHandle | Swapped) -> Lane | None:
        """Return the candidate's lane if there is room for one."""
        handle = _handle(candidate)
        if self._taken() + handle.request.width > self._policy.max_lanes:
            self._admission.is_hopeless = False  # it was not asked
            return None
        try:
            if isinstance(candidate, Swapped):
                lane = self._admission.resume(candidate)
            else:
                lane = self._admission.open(candidate)
        except Exception as error:
            self._give_up(candidate, text_of(error))
            return None
        if lane is None:
            return None
        self._withdraw(candidate)
        self._lanes.append(lane)
        if isinstance(candidate, Swapped):
            self._recorder.resumed(len(candidate.data))
        if handle.admitted_at is None:
            handle.admitted_at = self._clock()
            self._recorder.admitted(handle.admitted_at - handle.submitted_at)
        return lane

    def _give_up(self, candidate: RequestHandle | Swapped, error: str) -> None:
        """End a candidate that can never have a lane."""
        self._withdraw(candidate)
        if isinstance(candidate, Swapped):
            self._admission.drop(candidate)
        self._finish(_handle(candidate), "error", error)

    def _withdraw(self, candidate: RequestHandle | Swapped) -> None:
        """Take a candidate from where it waits."""
        if isinstance(candidate, Swapped):
            self._swapped.remove(candidate)
        else:
            self._queue.remove(candidate)

    # room

    def _give_room_to_grow(self) -> None:
        """Move out the lanes that have used up their KV; they come back with more of it, as soon as there is some."""
        full = [one for one in self._lanes if one.seq.seq_len >= one.limit and 0 < one.chosen < one.most]
        if full:
            self._move_out(full)
            self._since_join = self._policy.prefill_interval

    def _move_out(self, lanes: list[Lane]) -> None:
        """Move lanes to host memory, those that the steps in flight do not end."""
        self._land()
        for lane in lanes:
            if lane.ended:
                continue
            try:
                swapped = self._admission.swap_out(lane)
            except Exception as error:
                self._end(lane, "error", text_of(error))
                continue
            lane.ended = True
            self._lanes.remove(lane)
            self._swapped.append(swapped)
            self._recorder.preempted(len(swapped.data))

    # steps

    def _enqueue(self, decoding: list[Lane], joining: list[Lane]) -> None:
        before = len(self._steps)
        failures = self._steps.enqueue(decoding, joining)
        while failures and before and len(self._steps):  # what came before may be all that a lane needed
            self._read()
            before -= 1
        for failure in failures:
            if not failure.lane.ended:
                self._end(failure.lane, "error", text_of(failure.error))
        joined = [lane for lane in joining if not lane.ended]
        rows = sum([lane.width for lane in decoding if not lane.ended])
        if not (rows or joined):
            return
        self._recorder.step(
            rows=rows,
            padded_rows=self._model.step_rows(rows) - rows if rows else 0,
            prefills=len(joined),
            prompt_tokens=sum(len(lane.handle.request.prompt_tokens) for lane in joined),
        )

    def _land(self) -> None:
        """Take the tokens of every step in flight."""
        while len(self._steps):
            self._read()

    def _read(self) -> None:
        """Take the tokens of the oldest step in flight."""
        flights = self._steps.flights
        try:
            outcomes = self._steps.read()
        except Exception as error:  # on the device; what was enqueued after it cannot be trusted either
            for lane in dict.fromkeys(lane for flight in flights for lane in flight.lanes):
                if not lane.ended:
                    self._end(lane, "error", text_of(error))
            return
        searched = [
            (lane, state)
            for lane, state in zip(outcomes.searched, outcomes.states, strict=True)
            if state & BEAM_DONE_FLAG and not lane.ended
        ]
        self._accept(outcomes)
        for lane, state in searched:
            self._accept_search(lane, state)

    def _accept(self, outcomes: Outcomes) -> None:
        """Give lanes their tokens, and end those for which that was the last."""
        lanes, tokens, flags = outcomes.lanes, outcomes.tokens, outcomes.flags
        logprobs = outcomes.logprobs or [math.nan] * len(lanes)
        chose = zip(lanes, flags, strict=True)
        self._recorder.generated(sum([not (lane.ended or flag & _NO_TOKEN) for lane, flag in chose]))
        rows = zip(lanes, tokens, logprobs, flags, outcomes.plain, strict=True)
        for lane, token, logprob, flag, plain in rows:
            if lane.ended:
                continue
            if plain and not flag and token not in lane.ends:
                lane.handle.add(token)
            else:
                self._accept_one(lane, token, logprob, flag)

    def _accept_one(self, lane: Lane, token: int, logprob: float, flags: int) -> None:
        """Give a lane its token, and end it if that was the last."""
        handle = lane.handle
        if flags & _NO_TOKEN:
            self._end(lane, "error", NOT_FINITE if flags & NOT_FINITE_FLAG else NO_CHOICE)
            return
        is_first = handle.first_token_at is None
        reason = handle.push(token, logprob)
        if is_first:
            self._note_first_token(handle)
        error = handle.call_on_token(token)
        if error is not None:
            self._end(lane, "error", error)
        elif reason is not None:
            self._end(lane, reason)

    def _accept_search(self, lane: Lane, state: int) -> None:
        """Give a lane what its search has found, and end it."""
        handle = lane.handle
        beams = handle.request.beams
        nothing = NO_CHOICE + (beams.why_nothing if beams is not None else "")
        if state & (BEAM_NOT_FINITE_FLAG | BEAM_NO_CHOICE_FLAG):
            self._end(lane, "error", NOT_FINITE if state & BEAM_NOT_FINITE_FLAG else nothing)
            return
        try:
            found = self._model.take_beams(lane.seq)
        except Exception as error:
            self._end(lane, "error", text_of(error))
            return
        if not found:  # all that it followed came to an end where every id was forbidden
            self._end(lane, "error", nothing)
            return
        reason = handle.push_hypotheses(found)
        self._note_first_token(handle)
        self._recorder.generated(handle.length - handle.request.counted_from)
        for token in handle.tokens:
            error_text = handle.call_on_token(token)
            if error_text is not None:
                self._end(lane, "error", error_text)
                return
        self._end(lane, reason)

    def _note_first_token(self, handle: RequestHandle) -> None:
        if handle.first_token_at is not None:
            self._recorder.first_token(handle.first_token_at - handle.submitted_at)


def _handle(candidate: RequestHandle | Swapped) -> RequestHandle:
    return candidate if isinstance(candidate, RequestHandle) else candidate.handle
