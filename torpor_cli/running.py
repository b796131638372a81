"""The command that runs a program of this folder on a rented machine, and brings its results."""

from __future__ import annotations

import os
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

from cyclopts import Parameter

from deployments.terminal import say
from torpor.shared.errors import (
    InvalidInput,
    JobFailed,
    NewerFiles,
    TorporError,
)
from torpor.shared.plain_text import plain
from torpor.shared.values import Want, WantChange, workspace_name
from torpor_cli import flow_runs, jobs
from torpor_cli.copying import back_up, check_no_job
from torpor_cli.flow_runs import Options
from torpor_cli.output import print_report, print_rows, quiet
from torpor_cli.question import agrees, ask_to_rent, offers_of
from torpor_cli.server import connected

if TYPE_CHECKING:
    from blocks import Workspace
    from torpor.control.jobs.records import Job
    from torpor_cli.copying import Folder
    from torpor_cli.torpor_yaml import TorporYaml

Flag = Annotated[bool, Parameter(negative=())]
Several = Annotated[list[str] | None, Parameter(negative=())]

NOT_SENT: Final = ("*.before-[0-9]*T[0-9]*Z-*",)
"""Patterns of names that no run sends: results that gave way to newer ones."""
_LINES: Final = 'set -eo pipefail; eval "$1"'
"""The script of ``bash -lc`` that runs lines of the user, which are its argument: the first line
that fails ends them. Files of a login shell that fail before do not. A constant, so no text is ever
formatted into it."""
_AFTER_SETUP: Final = 'bash -lc "$1" torpor-setup "$2" && shift 2 && exec "$@"'
"""The script of ``bash -lc`` that runs the lines of a setup, and then the command with the PATH
that the setup has set. A constant, so no text is ever formatted into it."""
MOST_RETRIES: Final = 100
_SHOWN: Final = 5


