"""Three ways to enter a pass in the middle: by index lists, by the loader's own state, by making batches again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from torch_sink.common.epochs import at_epochs, epochs_of, owners_of, set_epochs
from torch_sink.common.integrations import inner_loader, without_length_warning
from torch_sink.common.random_state import (
    Draws,
    RandomState,
    find_private_generators,
    generator_states,
    global_random_state,
    is_seeded,
    set_generator_states,
    set_global_random_state,
)
from torch_sink.damage.report import Policy
from torch_sink.sink.openers import DataLoaderOpener, Opener, check_gives_batches
from torch_sink.sink.passes import Action, Pass, PassStart, Position, ResumableSampler
from torch_sink.sink.workers import Snapshots


class Resuming:
    """Begins passes with an opener, at the first batch or, to resume, behind the batches that were consumed."""

    can_reenter = True  # after Ctrl-C in the middle of a fetch, the pass is begun again behind its latest batch
    can_start_over = True  # pass 0 can come a second time, as if the loader had just been wrapped
    draws: Draws | None = None  # a snapshot of the global generators, while a training is saved that has taken one
    tells_samplers = False  # the number of each pass, as the wrapper of a training library does
    reads_ahead = 0  # the most batches that wait in the queue

    def __init__(self, opener: Opener) -> None:
        self.opener = opener
        self.learn()

    def learn(self) -> None:
        """Learns how the next pass begins: attributes of the loader may have been set since the latest one."""
        opener = self.opener
        opener.renew()
        self.generators = opener.generators  # their states are part of what a `PassStart` holds
        # What keeps the next pass from beginning before this one has ended: it may draw nothing global, and nobody may
        # set its epoch.
        draws_own = not isinstance(opener, DataLoaderOpener) or is_seeded(opener.loader)
        conditions = {
            "has no worker processes: pass DataLoader(..., num_workers=1) or more": opener.has_workers,
            "draws from torch's global generator: pass DataLoader(..., generator=torch.Generator()), and one to a "
            "sampler of your own": draws_own,
            "has set_epoch, which is called between two passes": not owners_of(opener.loader),
        }
        self.keeps_from_early = [reason for reason, is_met in conditions.items() if not is_met]

    def next_start(self, number: int) -> PassStart:
        """How pass `number` would begin if it began now."""
        states, opener = generator_states(self.generators), self.opener
        start = PassStart(number, states, epochs=epochs_of(opener.loader))
        if not isinstance(opener, DataLoaderOpener):
            return start
        are_kept = opener.keeps_workers and opener.guard is not None and not opener.is_broken
        return replace(start, worker_generators=opener.worker_generators if are_kept else states, kept_workers=are_kept)

    def begin(self, number: int, position: Position, *, is_numbered: bool = False) -> Pass:
        """Begins pass `number`, or enters it, in the calling thread: workers are started and seeded here.

        If it `is_numbered`, the caller has told the samplers which epoch it is.
        """
        if position.resume is not None:
            with self._at_epochs(position):
                return self._enter(position.resume, position)
        if self.tells_samplers and not is_numbered:
            loader = self.opener.loader
            set_epochs(loader, {path: number for path in owners_of(loader) if path.endswith("sampler")})
        return self._open(replace(self.next_start(number), random_state=global_random_state()))

    def _at_epochs(self, position: Position) -> contextlib.AbstractContextManager[None]:
        """While the middle of a pass is entered: the epochs at which it began. Later ones are for the next pass."""
        if position.resume is None or not position.batch_in_pass:
            return contextlib.nullcontext()
        return at_epochs(self.opener.loader, position.resume.epochs)

    def _open(self, start: PassStart) -> Pass:
        return Pass(self.opener, start, self.opener.open())

    def _enter(self, start: PassStart, position: Position) -> Pass:
        """Opens a pass at a loaded position, behind the batches of it that were consumed."""
        raise NotImplementedError

    def _go_back(self, start: PassStart) -> None:
        """Puts the generators back to where they were when the workers of a pass were started, or else the pass."""
        self.opener.forget_workers()
        set_generator_states(self.generators, start.worker_generators or start.generators)
        if start.random_state:
            set_global_random_state(start.random_state)

    def rewind(self, start: PassStart) -> None:
        """Takes back the draws of a pass that was begun early and of which no batch was consumed."""
        set_generator_states(self.generators, start.generators)

    def leave(self, left: Pass, position: Position, *, is_early: bool) -> None:
        """Takes back the draws of a pass that is left, for batches that a plain loader had not asked for at `position`.

        One that was begun early, and of which nobody has asked for a batch, was not begun at all.
        """

    def state_dict(self, position: Position) -> dict[str, Any]:
        """A position, what it takes to go on from it, and what may differ in a resumed run.

        Where no pass is under way, the position is the beginning of the next one.
        """
        if position.resume is not None:
            return position.loaded_state
        if position.start is None:
            self.learn()
        start = position.start or self.next_start(position.pass_number)
        random_state = b"" if self.opener.has_workers else global_random_state(self.draws)
        return {**position.saved(start, random_state), **self.described(self.opener.copy)}

    def described(self, loader: Any) -> dict[str, Any]:
        """What a state holds of the loader; `samples` and `batch_size` say how a pass is cut, None if not known."""
        opener, samples = self.opener, None
        if isinstance(opener, DataLoaderOpener) and opener.is_map_style and loader.batch_size is not None:
            with contextlib.suppress(TypeError, NotImplementedError):
                samples = len(loader.sampler)
        return {
            "num_workers": int(getattr(loader, "num_workers", 0) or 0),
            "samples": samples,
            "batch_size": None if samples is None else loader.batch_size,
            "not_covered": self.not_covered(),
        }

    def not_covered(self) -> list[str]:
        """What a resumed run could draw differently, in words."""
        loader, notes = self.opener.loader, []
        if not is_seeded(loader):
            notes.append("unseeded generator: later passes are shuffled and seeded by torch's global generator")
        if not getattr(loader, "in_order", True):
            notes.append("in_order=False: batches are counted, but which ones came is not known")
        private = find_private_generators(loader.dataset)
        if private:
            notes.append(f"generators inside the dataset are not saved: {', '.join(private)}")
        return notes


class ByIndexLists(Resuming):
    """Resumes a DataLoader that has a batch sampler: batches that were consumed are not loaded a second time.

    The generators are put back to where they were when the pass began, the sampler's first index lists are skipped, and
    each worker starts from the snapshot of its generators after its last batch that was consumed.
    """

    opener: DataLoaderOpener

    def __init__(self, opener: DataLoaderOpener) -> None:
        self.sampler = ResumableSampler(None, [])
        # Of workers that are kept, after a pass that was left: the snapshots of their latest batches, for how many of
        # these a plain loader would have asked, and where the workers stood before the pass.
        self._left: tuple[Snapshots, int, dict[int, RandomState]] | None = None
        self._owed: dict[int, RandomState] = {}  # snapshots to which workers go back when they get an index list
        super().__init__(opener)
        opener.sends_snapshots = True

    def learn(self) -> None:
        super().learn()
        self.sampler.generators, attributes = self.generators, vars(self.opener.copy)
        if attributes["batch_sampler"] is not self.sampler:
            self.sampler.sampler, attributes["batch_sampler"] = attributes["batch_sampler"], self.sampler

    def begin(self, number: int, position: Position, *, is_numbered: bool = False) -> Pass:
        owed: dict[int, RandomState] = {}
        if position.resume is not None or not self.opener.goes_on_with_workers():  # new workers are started
            self._left, self._owed = None, {}
        elif self._left is not None or self._owed:
            self.sampler.arm(snapshots=lambda: self._find_owed(owed))
        begun = super().begin(number, position, is_numbered=is_numbered)
        self._find_owed(owed)  # also where no worker has got a list
        if owed:
            position.worker_states = {**position.worker_states, **owed}
        return begun

    def _find_owed(self, found: dict[int, RandomState]) -> dict[int, RandomState]:
        """The snapshots to which workers have to go back, copied to `found`.

        Called when the workers have answered that the new pass begins, and so have sent all that they made before.
        """
        if self._left is not None:
            snapshots, asked, before = self._left
            self._left, self._owed = None, {**self._owed, **(snapshots.after(asked) if asked > 0 else before)}
        found.update(self._owed)
        return self._owed

    def _enter(self, start: PassStart, position: Position) -> Pass:
        # The global generators are left as the checkpoint (batches made here) or the caller (workers) had them.
        opener, skip, before = self.opener, position.batch_in_pass, global_random_state()
        self._go_back(start)
        at_last_iter = self._at_last_iter(start)
        if opener.has_workers:
            # Out of order, a batch could overtake a placeholder and be dropped in its place.
            placeholders = skip % opener.copy.num_workers if getattr(opener.copy, "in_order", True) else 0
            opener.prepare_workers(position.worker_states, placeholders)
            self.sampler.arm(skip, placeholders, at_last_iter, begins_in=partial(self._at_epochs, position))
            opened = self._open(start, placeholders)
            opened.before = skip - placeholders
            if start.random_state:
                set_global_random_state(before)
            return opened
        put_back = (lambda: set_global_random_state(position.random_state)) if position.random_state else None
        self.sampler.arm(skip, 0, at_last_iter, put_back, partial(self._at_epochs, replace(position)))
        opened = self._open(start)
        if put_back is not None and not skip:
            put_back()
        return opened

    def _open(self, start: PassStart, drop: int = 0) -> Pass:
        try:
            batches = self.opener.open()
        finally:
            self.sampler.arm()
            self.opener.prepare_workers({})
        opened = Pass(self.opener, start, batches, drop=drop, lists=self.sampler.lists)
        if self.opener.keeps_workers and self.opener.guard is not None:
            # Those of batches that wait, of those that workers are asked for, and of one more of each worker.
            kept = self.reads_ahead + self._asked_ahead() + 2 * self.opener.copy.num_workers
            self.opener.guard.snapshots = opened.snapshots = Snapshots(kept)
        return opened

    def _asked_ahead(self) -> int:
        """How many batches a DataLoader with workers asks for before they are consumed."""
        return int(self.opener.copy.num_workers * (self.opener.copy.prefetch_factor or 0))

    def _at_last_iter(self, start: PassStart) -> Action | None:
        """Takes back the seed that starting workers draw, where the saved pass went on with those of the last one."""
        if not start.kept_workers and start.generators == start.worker_generators:
            return None
        before = global_random_state()

        def take_back() -> None:
            set_generator_states(self.generators, start.generators)
            set_global_random_state(before)

        return take_back

    def leave(self, left: Pass, position: Position, *, is_early: bool) -> None:
        if not self.opener.has_workers or left.lists is None:
            return
        # A plain loader would have drawn so many index lists by now: the queue has asked for more.
        asked = 0 if is_early else position.batch_in_pass + self._asked_ahead()
        left.lists.take_back(asked)
        if left.snapshots is not None:
            self._left = left.snapshots, asked - left.before, position.worker_states

    def not_covered(self) -> list[str]:
        if self._left is None or not self.opener.goes_on_with_workers():
            return super().not_covered()
        why = "persistent workers: how far the pass that was left has drawn is known when the next one begins"
        return [*super().not_covered(), why]


class ByOwnState(Resuming):
    """Resumes torchdata's StatefulDataLoader, of which each batch carries the state.

    Without workers the loader's state lacks what its generators have drawn since, which the next pass depends on:
    their states are added. With workers it lacks those of the workers' global generators: they travel with the batches
    of a map-style dataset, as for a plain DataLoader.
    """

    opener: DataLoaderOpener
    can_start_over = False  # its loader goes on where it stands

    def __init__(self, opener: DataLoaderOpener) -> None:
        vars(opener.copy)["next_iter_state"] = None
        super().__init__(opener)

    def learn(self) -> None:
        super().learn()
        opener = self.opener
        self.keeps_from_early = ["is a StatefulDataLoader, whose passes begin one after the other"]
        self.generators = [] if opener.has_workers else opener.generators
        # From a state that is not of the latest batch, torchdata makes the batches since then again, which draws.
        is_exact = getattr(opener.loader, "snapshot_every_n_steps", 1) == 1
        opener.sends_snapshots = opener.has_workers and is_exact and opener.is_map_style
        if (loaded := opener.loader.next_iter_state) is not None:  # by the loader's own `load_state_dict`
            opener.forget_workers()
            opener.copy.load_state_dict(loaded)
            opener.loader.next_iter_state = None  # an iterator of the loader would have used it up

    def next_start(self, number: int) -> PassStart:
        return PassStart(number, generator_states(self.generators), epochs=epochs_of(self.opener.loader))

    def _enter(self, start: PassStart, position: Position) -> Pass:
        opener = self.opener
        opener.forget_workers()
        # Loading makes the sampler repeat its draws at the beginning of the pass, so the generators are put back to
        # that moment. Afterwards they go on from the moment of the state.
        set_generator_states(self.generators, start.generators)
        if start.random_state and not opener.has_workers:
            set_global_random_state(start.random_state)
        if position.loader_state is not None:
            self._load(position.loader_state, draws_again=len(start.generators) == len(self.generators))
        if start.random_state and not position.random_state:
            set_global_random_state(start.random_state)
        opener.prepare_workers(position.worker_states if opener.sends_snapshots else {})
        opened = self._open(start)
        if position.random_state and not opener.has_workers:
            set_global_random_state(position.random_state)
        return opened

    def _open(self, start: PassStart) -> Pass:
        if self.opener.has_workers:
            start = replace(start, random_state=b"")  # the global generators of this process make no batch
        try:
            batches = self.opener.open()
        finally:
            self.opener.prepare_workers({})
            self.opener.copy.next_iter_state = None  # torchdata's own loaded state, which it keeps after an error
        return Pass(self.opener, start, batches, loader_state=self._state)

    def _state(self) -> dict[str, Any]:
        return {"loader": self.opener.copy.state_dict(), "generators": [one.get_state() for one in self.generators]}

    def _load(self, state: dict[str, Any], *, draws_again: bool) -> None:
        stateful = self.opener.copy
        stateful.load_state_dict(state["loader"])
        if self.opener.has_workers:
            return
        stateful.state_dict()  # makes the loader's iterator
        iterator: Any = stateful._iterator
        indices = iterator._sampler_iter
        if isinstance(indices, itertools.islice):  # of a plain sampler, which would draw at the first batch
            iterator._sampler_iter = itertools.chain(list(itertools.islice(indices, 1)), indices)
        if hasattr(getattr(indices, "sampler_iter", indices), "load_state_dict") or not draws_again:
            # torchdata's own samplers draw less when they are loaded than they had drawn when they were saved.
            for generator, generator_state in zip(self.generators, state["generators"], strict=True):
                generator.set_state(generator_state.cpu())

    def not_covered(self) -> list[str]:
        if self.opener.sends_snapshots or not self.opener.has_workers:
            return ["the wrapped loader brings its own state; the resumed run is as exact as that state is"]
        return ["the wrapped loader brings its own state, which does not hold the random generators of its workers"]


class ByMakingAgain(Resuming):
    """Resumes any loader: the pass is begun as it began then, and the batches that were consumed are dropped."""

    def __init__(self, opener: Opener) -> None:
        super().__init__(opener)
        self.can_reenter = isinstance(opener, DataLoaderOpener)  # other iterators just go on after Ctrl-C
        self.can_start_over = not isinstance(opener.loader, Iterator)

    def _enter(self, start: PassStart, position: Position) -> Pass:
        before, skip = global_random_state(), position.batch_in_pass
        self._go_back(start)
        opened = self._open(start)
        if self.opener.has_workers:
            opened.drop = skip  # where they are received; the global generators are left as the caller had them
            if start.random_state:
                set_global_random_state(before)
            return opened
        for _ in range(skip):
            # What they raise was raised before the checkpoint.
            with contextlib.suppress(Exception), without_length_warning(opened.batches):
                next(opened.batches)
        if position.random_state:
            set_global_random_state(position.random_state)
        return opened

    def not_covered(self) -> list[str]:
        opener, loader = self.opener, self.opener.loader
        if not isinstance(opener, DataLoaderOpener):
            return [
                f"{type(loader).__name__} makes its batches itself: those that were consumed are made again and "
                "dropped, and its own random generators are not saved"
            ]
        why = "batch_size=None" if opener.is_map_style else "IterableDataset"
        notes = [f"{why}: batches that were consumed are loaded again and dropped"]
        if opener.keeps_workers:
            notes.append("persistent workers of such a loader start a resumed pass with fresh random generators")
        return super().not_covered() + notes


def open_loader(loader: Any, policy: Policy | None = None) -> Resuming:
    """How passes of `loader` are begun and resumed; `policy` is what becomes of samples with broken files."""
    given, loader = loader, inner_loader(loader)
    if isinstance(loader, DataLoader):
        iterates, makes = type(loader).__iter__, getattr(loader._get_iterator, "__func__", None)
        if iterates is DataLoader.__iter__ and makes is DataLoader._get_iterator:
            opener = DataLoaderOpener(loader, policy)
            has_lists = opener.is_map_style and loader.batch_sampler is not None
            resuming = ByIndexLists(opener) if has_lists else ByMakingAgain(opener)
            resuming.tells_samplers = loader is not given
            return resuming
        if all(getattr(one, "__module__", "").startswith("torchdata.") for one in (iterates, makes)):
            return ByOwnState(DataLoaderOpener(loader, policy))
        # Others make iterators in their own way (those of training libraries, timm's, of PyTorch Geometric): as any
        # iterable.
    check_gives_batches(loader)
    return ByMakingAgain(Opener(loader, policy))
