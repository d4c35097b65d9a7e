"""The endless traversal: epochs cut out of the loader's passes, and where the consumer stands in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from torch_sink.common.epochs import set_next_epochs
from torch_sink.common.random_state import RandomState, global_random_state, set_global_random_state
from torch_sink.common.ranks import warn
from torch_sink.damage.report import add_to_report
from torch_sink.errors import SinkError, add_hints, add_note
from torch_sink.sink.passes import Item, Pass, Position, check_resumed, read_state
from torch_sink.sink.producer import Producer
from torch_sink.sink.resuming import Resuming
from torch_sink.sink.slots import Slots
from torch_sink.sink.workers import Life
from torch_sink.thread_waits import here, host_sync_allowed
from torch_sink.worker.fetchers import end_pass


class Traversal:
    """Takes items from a producer and begins passes of the loader, in the consumer's thread.

    Invariant: `passes` are the begun passes of which the consumer has not seen the end; the first is the one that it
    reads, a second one exists only if `begins_early`.
    """

    def __init__(
        self, resuming: Resuming, producer: Producer, timeout_seconds: float, *, begins_early: bool = False
    ) -> None:
        self.resuming = resuming
        self.producer = producer
        self.length: int | None = None  # of the epoch under way; None for one pass of the loader
        self.numbers_passes = False  # calls `set_epoch` for the program, when a pass has ended
        self.timeout_seconds = timeout_seconds
        self.begins_early = begins_early  # the next pass, while the last batches of this one are used
        self.said_not_early = False
        self.position = Position()
        self.passes: list[Pass] = []
        self.iterations = 0  # the number of the latest `iter()`
        self.is_rest = False  # the iterator continues an epoch, and has to give a batch before it ends
        self.may_begin_early = True  # False after an error, which is raised when the pass is due
        self.was_interrupted = False
        self.is_handed_out = False  # an iterator of the epoch exists that has not seen its end
        self.is_loaded = False
        self.given_back: Item | None = None
        # Snapshots of the workers and state of the loader before the latest batch, for `give_back`.
        self._before: tuple[dict[int, RandomState], Any] = {}, None

    @property
    def is_inside_pass(self) -> bool:
        """Whether batches of the pass were consumed and its end was not seen."""
        return self.position.batch_in_pass > 0

    def begin_epoch(
        self, length: int | None, *, goes_on: bool, numbers_passes: bool = False, may_be_empty: bool = False
    ) -> int:
        """Begins the rest of an unfinished epoch, if it `goes_on` or is that of a loaded state; else a new one.

        If nothing is left of it, a new one is begun, unless the rest `may_be_empty`.
        """
        self.length, self.numbers_passes = length, numbers_passes
        if not goes_on and not self.is_loaded and (self.is_handed_out or self.is_inside_pass):
            self.restart()
        elif self.was_interrupted:
            self._reenter()
        self.was_interrupted = self.is_handed_out = True  # the first stays so if the end of this method is not reached
        has_ended = length is not None and length <= self.position.batch_in_epoch
        if has_ended and not may_be_empty:
            self.position.next_epoch()
        # A loaded position is entered when a batch is asked for: on the way, global generators are put back and forth.
        is_entered_later = has_ended and may_be_empty and self.is_loaded
        if not self.passes and not is_entered_later:
            self._begin_pass()
        self.iterations += 1
        self.was_interrupted, self.is_loaded = False, is_entered_later
        self.is_rest = self.position.batch_in_epoch > 0 and not may_be_empty
        return self.iterations

    def next_item(self, iteration: int) -> Item:
        """The next batch; StopIteration at the epoch's end, SinkError when a later one was begun meanwhile."""
        if iteration != self.iterations:
            raise SinkError(
                "this iterator was replaced by a later iter() of the same SinkLoader, or by its restart(): the slots "
                "and workers serve one iterator at a time. For nested loops or zip() make one SinkLoader for each."
            )
        if self.was_interrupted:
            self._reenter()
        self.was_interrupted = True  # stays so when anything but the following leaves this method
        try:
            if self.length is not None and self.length <= self.position.batch_in_epoch:
                self._end_epoch()
            while True:
                if self.given_back is not None:
                    item, self.given_back = self.given_back, None
                    break
                if not self.passes:
                    self._begin_pass()
                elif self.begins_early:
                    self._begin_early()
                item = self.producer.take(self.timeout_seconds)
                if item.slot >= 0:
                    break
                if item.error is not None:
                    self._fail(item)
                self._end_pass(item)
        except (StopIteration, SinkError):
            self.was_interrupted = False
            raise
        self.is_rest = False
        position = self.position
        position.start = item.start
        position.batch_in_pass += 1
        position.batch_in_epoch += 1
        position.batches += 1
        self._note(item)
        self.was_interrupted = False
        return item

    def give_back(self) -> None:
        """Takes the latest batch back: it does not count as consumed, and comes again."""
        if self.producer.held is None or self.given_back is not None:
            return
        self.given_back = item = self.producer.held
        position = self.position
        position.batches, position.batch_in_epoch = position.batches - 1, position.batch_in_epoch - 1
        position.batch_in_pass -= 1 + item.left_out
        self.passes[0].left_out -= item.left_out
        position.worker_states, position.loader_state = self._before

    def _end_epoch(self) -> NoReturn:
        self.producer.release()
        self.position.next_epoch()
        self.is_handed_out = False
        raise StopIteration

    def restart(self) -> None:
        """Drops the rest of the epoch and of its pass: the next epoch begins with a new pass."""
        self.iterations += 1
        self.was_interrupted = True  # stays so if the end of this method is not reached
        has_begun = bool(self.passes) or self.is_inside_pass
        is_early = bool(self.passes) and not (self.is_handed_out or self.is_inside_pass)
        self._drop_passes(is_early)
        self.position.resume = None
        if has_begun and not is_early:
            self.position.next_pass(self.resuming.opener.keeps_workers)
        self.position.batch_in_epoch = 0
        self.was_interrupted = self.is_loaded = self.is_handed_out = False

    def number_next_pass(self) -> None:
        """Calls `set_epoch` for the pass after this one, unless the program did so since it began."""
        if self.position.start is not None:
            set_next_epochs(self.resuming.opener.loader, self.position.start.epochs)

    def start_over(self) -> None:
        """Drops everything: the next `begin_epoch` begins pass 0, as the first one did."""
        self.restart()
        self.position, self.may_begin_early = Position(), True
        self.producer.start_over()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position of `state`; a pass is entered there at the next `begin_epoch`."""
        position = read_state(state)
        check_resumed(state, self.resuming.described(self.resuming.opener.loader))
        self.restart()
        self.position, self.is_loaded = position, True

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, batches may be consumed; afterwards position, generators and global draws are as before."""
        is_loaded = self.is_loaded
        if isinstance(self.resuming.opener.loader, Iterator):
            raise ValueError("a generator object can be traversed only once; pass the generator function, or a list")
        if self.position.start is None:
            self.resuming.learn()
        position = replace(self.position)
        start, draws = self.resuming.next_start(position.pass_number), global_random_state()
        state = self.resuming.state_dict(self.position) if self.passes or position.resume is not None else None
        try:
            yield
        finally:
            if state is None:  # a position to resume from would bring the draws of now back when it is used
                self.restart()
                self.position = position
            else:
                self.load_state_dict(state)
                self.is_loaded = is_loaded
            self.resuming.rewind(start)
            set_global_random_state(draws)

    def _note(self, item: Item) -> None:
        """Applies the snapshots and states of an item, and counts samples whose files are broken."""
        position = self.position
        position.batch_in_pass += item.left_out
        self.passes[0].left_out += item.left_out
        self._before = position.worker_states, position.loader_state
        if item.worker_states:
            position.worker_states = {**position.worker_states, **item.worker_states}
        if item.loader_state is not None:
            position.loader_state = item.loader_state
        if item.loss is not None:
            loss, item.loss = item.loss, None  # counted once: a batch may be given back and come again
            self.producer.stats.loss.add(loss)
            add_to_report(loss)
            self.passes[0].lost.add(loss)

    def _fail(self, item: Item) -> NoReturn:
        """Raises what the loader or the filling of a slot raised, with its origin."""
        position = self.position
        error: Any
        error, item.error = item.error, None
        batches = [str(position.batch_in_pass + ahead) for ahead in getattr(error, "sink_batches", [0])]
        made = f"one of the batches {', '.join(batches)}" if batches[1:] else f"batch {position.batch_in_pass}"
        add_note(error, f"while making {made} of pass {position.pass_number} (both from 0)")
        self.was_interrupted = not isinstance(error, Exception)  # Ctrl-C while the batch was made here
        if item.is_lost and not self.was_interrupted:
            self._drop_passes()
            self.resuming.opener.forget_workers()
            position.next_pass(keeps_workers=False)
            position.batch_in_epoch = 0
        elif not self.was_interrupted:
            position.batch_in_pass += 1
            self._note(item)
            self.producer.submit(self.passes[0])
        add_hints(error)
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: a cycle would keep the loader and its workers

    def _begin_pass(self) -> None:
        number = self.passes[-1].start.number + 1 if self.passes else self.position.pass_number
        self.producer.park()
        if self.is_loaded:
            self.resuming.opener.forget_workers()
        if self.is_loaded or self.position.resume is None:  # else a pass is entered again, as it was begun
            self.resuming.learn()
        begun = self.resuming.begin(number, self.position, is_numbered=self.numbers_passes)
        self.passes.append(begun)
        if len(self.passes) == 1:
            self.position.start = begun.start
        self.producer.submit(begun)
        self.position.resume = None  # last, so that an interrupt on the way does not lose it

    def _begin_early(self) -> None:
        """Begins the next pass if the producer has read this one to its end."""
        if self.resuming.keeps_from_early:
            if not self.said_not_early:
                self.said_not_early = True
                warn(
                    "prefetch_next_epoch=True has no effect, because the loader %s; mend that, or leave it out",
                    "; and ".join(self.resuming.keeps_from_early),
                )
            return
        if self.may_begin_early and len(self.passes) == 1 and self.producer.current is None:
            ready = self.producer.ready.copy()
            if ready and ready[-1].is_end:  # after an error that waits there, the same pass goes on
                try:
                    self._begin_pass()
                except Exception:
                    self.may_begin_early = False

    def _reenter(self) -> None:
        """Goes on behind the latest batch after Ctrl-C, or what a signal handler raised, in the middle of a fetch."""
        if self.resuming.can_reenter and self.passes:
            if self.position.resume is None:
                # Before anything is dropped: a second interrupt finds where to go on.
                self.position = read_state(self.resuming.state_dict(self.position))
            self._drop_passes()

    def _end_pass(self, item: Item) -> None:
        self._note(item)
        self.may_begin_early = True
        finished = self.passes.pop(0)
        finished.stop()
        is_empty = self.position.batch_in_pass == finished.left_out
        # A training, or an epoch of so many batches, would begin one empty pass after the other.
        needs_batches = is_empty and (self.numbers_passes or self.length is not None)
        if needs_batches or (is_empty and finished.lost):
            self._drop_passes()
            self.position.batch_in_pass = 0
        end_pass(finished.lost, is_empty)
        if is_empty:
            self._say_that_it_is_empty(finished.start.number, is_error=needs_batches)
        if self.numbers_passes:
            self.number_next_pass()
        self.position.next_pass(self.resuming.opener.keeps_workers)
        if self.passes:
            self.position.start = self.passes[0].start
        if self.length is None:
            if is_empty or not self.is_rest:
                self._end_epoch()
            self.position.next_epoch()  # the rest was empty: this epoch is the next one

    def _say_that_it_is_empty(self, number: int, *, is_error: bool) -> None:
        loader = self.resuming.opener.loader
        advice = "Give a loader with at least one batch; with drop_last=True it needs at least batch_size samples."
        if has_ended := isinstance(loader, Iterator):
            advice = "A generator object can be traversed once only: pass the generator function, or a list."
        if is_error:
            raise ValueError(f"{type(loader).__name__} gave no batch in pass {number}. {advice}")
        if has_ended:
            warn("%s gave no batch in pass %d. %s", type(loader).__name__, number, advice)

    def _drop_passes(self, is_early: bool = False) -> None:
        """Leaves all passes; the first one was begun early if it `is_early`, and its draws are taken back too."""
        self.given_back = None
        self.producer.release()
        self.producer.drop()
        for begun in self.passes:
            begun.stop()
        if len(self.passes) > 1:
            self.resuming.rewind(self.passes[1].start)
        if self.passes:
            self.resuming.leave(self.passes[0], self.position, is_early=is_early)
        if is_early:  # whether it was begun depends on who was faster; nobody has asked for it yet
            self.resuming.rewind(self.passes[0].start)
            self.position.start = None
        self.passes = []