def run(
    *command: str,
    gpu: str = "",
    bring: Several = None,
    env: Several = None,
    secret: Several = None,
    max_hours: jobs.Hours = None,
    max_usd: float | None = None,
    retries: int | None = None,
    workspace: str = "",
    file: Path | None = None,
    accept_secret: Several = None,
    dry_run: Flag = False,
    yes: Flag = False,
    options: Options | None = None,
) -> None:
    """Run a command of this folder on a rented machine, hibernate it, and bring the results.

    torpor run --gpu "RTX 4090" --bring outputs/ -- python train.py

    It makes a workspace for the folder or uses the one that it made, sends what has changed here
    (not what .gitignore names), and runs a job there. It rents after a question that names the
    price and the secrets that the command gets, and asks before it uses a machine that is awake. A
    file torpor.yaml may say what to run: then `torpor run` is enough.

    Args:
        command: The program and its arguments, after `--`. It replaces `run` of torpor.yaml.
        gpu: The GPUs to rent, in order of preference, such as "RTX 4090, L40S", H100:8 or 24GB+.
        bring: A file or directory of the folder to bring when the job has ended. May be repeated.
        env: A variable of the command, as NAME=VALUE. May be repeated.
        secret: A variable whose value is in a Secret block, as NAME=BLOCK. May be repeated.
        max_hours: How long the command may run, such as 5, 2h or 90m, in all attempts together.
        max_usd: What the job may cost, in USD, from the rental of its machine on. It ends
            to store its work.
        retries: How often the command may fail and begin again.
        workspace: The workspace, where it is not to be the folder's own.
        file: Another file than torpor.yaml.
        accept_secret: A pattern of files and variables that look like credentials, to send all the
            same. May be repeated.
        dry_run: Show what would be sent and which offers fit. Make, send and rent nothing.
        yes: Do not ask.
    """
    from torpor.control.jobs.records import new_job_id
    from torpor.control.providers.gpu_wishes import wishes_of
    from torpor_cli import folder_workspace, logins

    chosen = options or Options()
    folder = folder_workspace.checked_folder(Path.cwd())
    project = _read(folder, file)
    settings = project.settings
    argv = argv_of(settings.setup, settings.run, command)
    hours, usd = jobs.limits(max_hours, max_usd)
    hours, usd = hours or settings.max_hours, usd or settings.max_usd
    again = settings.retries if retries is None else retries
    if not 0 <= again <= MOST_RETRIES:
        raise InvalidInput(f"--retries is a number from 0 to {MOST_RETRIES}")
    accepted = accept_secret or []
    given = _over(settings.env, env)
    gets = _accepted_variables(given, accepted)
    variables = [f"{name}={value}" for name, value in given.items()]
    secret_blocks = _over(settings.secrets, secret)
    secrets = [f"{name}={block}" for name, block in secret_blocks.items()]
    brought = _paths(settings.bring if bring is None else bring, folder)
    if brought and chosen.detach:
        raise InvalidInput(
            "with --detach this command ends before the job, and brings nothing: leave --bring "
            "out, and give `torpor restore` later"
        )
    if not logins.has_ssh():
        raise InvalidInput(logins.NO_SSH)
    sent = _look_at(folder)
    gets += _accepted_files(sent, accepted)
    gets += [f"the Secret block {block} as {name}" for name, block in secret_blocks.items()]
    name = workspace_name(workspace or settings.workspace or folder_workspace.name_for(folder))
    wanted = gpu or settings.resources.gpu
    wishes_of(Want(gpu=wanted or None))  # raises InvalidInput before a workspace is made
    job = new_job_id(str(uuid4()))
    with ExitStack() as until_the_end:
        if not dry_run:
            until_the_end.enter_context(folder_workspace.held(name))
        with connected():
            from tasks.jobs import check_environment

            check_environment(variables, secrets)  # before anything is rented
            block, is_new = folder_workspace.block_for(name, project)
            if dry_run:
                _show(name, block, is_new, sent, argv, gets, wanted, usd, chosen)
                return
            _say_sent(sent, name, block, is_new)
        awake = _Awake(name, job, chosen)
        report, failure = None, None
        try:
            with awake.or_asleep():
                with connected():
                    agreed = _wake(block, is_new, wanted, usd, awake, sent, _given(gets), yes=yes)
                    _send(sent, name, block, chosen, agreed, yes=yes)
                awake.job_may_begin = True
                report = flow_runs.run(
                    "job",
                    options,
                    detached=partial(jobs.detached_job, workspace=name, job=job),
                    beside_output=True,
                    workspace=name,
                    command=argv,
                    env=variables,
                    secrets=secrets,
                    save_minutes=settings.save_minutes,
                    spot=block.spot,
                    retries=again,
                    gpu=wanted,
                    max_hours=hours,
                    max_usd=usd,
                    job=job,
                )
        except TorporError as error:
            if not awake.job_may_begin:
                raise
            failure = error
        except KeyboardInterrupt:
            for path in brought if awake.job_may_begin else []:
                into = folder / PurePosixPath(path).parent
                say(f"torpor: {path} was not brought: {_by_hand(name, path, into)}", sys.stderr)
            raise
        if brought:
            with connected():
                record = report.job if report is not None else _ended(name, job)
                _bring(brought, folder, name, block, record, failure, chosen)
        if failure is not None:
            raise failure


def argv_of(setup: str, lines: str, command: Sequence[str]) -> list[str]:
    """The argv of the job: the command, or the lines of ``run`` if there is no command, each time
    after the setup. InvalidInput where there is neither."""
    argv = list(command)
    if len(argv) == 1 and argv[0].endswith((".yaml", ".yml")):
        raise InvalidInput(
            f"{argv[0]} is no program: `torpor run --file {argv[0]}` reads what to run there"
        )
    if not argv and lines.strip():
        argv = ["bash", "-lc", _LINES, "torpor-run", lines]
    if not argv or not argv[0]:
        raise InvalidInput(
            "nothing is to be run: name a command, as in `torpor run -- python train.py`, or write "
            "`run: python train.py` into torpor.yaml"
        )
    if not setup.strip():
        return argv
    return ["bash", "-lc", _AFTER_SETUP, "torpor-run", _LINES, setup, *argv]


