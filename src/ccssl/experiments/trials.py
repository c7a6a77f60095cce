"""The trials of a search, kept in Optuna's storage, and the rules by which any number of processes share them.

A *search* is a study of Optuna's. One process on a machine, the coordinator, reads and writes it on behalf of its
workers. On a single machine the storage is a journal in the folder of the search, which a lock keeps to one
coordinator. On several machines it is a PostgreSQL database, and each machine has a coordinator.

*No trial too many.* A trial is begun under a lock (of the database, where there are several coordinators): whoever
holds it counts the trials that ended or run, and adds one only if there is room. A trial is written in one piece,
with its parameters and its owner.

*No trial lost.* A running trial belongs to a coordinator that says now and then that it is alive, by the clock of the
database. Whose last word is too old has died, and the next coordinator with an idle worker takes the trial over: it
goes on where its checkpoint is, or begins again. In a journal there is only one coordinator, so that every running
trial that is not its own was left by one that died. A trial that was taken over from somebody who lives after all
ends once: storage refuses to end it twice.

*A database that goes away* is asked again for a while. Who is still alive after such a pause must not be taken for
dead, so that silence is borne for longer than the pause: ``STALE > PATIENCE + BEAT``.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from optuna.distributions import CategoricalDistribution
from optuna.exceptions import StorageInternalError
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import ArgumentError, DBAPIError

from ccssl.errors import InputError
from ccssl.experiments.spaces import Space, Value

BEAT = 20.0  # seconds between two signs of life
PATIENCE = 120.0  # seconds for which a lost database is asked again
STALE = 240.0  # seconds of silence after which a coordinator has died

JOURNAL = "journal.log"
SEARCH = "search"  # the attribute of a study that says what is searched
CLAIM = "claim"  # the attribute of a trial that says whose it is, and when its owner last said so

# What no patience mends.
_HOPELESS = ("authentication failed", "does not exist", "no password supplied", "permission denied", "pg_hba.conf")

Parameters = dict[str, Value]
Propose = Callable[[Sequence[FrozenTrial]], Parameters]
Told = TypeVar("Told")


class Trials:
    """The trials of one search, seen by one coordinator."""

    def __init__(
        self,
        open_study: Callable[[], optuna.Study],
        lock: Callable[[], AbstractContextManager[float]],
        place: str,
        owner: str | None,
        note: Callable[[str], None],
    ) -> None:
        """Open a study. ``owner`` is this coordinator's name, None where there is no other one."""
        self._lock, self._place, self._owner, self._note = lock, place, owner, note
        self._study = self._patiently(open_study)

    def describe(self, search: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is searched: as the study says if it is an old one, as given if it is new."""

        def described() -> dict[str, Any]:
            with self._lock():
                known = self._study.user_attrs.get(SEARCH)
                if known is None:
                    known = {**search, "id": uuid.uuid4().hex}
                    self._study.set_user_attr(SEARCH, known)
                return known

        return self._patiently(described)

    def all(self) -> list[FrozenTrial]:
        """Return all trials, in the order of their numbers."""
        return self._patiently(lambda: sorted(self._study.get_trials(deepcopy=False), key=lambda t: t.number))

    def claim(self, mine: Collection[int], space: Space, propose: Propose, limit: int) -> FrozenTrial | None:
        """Return a trial to work on: one whose owner died, else a new one; None if ``limit`` have ended or run.

        ``mine`` are the trials that this coordinator is working on already.
        """

        def claimed() -> FrozenTrial | None:
            with self._lock() as now:
                trials = self._study.get_trials(deepcopy=False)
                for trial in trials:
                    left = trial.state == TrialState.RUNNING and trial.number not in mine
                    if left and self._abandoned(trial, now):
                        self._say(trial, now)
                        return trial
                if sum(trial.state != TrialState.FAIL for trial in trials) >= limit:
                    return None
                distributions = {name: CategoricalDistribution(values) for name, values in space.items()}
                new = optuna.trial.create_trial(
                    state=TrialState.RUNNING,
                    params=propose(trials),
                    distributions=distributions,  # type: ignore[arg-type] - invariant there, only read
                    user_attrs={CLAIM: [self._owner, now]},
                )
                self._study.add_trial(new)
                return max(self._study.get_trials(deepcopy=False), key=lambda trial: trial.number)

        return self._patiently(claimed)

    def report(self, number: int, step: int, accuracy: float, last: bool) -> bool:
        """Note the accuracy after a step; return whether the trial is over, stopped early by this or already ended.

        Saying the same twice does no harm.
        """

        def reported() -> bool:
            known = self._trial(number)
            if known.state.is_finished():
                return True
            trial = optuna.trial.Trial(self._study, known._trial_id)  # Optuna has no other way to reopen one
            if step not in known.intermediate_values:
                trial.report(accuracy, step)
            if last or not trial.should_prune():
                return False
            self._study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
            return True

        return self._patiently(reported)

    def end(self, number: int, accuracy: float | None) -> None:
        """End a trial: complete with its accuracy, or stopped early without one."""
        state = TrialState.PRUNED if accuracy is None else TrialState.COMPLETE
        self._patiently(lambda: self._study.tell(number, accuracy, state, skip_if_finished=True))

    def fail(self, number: int) -> None:
        """Give a trial up: it counts no more."""
        self._patiently(lambda: self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True))

    def beat(self, mine: Collection[int]) -> set[int]:
        """Say that the owner of these trials is alive; return those that are its own no more."""
        if self._owner is None:
            return set()

        def beaten() -> set[int]:
            lost = set()
            with self._lock() as now:
                for trial in self._study.get_trials(deepcopy=False):
                    if trial.number not in mine:
                        continue
                    if trial.state != TrialState.RUNNING or trial.user_attrs[CLAIM][0] != self._owner:
                        lost.add(trial.number)
                    else:
                        self._say(trial, now)
            return lost

        return self._patiently(beaten)

    def _abandoned(self, trial: FrozenTrial, now: float) -> bool:
        owner, said = trial.user_attrs[CLAIM]
        return owner == self._owner or self._owner is None or now - said > STALE

    def _say(self, trial: FrozenTrial, now: float) -> None:
        optuna.trial.Trial(self._study, trial._trial_id).set_user_attr(CLAIM, [self._owner, now])

    def _trial(self, number: int) -> FrozenTrial:
        return next(trial for trial in self._study.get_trials(deepcopy=False) if trial.number == number)

    def _patiently(self, action: Callable[[], Told]) -> Told:
        """Return what an action on the storage gives, asking again while a database is away."""
        until, pause, noted = time.monotonic() + PATIENCE, 0.25, False
        while True:
            try:
                return action()
            except (DBAPIError, StorageInternalError) as error:
                reason = _reason(error)
                if any(words in reason for words in _HOPELESS):
                    raise InputError(f"{self._place} cannot be used: {reason}.") from None
                if time.monotonic() + pause > until:
                    raise InputError(
                        f"{self._place} was lost ({reason}) and did not come back within {PATIENCE:g} s. Everything "
                        "is kept: when it answers again, go on with the same command."
                    ) from None
                if not noted:
                    self._note(f"{self._place} does not answer ({reason}); asking again for {PATIENCE:g} s")
                    noted = True
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
            except OSError as error:
                raise InputError(
                    f"{self._place} cannot be written or read ({error.strerror}). Everything is kept: when that is "
                    "mended, go on with the same command."
                ) from None


def in_journal(folder: Path, name: str, pruner: optuna.pruners.BasePruner, note: Callable[[str], None]) -> Trials:
    """Return the trials in the journal of a folder that this process has to itself."""
    path = folder / JOURNAL
    _mend(path)

    @contextmanager
    def alone() -> Iterator[float]:
        yield time.time()

    def open_study() -> optuna.Study:
        return _study(JournalStorage(JournalFileBackend(str(path))), name, pruner)

    return Trials(open_study, alone, str(path), None, note)


@contextmanager
def in_database(
    url: str, name: str, owner: str, pruner: optuna.pruners.BasePruner, note: Callable[[str], None]
) -> Iterator[Trials]:
    """Give the trials in a PostgreSQL database, which coordinators on other machines may use, too."""
    parsed = _database(url)
    key = int.from_bytes(hashlib.sha256(f"ccssl {name}".encode()).digest()[:8], signed=True)
    options = {
        "pool_pre_ping": True,  # a connection that broke unnoticed is replaced
        "connect_args": {
            "connect_timeout": 10,
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
            "tcp_user_timeout": 60_000,
        },
    }
    engine = sqlalchemy.create_engine(parsed, **options)
    opened: list[RDBStorage] = []

    @contextmanager
    def locked() -> Iterator[float]:
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text("SET LOCAL lock_timeout = '60s'"))
            connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
            yield float(connection.scalar(sqlalchemy.text("SELECT extract(epoch FROM clock_timestamp())")))

    def open_study() -> optuna.Study:
        with locked():  # two that create the tables at once would get in each other's way
            opened.append(RDBStorage(parsed.render_as_string(hide_password=False), engine_kwargs=options))
            return _study(opened[-1], name, pruner)

    place = f"the database {parsed.database or ''} at {parsed.host or 'this machine'}"
    try:
        yield Trials(open_study, locked, place + (f":{parsed.port}" if parsed.port else ""), owner, note)
    finally:
        engine.dispose()
        for storage in opened:
            storage.remove_session()
            storage.engine.dispose()


@contextmanager
def owner_of(folder: Path) -> Iterator[str]:
    """Give a coordinator its name: the same whenever it is the only one of this machine in this folder.

    So a coordinator that was killed is known again, and its trials go on without waiting until it counts as dead.
    """
    folder.mkdir(parents=True, exist_ok=True)
    host = platform.node()
    with (folder / f".lock-{host}").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield uuid.uuid4().hex
        else:
            yield uuid.uuid5(uuid.NAMESPACE_URL, f"{host} {folder.resolve()}").hex


def _study(storage: JournalStorage | RDBStorage, name: str, pruner: optuna.pruners.BasePruner) -> optuna.Study:
    return optuna.create_study(
        study_name=name,
        storage=storage,
        direction="maximize",
        load_if_exists=True,
        pruner=pruner,
        sampler=optuna.samplers.RandomSampler(),  # never asked: trials bring their parameters
    )


def _database(url: str) -> sqlalchemy.URL:
    """Return the address of a PostgreSQL database; nothing of it is repeated in messages but host, port and name."""
    wanted = "storage must be the address of a PostgreSQL database, postgresql://USER@HOST/DATABASE"
    try:
        parsed = sqlalchemy.make_url(url)
    except (ArgumentError, ValueError):
        raise InputError(f"{wanted}; this one cannot be read.") from None
    kind = parsed.drivername.split("+")[0]
    if kind not in ("postgresql", "postgres"):
        raise InputError(f"{wanted}, got {kind}://. Without --storage, trials are kept in a file under --out.")
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise InputError("a PostgreSQL storage needs psycopg: install it with pip install 'ccssl[tune]'.") from None
    return parsed.set(drivername="postgresql+psycopg")


def _mend(journal: Path) -> None:
    """Drop what a crash left behind: half a line at the end, and the lock of a write."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if not journal.exists():
        return
    with journal.open("rb+") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)


def _reason(error: BaseException) -> str:
    """Return the first line of what the driver said."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    said = str(getattr(cause, "orig", None) or cause).strip()
    return said.splitlines()[0].rstrip(".") if said else type(cause).__name__