class Batches(Iterator[Any]):
    """Iterates over one epoch; keeps its SinkLoader alive until the end.

    After a training step the processor's caches hold little of what a fetch runs, so every call on the way costs a
    microsecond: few are made here, in `Traversal.next_item` and in the producers.
    """

    def __init__(self, loader: Any, life: Life, traversal: Traversal, slots: Slots, iteration: int) -> None:
        self.loader: Any = loader
        self.iteration = iteration
        # The latest batch, its leaves, and the number of its samples, where known.
        self.given: tuple[Any, list[Any] | None, int | None] = None, None, None
        self._life, self._traversal, self._slots = life, traversal, slots

    def __next__(self) -> Any:
        if self.loader is None:
            raise StopIteration
        if self._life.ended is not None:
            raise SinkError(self._life.ended)
        if here.watches and not here.allowances:
            with host_sync_allowed():  # making batches is not what `no_host_sync()` looks at
                return next(self)
        self.given = None, None, None  # or the batch would be kept while the next one is made
        try:
            item = self._traversal.next_item(self.iteration)
        except StopIteration:
            self.loader = None
            raise
        self._slots.open(item.slot)
        # A batch that is given back comes again, and the consumer may have put other tensors into it by then.
        self.given, item.leaves = (item.batch, item.leaves, item.samples), None
        return item.batch