def _read(folder: Path, file: Path | None) -> TorporYaml:
    from torpor_cli.torpor_yaml import FILE, TorporYaml, read

    if file is not None:
        return read(file, str(file))
    return read(folder / FILE) if os.path.lexists(folder / FILE) else TorporYaml()


def _over(settings: dict[str, str], given: Sequence[str] | None) -> dict[str, str]:
    """The settings of the file, replaced by those of the command line where both name a
    variable."""
    merged = dict(settings)
    for one in given or []:
        name, equals, value = one.partition("=")
        if not equals:
            raise InvalidInput(f"{name[:80]!r} has no value: write NAME=VALUE")
        merged[name] = value
    return merged


def _paths(given: Sequence[str], folder: Path) -> list[str]:
    """The paths to bring, each once: a path inside of another one comes with the other.
    InvalidInput for one that a symlink leads out of the folder: what a machine brings would be
    written there."""
    from torpor_cli.torpor_yaml import path_below

    paths = [PurePosixPath(path_below(path)) for path in given]
    for path in paths:
        parent = (folder / path).parent
        if not parent.resolve().is_relative_to(folder):
            raise InvalidInput(
                f"{path} is not brought: {parent} leads out of the folder, to {parent.resolve()}"
            )
    kept = [path for path in paths if not any(other in path.parents for other in paths)]
    return [str(path) for path in dict.fromkeys(kept)]


def _look_at(folder: Path) -> Folder:
    """What is sent of the folder. Not sent are files that were renamed for brought results, even if
    git tracks them, and torpor's own files, which hold the keys of stores."""
    from torpor.control.own_server import state_folder
    from torpor_cli import copying

    found = copying.look_at(folder, NOT_SENT)
    own = state_folder()

    def is_sent(name: str) -> bool:
        path = PurePosixPath(name)
        gave_way = any(fnmatchcase(part, one) for part in path.parts for one in NOT_SENT)
        return not gave_way and own not in (folder / path).parents

    names = tuple(filter(is_sent, found.names))
    if len(names) == len(found.names):
        return found
    sizes = [(folder / one).stat().st_size for one in names if not (folder / one).is_symlink()]
    return replace(found, names=names, files=len(sizes), bytes=sum(sizes))


def _accepted_files(sent: Folder, accepted: Sequence[str]) -> list[str]:
    """The files that look like credentials. InvalidInput where one is not accepted: the machine
    belongs to a stranger, and each snapshot would hold the file."""
    from torpor.machine.tree.credentials import is_credential

    named = list(filter(is_credential, sent.names))
    found = [name for name in named if not _is_accepted(name, accepted)]
    if not found:
        return [f"the file {plain(name)}" for name in named]
    shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" * (len(found) > _SHOWN))
    raise InvalidInput(
        f"{len(found)} of the files that would be sent may hold credentials, by their names: "
        f"{shown}. A rented machine and each snapshot would have them. Name them in .gitignore and "
        "give the command its secrets by --secret NAME=BLOCK; or send them all the same, by "
        "--accept-secret PATTERN"
    )


def _accepted_variables(given: Mapping[str, str], accepted: Sequence[str]) -> list[str]:
    """The variables that look like secrets, by their names or values. InvalidInput where one is not
    accepted: the job's record in the store and its runs in Prefect hold ``env`` in clear."""
    from torpor.machine.tree.credentials import is_secret_variable

    named = [name for name, value in given.items() if is_secret_variable(name, value)]
    found = [name for name in named if not _is_accepted(name, accepted)]
    if found:
        raise InvalidInput(
            f"{', '.join(found[:_SHOWN])} may hold a secret, by its name or value, and the job's "
            "record and the page of its run would show it. Save it as a Secret block, and give it "
            f"by --secret {found[0]}=BLOCK or secrets in torpor.yaml; or accept it, by "
            f"--accept-secret {found[0]}"
        )
    return [f"the variable {plain(name)}" for name in named]


def _is_accepted(name: str, accepted: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in accepted)


def _given(gets: Sequence[str]) -> str:
    """For a question: all secrets that a yes gives to the command, by name."""
    return f", and give its command {', '.join(gets)}" if gets else ""


def _say_sent(sent: Folder, name: str, block: Workspace, is_new: bool) -> None:
    made = " (new)" if is_new else ""
    say(
        f"torpor: {sent.path} goes to {block.paths[0]} of workspace {name}{made}: {sent.files:,} "
        f"files, {sent.bytes / 1e6:,.1f} MB, as far as they are not there yet",
        sys.stderr,
    )


def _show(
    name: str,
    block: Workspace,
    is_new: bool,
    sent: Folder,
    argv: Sequence[str],
    gets: Sequence[str],
    gpu: str,
    usd: float,
    options: Options,
) -> None:
    """Print what would be done. A new workspace is not saved."""
    from tasks.progress import doing

    machines = [] if is_new else _logins(name)
    with quiet(options.json), doing("asking the markets for machines"):
        found = offers_of(
            block if is_new else name,
            "newest",
            starts=False,
            change=WantChange(gpu),
            max_usd=usd,
        )
    if options.json:
        print_report(
            {
                "workspace": name,
                "is_new": is_new,
                "machines": [machine.id for machine in machines],
                "files": sent.files,
                "bytes": sent.bytes,
                "into": block.paths[0],
                "command": list(argv),
                "secrets": list(gets),
                "offers": found.rows(),
            },
            as_json=True,
        )
        return
    rows = [
        {"what": "workspace", "value": f"{name}, {'which would be made' if is_new else 'saved'}"},
        {"what": "machine", "value": machines[0].id if machines else "one of the offers below"},
        {"what": "would be sent", "value": f"{sent.files:,} files, {sent.bytes:,} bytes at most"},
        {"what": "into", "value": block.paths[0]},
        {"what": "store", "value": block.store},
        *({"what": "the command gets", "value": one} for one in gets),
    ]
    print_rows(rows, "Dry run: nothing was made, sent or rented", wide=options.wide)
    print_rows(found.rows()[:_SHOWN], found.title(), wide=options.wide)


@dataclass
class _Awake:
    """The machine that this command has rented for its job, or has found awake; ``machine`` is
    empty before. ``price_usd_h``: 0 where it is not known. ``since_unix``: when this command began
    to rent one, which may be handed over although nothing was returned yet; 0 where it rents none.
    ``job_may_begin``: the job was called."""

    name: str
    job: str
    options: Options
    machine: str = ""
    price_usd_h: float = 0.0
    since_unix: float = 0.0
    job_may_begin: bool = False

    def is_on(self, machine: str) -> None:
        """Note that the job's machine is this one, and its price."""
        self.machine = machine
        for login in _logins(self.name):
            if login.id == machine:
                self.price_usd_h = login.price_usd_h

    @contextmanager
    def or_asleep(self) -> Iterator[None]:
        """Where this context fails before a job has begun, hibernate the machine that was rented in
        it. After Ctrl-C, only say what costs money and which command ends it, because the user does
        not want to wait for a hibernation. A job that fails ends with its machine."""
        try:
            yield
        except JobFailed:
            raise
        except Exception:
            self._if_no_job_began(self._sleep_again)
            raise
        except BaseException:
            self._if_no_job_began(self._say)
            raise

    def _if_no_job_began(self, then: Callable[[], None]) -> None:
        why = ""
        try:
            with connected():
                if not self.job_may_begin or _never_began(self.name, self.job):
                    then()
                    return
        except Exception as error:  # noqa: BLE001 - why no job was begun is what counts
            why = f" ({error})"
        say(f"torpor: `torpor status` shows whether {self.name} is awake{why}", sys.stderr)

    def _say(self) -> None:
        """Print what costs money, and the command that ends it."""
        if self.since_unix and not self.machine:
            try:
                if mine := _rented_for(self.name, self.job):
                    self.is_on(mine)
            except TorporError as error:
                say(
                    f"torpor: warning: whether a machine of workspace {self.name} is awake is not "
                    f"known ({error}): `torpor status` shows it",
                    sys.stderr,
                )
        if self.machine:
            cost = f"costs {self.price_usd_h:.3f} $/h" if self.price_usd_h else "may cost money"
            say(
                f"torpor: warning: no job was begun. Machine {self.machine} of workspace "
                f"{self.name} is awake, and {cost}: the same command goes on with it, `torpor "
                f"hibernate {self.name}` stores and ends it. Where its schedule is on, `watch` "
                "does so once the machine is idle",
                sys.stderr,
            )

    def _sleep_again(self) -> None:
        """Hibernate the machine that this command has rented for its job, which did not begin:
        nobody waits for it. A machine that was awake before stays, and so does one that somebody
        uses."""
        import flows

        try:
            mine = _rented_for(self.name, self.job) if self.since_unix else ""
            if not mine or self.machine not in ("", mine):
                self._say()
                return
            self.machine = mine
            say(
                f"torpor: no job was begun: machine {mine}, which this command has rented, is "
                "stored and ended",
                sys.stderr,
            )
            with quiet(self.options.json):
                flows.hibernate(workspace=self.name, machine=mine, only_if_unused=True)
        except Exception as error:  # noqa: BLE001 - why no job was begun is what counts
            say(f"torpor: warning: workspace {self.name} was not hibernated: {error}", sys.stderr)
            self._say()
        except BaseException:
            self._say()
            raise
        else:
            hours = (time.time() - self.since_unix) / 3600
            cost = f", and cost {self.price_usd_h * hours:.2f} $ at most" * bool(self.price_usd_h)
            say(
                f"torpor: workspace {self.name} sleeps again: machine {mine} has ended after "
                f"{hours * 60:.0f} min{cost}",
                sys.stderr,
            )


def _rented_for(name: str, job: str) -> str:
    """The machine that was handed over for the job; empty where there is none."""
    from tasks.workspace_blocks import open_workspace

    for rental in open_workspace(name).rentals.open():
        if rental.job == job and rental.state == "handed over":
            return str(rental.machine or "")
    return ""


def _never_began(name: str, job: str) -> bool:
    """Whether it is known that the job has no record, and that no run of it waits or begins."""
    from tasks.job_listing import is_queued

    return not is_queued(job) and _jobs(name).of(job) is None


def _wake(
    block: Workspace,
    is_new: bool,
    gpu: str,
    usd: float,
    awake: _Awake,
    sent: Folder,
    given: str,
    *,
    yes: bool,
) -> frozenset[str]:
    """Have the workspace on one machine, with all that was there in a snapshot. Asks before it
    rents, and before it uses a machine that is awake. ``given``: what the command gets, for the
    question. What is rented is on record for the job: its money counts from then on, and by it
    `watch` knows that nobody waits for a machine whose job never began. NewerFiles, before anything
    is rented, where the newest snapshot has files that were changed later than those that are to be
    ``sent``; returns which of them a person agrees to use."""
    import flows
    from flows.procedures.listing import list_snapshots
    from torpor_cli import setup, sleeping

    name, options, agreed_usd_h = awake.name, awake.options, None
    change = WantChange(gpu, [], block.spot)
    with ExitStack() as undo:
        if is_new:
            setup.save_new(undo, block, name)
        check_no_job(name)
        logins = _logins(name)
        if len(logins) > 1:
            raise InvalidInput(
                f"workspace {name} is on {len(logins)} machines: "
                f"{', '.join(machine.id for machine in logins)}. A job runs on one: end each other "
                f"one with `torpor hibernate {name} --machine ID` first"
            )
        asleep = not (logins or is_new)
        agreed = _agree_on_stored(sent, name, block, yes=yes) if asleep else frozenset()
        if logins:
            jobs.say_awake(name, change)
        else:
            sleeping.say_where_it_stays_awake(name)
        if yes and not usd and block.max_price_usd_h is None:
            say(
                f"torpor: warning: nothing limits the price: workspace {name} has no "
                "max_price_usd_h, and --yes asks nothing. --max-usd limits this job, `torpor edit "
                f"{name} max_price_usd_h=0.60` each machine",
                sys.stderr,
            )
        if yes and given:
            say(f"torpor: --yes: run the job{given}", sys.stderr)
        elif logins and not yes:
            jobs.ask_on_awake(name, given)
        elif not yes:
            agreed_usd_h = ask_to_rent(
                name,
                "newest",
                1,
                starts=False,
                change=change,
                again=True,
                after=given,
                wide=options.wide,
                max_usd=usd,
            )
        undo.pop_all()  # from here on a machine may exist that only the block finds
    if logins:
        awake.machine, awake.price_usd_h = logins[0].id, logins[0].price_usd_h
        # Files that were changed on the machine and that this folder's files replace.
        back_up(name, as_json=options.json)
        return agreed
    wanted: dict[str, Any] = {"workspace": name, "gpu": gpu, "job": awake.job, "max_usd": usd}
    wanted["agreed_usd_h"] = agreed_usd_h
    awake.since_unix = time.time()
    with quiet(options.json):
        if list_snapshots(name):
            woken: Any = flows.wake(**wanted)  # an OffersReport is returned only in a dry run
            machine = woken.machine
        else:
            machine = flows.create(**wanted).id
    awake.is_on(machine)
    return agreed


def _agree_on_stored(sent: Folder, name: str, block: Workspace, *, yes: bool) -> frozenset[str]:
    """Of which files the newest snapshot has a version that was changed later than here, which a
    person agrees to use. NewerFiles where nobody does. Where the snapshot cannot be read, the wake
    says why."""
    from flows.procedures.listing import list_entries, list_snapshots

    try:
        entries = list_entries(name) if list_snapshots(name) else []
    except TorporError:
        return frozenset()
    stored = {entry.path: entry for entry in entries if entry.kind == "file"}
    newer = []
    for one in sent.names:
        there = stored.get(f"{block.paths[0].rstrip('/')}/{one}")
        try:
            here = os.lstat(sent.path / one)
        except OSError:  # the copy itself will report it
            continue
        if there is None or there.mtime_ns <= here.st_mtime_ns or not stat.S_ISREG(here.st_mode):
            continue
        newer.append(plain(one))
    first = f"`torpor wake {name}`, and then "
    _agree(newer[:_SHOWN], len(newer), "in the newest snapshot", first, name, block, yes=yes)
    return frozenset(newer)


def _agree(
    some: Sequence[str],
    count: int,
    where: str,
    first: str,
    name: str,
    block: Workspace,
    *,
    yes: bool,
) -> None:
    """NewerFiles where files on the machine were changed later than here, unless a person agrees to
    use those. ``first``: a command to run before a push."""
    if not count:
        return
    named = ", ".join(some) + (f" and {count - len(some):,} more" if count > len(some) else "")
    say(
        f"torpor: {count:,} files of the folder were changed later {where} than here, and are not "
        f"sent: {named}",
        sys.stderr,
    )
    attended = not yes and sys.stdin.isatty()
    if not (attended and agrees(f"Run the command with the version {where} of these?")):
        raise NewerFiles(
            f"the command would use files that are not this folder's: {named}. {first}`torpor push "
            f"{name} --to {shlex.quote(block.paths[0])} --overwrite` sends the folder's, "
            "`touch FILE` has the next run send it, and what .gitignore names stays as it is "
            "there"
        )


def _send(
    sent: Folder,
    name: str,
    block: Workspace,
    options: Options,
    agreed: frozenset[str],
    *,
    yes: bool,
) -> None:
    """Send the folder, and store what was sent: a machine that is lost right after would otherwise
    have the command begin again with the files of an earlier run. NewerFiles where other files than
    those that a person has ``agreed`` to were changed later on the machine than here, unless a
    person agrees now."""
    from torpor_cli import copying

    with quiet(options.json):
        copied = copying.send(sent, name, block.paths[0])
    say(
        f"torpor: {copied.files:,} files were sent, {copied.bytes / 1e6:,.1f} MB; "
        f"{copied.unchanged:,} were there",
        sys.stderr,
    )
    are_agreed = agreed.issuperset(copied.newer) and copied.newer_count == len(copied.newer)
    if not are_agreed:  # or where not all names are shown
        _agree(copied.newer, copied.newer_count, "on the machine", "", name, block, yes=yes)
    back_up(name, as_json=options.json)
    check_no_job(name)


def _ended(name: str, job: str) -> Job | None:
    """The job if it has ended; None otherwise."""
    found: Job | None = _jobs(name).of(job)
    return found if found is not None and found.ended else None


def _bring(
    paths: Sequence[str],
    folder: Path,
    name: str,
    block: Workspace,
    job: Job | None,
    failure: TorporError | None,
    options: Options,
) -> None:
    """Restore these paths of the job's last snapshot into the folder. What has such a name here is
    renamed, and never overwritten. If the job has failed, an error here is only printed, because
    the job's failure counts more."""
    snapshot = None
    if job is not None:
        snapshot = job.final or (job.newest if job.saves else None)
    if snapshot is None:
        why = "no snapshot has the results of this job" if job else "the job has not ended"
        by_hand = _by_hand(name, paths[0], folder / PurePosixPath(paths[0]).parent)
        error = TorporError(f"nothing was brought: {why}. {by_hand}")
        if failure is None:
            raise error
        say(f"torpor: {error}", sys.stderr)
        return
    missing: TorporError | None = None
    for path in paths:
        try:
            _bring_one(path, folder, name, block, snapshot, options)
        except TorporError as error:
            say(f"torpor: {path} was not brought: {error}", sys.stderr)
            missing = error
    if missing is not None and failure is None:
        raise TorporError(
            f"not all results were brought. Snapshot {snapshot} has what the job left: `torpor "
            f"snapshots {name} {snapshot}` lists it, `torpor restore {name} PATH INTO --snapshot "
            f"{snapshot} --leave-git` brings it"
        )


def _bring_one(
    path: str, folder: Path, name: str, block: Workspace, snapshot: str, options: Options
) -> None:
    import flows

    with quiet(options.json):
        report = flows.restore_path(
            workspace=name,
            path=f"{block.paths[0]}/{path}",
            into=str(folder / PurePosixPath(path).parent),
            snapshot=snapshot,
            machine="here",
            move_aside=True,
            leave_git=True,
        )
    aside = f". What was there is {report.moved_aside} now" if report.moved_aside else ""
    say(
        f"torpor: {path} of snapshot {snapshot} is here: {report.files:,} files, "
        f"{report.bytes / 1e6:,.1f} MB{aside}",
        sys.stderr,
    )
    for words in report.warnings:
        say(f"torpor: warning: {path}: {plain(words)}", sys.stderr)


def _by_hand(name: str, path: str, into: Path) -> str:
    command = shlex.join(
        ["torpor", "restore", name, path, str(into), "--move-aside", "--leave-git"]
    )
    return f"`{command}` brings it once it is stored"


def _jobs(name: str) -> Any:
    from tasks.workspace_blocks import open_workspace

    return open_workspace(name).jobs


def _logins(name: str) -> list[Any]:
    from flows.procedures.listing import list_logins

    return list_logins(name)
