"""Values that pass between packages: frozen, typed, checked where they are made. No I/O."""

from __future__ import annotations

import functools
import re
import secrets
import threading
from datetime import datetime, timezone
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, NewType, TypeVar

import msgspec

from torpor.shared.errors import InvalidInput

T = TypeVar("T")

WorkspaceName = NewType("WorkspaceName", str)
"""Lower-case letters, digits and hyphens, 1 to 63 characters; part of object names and labels."""
SnapshotId = NewType("SnapshotId", str)
"""``20261120T234913Z-1f0c9ab2``: the control side's UTC clock, 32 random bits. Sorts by time."""
ObjectKey = NewType("ObjectKey", str)
"""An object's name below the store's prefix."""
MachineId = NewType("MachineId", str)
"""The provider's own name for a machine."""

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

BENCHMARK: Final = "benchmark--"
BENCHMARK_MACHINES: Final = "benchmark-machines--"
DRILL: Final = "drill--"
NODES: Final = "nodes--"
"""Prefix for the machines of a job on several nodes, except the workspace's own."""
RESERVED: Final = (BENCHMARK, BENCHMARK_MACHINES, DRILL, NODES)
"""Prefixes of reserved names. Machines and objects under such names hold no work and may always be
destroyed. No Workspace block may have such a name."""
BASE: Final = "base--"
"""Prefix of the names under which environments of stacks are kept. No machine is ever rented under
such a name, and no Workspace block may have one."""
HOME: Final = "home--"
"""Prefix of the names under which a hibernate stores a user's own files of a home, beside the
workspace. No machine is ever rented under such a name, and no Workspace block may have one."""
HOME_ROOT: Final = "~"
"""The only directory of a snapshot that is stored under a HOME name."""

_LONGEST_NAME: Final = 63
_WORKSPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SNAPSHOT = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")
_OBJECT_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)*")


def workspace_name(text: str) -> WorkspaceName:
    """Check a workspace's name; raises InvalidInput."""
    if not _WORKSPACE.fullmatch(text):
        raise InvalidInput(
            f"{text!r} is not a workspace name: use 1 to 63 lower-case letters, digits and "
            "hyphens, beginning and ending with a letter or digit"
        )
    return WorkspaceName(text)


def reserved_name(prefix: str, workspace: WorkspaceName) -> WorkspaceName:
    """``drill--demo`` for the prefix ``drill--`` and the workspace ``demo``. If that is too long,
    the beginning of it and a hash."""
    if len(prefix + workspace) <= _LONGEST_NAME:
        return workspace_name(prefix + workspace)
    mark = f"-{blake2b(workspace.encode(), digest_size=4).hexdigest()}"
    return workspace_name((prefix + workspace)[: _LONGEST_NAME - len(mark)] + mark)


def names_of(workspace: WorkspaceName) -> list[WorkspaceName]:
    """Every name that machines of ``workspace`` are rented under: its own, and those of its drills,
    its benchmarks and the other nodes of its jobs."""
    return [workspace, *(reserved_name(prefix, workspace) for prefix in RESERVED)]


def home_of(workspace: WorkspaceName) -> WorkspaceName:
    """The name under which files of a home on the machines of ``workspace`` are kept."""
    return reserved_name(HOME, workspace)


def owner_of(name: WorkspaceName) -> WorkspaceName:
    """The workspace that machines with this rental name belong to; only the beginning of its name
    where the rental name had to be cut."""
    prefix = next((prefix for prefix in RESERVED if name.startswith(prefix)), "")
    return WorkspaceName(name.removeprefix(prefix))


def snapshot_id(text: str) -> SnapshotId:
    """Check a snapshot's id; raises InvalidInput."""
    if not _SNAPSHOT.fullmatch(text):
        raise InvalidInput(f"{text!r} is not a snapshot id, such as 20261120T234913Z-1f0c9ab2")
    made_at(SnapshotId(text))
    return SnapshotId(text)


def object_key(text: str) -> ObjectKey:
    """Check an object's name on its way in or out of a store; raises InvalidInput."""
    if len(text) > 900 or not _OBJECT_KEY.fullmatch(text):
        raise InvalidInput(f"{text!r} is not an object name that torpor writes or reads")
    return ObjectKey(text)


def machine_path(text: str) -> str:
    """Check the path of a directory on a machine, and tidy it; raises InvalidInput."""
    if not text.startswith(("/", "~/")) or "\0" in text:
        raise InvalidInput(
            f"{text!r} is not a path on a machine: begin with / or ~/ and name a directory"
        )
    if ".." in text.split("/"):
        raise InvalidInput(f"{text!r} goes up with ..: name the directory itself")
    return tidy_path(text)


def tidy_path(path: str) -> str:
    """The path without redundant slashes and dots, so that equal directories have equal paths:
    ``~//a/./b/`` is ``~/a/b``. Anything else than an absolute path or one below ~/ is not changed:
    no block has such a path."""
    head = next((head for head in ("/", "~/") if path.startswith(head)), "")
    names = [name for name in path[len(head) :].split("/") if name not in ("", ".")]
    return head + "/".join(names) if head else path


def overlap(first: str, second: str) -> bool:
    """Whether two tidy paths are equal, or one is within the other."""
    a, b = (f"{path.rstrip('/')}/" for path in (first, second))
    return a.startswith(b) or b.startswith(a)


def new_snapshot_id(now: datetime, after: SnapshotId | None = None) -> SnapshotId:
    """An id for a snapshot made at ``now`` (UTC) that sorts after ``after`` whatever the clock."""
    stamp = now.astimezone(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    if after is not None and stamp <= after[:16]:
        newest = datetime.strptime(after[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        stamp = datetime.fromtimestamp(newest.timestamp() + 1, timezone.utc).strftime(
            "%Y%m%dT%H%M%SZ"
        )
    return SnapshotId(f"{stamp}-{secrets.token_hex(4)}")


@functools.lru_cache(maxsize=10_000)  # each rule of a retention asks for each id
def made_at(snapshot: SnapshotId) -> datetime:
    """When a snapshot was made, in UTC, from its id. InvalidInput where that names no time."""
    try:
        return datetime.strptime(snapshot[:16], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        raise InvalidInput(
            f"{snapshot!r} is not a snapshot id: {snapshot[:16]} is no date and time"
        ) from None


class Grant(msgspec.Struct, frozen=True):
    """Permission for one verb on one object until ``expires_unix`` (seconds, the signer's clock).

    ``once``: a PUT that must carry ``If-None-Match: *``, so that the store writes no name twice.
    ``patience_s``: how long the holder waits for a store that is away.
    InvalidInput for an object that torpor neither writes nor reads.
    """

    key: ObjectKey
    verb: Literal["PUT", "GET"]
    url: str
    expires_unix: int
    once: bool = False
    patience_s: float = 0.0

    def __post_init__(self) -> None:
        object_key(self.key)

    def __repr__(self) -> str:
        """Without the URL: its signature is a secret while it lasts."""
        return f"Grant({self.verb} {self.key})"


class Away(msgspec.Struct, frozen=True):
    """A request that waits for a store: what failed, for how long it has waited, and the limit."""

    error: Annotated[str, msgspec.Meta(max_length=300_000)]
    away_s: float
    patience_s: float


class StoredObject(msgspec.Struct, frozen=True):
    """What a store says of one object. ``md5`` (hex) is None where the ETag is not an MD5.
    ``archive``: the storage class of an object that must be restored from an archive before it can
    be read. In a listing it is only possible: listings show neither restores nor tiers of
    INTELLIGENT_TIERING. ``etag``: as the store writes it; it changes with the content."""

    key: ObjectKey
    bytes: int
    md5: str | None
    modified_unix: float
    archive: str = ""
    etag: str = ""


class Capabilities(msgspec.Struct, frozen=True):
    """What a store was seen to do when it was probed; never assumed."""

    conditional_put: bool  # If-None-Match: * has exactly one winner
    conditional_replace: bool  # of writers with one If-Match, exactly one wins
    etag_is_md5: bool  # the ETag of a single PUT is the MD5 of its body


class Label(msgspec.Struct, frozen=True):
    """What marks a machine as ours: workspace, rental (one per attempt), owner (this install)."""

    owner: str
    workspace: WorkspaceName
    rental: str = msgspec.field(name="lease")  # its name in records and labels that exist


_Fact = Annotated[str, msgspec.Meta(max_length=10_000)]


class Host(msgspec.Struct, frozen=True):
    """What a machine offers to processes, or what frozen processes need of a machine. A field is
    empty where it is unknown or not needed."""

    kernel: _Fact = ""  # the kernel's release
    features: _Fact = ""  # of the processor, by the kernel's names
    driver: _Fact = ""  # version of NVIDIA's driver
    architecture: _Fact = ""  # as ``uname -m`` says it


class FrozenPrograms(msgspec.Struct, frozen=True):
    """The programs that a snapshot holds frozen, and what they need to go on."""

    host: Host = Host()
    gpu: str = ""  # the GPU's name in the driver's words; empty: the programs used no GPU
    gpu_count: int = 0


class Want(msgspec.Struct, frozen=True):
    """What a workspace needs of a machine. Empty, 0 and None mean no wish."""

    gpu: str | None = None  # in order of preference: "H100 SXM, A100 80GB" (gpu_wishes.py)
    gpu_count: int = 1
    disk_gib: float = 0
    max_price_usd_h: float | None = None  # of everything: machine, disk, address
    # the highest price that the user has agreed to; it does not raise a bid
    agreed_usd_h: float | None = None
    regions: list[str] = []
    spot: Literal["never", "allowed", "only"] = "never"
    rank: Literal["price", "order"] = "price"  # the cheapest first, or the first provider first
    # 0 to 1; data centres fit that state no reliability
    min_reliability: float = 0
    image: str = ""  # of a container or a virtual machine
    architecture: str = ""  # as ``uname -m`` says it
    cuda: tuple[int, int] | None = None  # CUDA version that the driver must support at least
    driver: tuple[int, ...] | None = None  # least version of NVIDIA's driver
    # whether programs are frozen and go on there
    process: Literal["never", "try", "require"] = "never"
    frozen: FrozenPrograms | None = None  # the snapshot's frozen programs; None: it holds none

    @property
    def least_cuda(self) -> tuple[int, int] | None:
        """The CUDA version that the driver must support, also derived from a wanted driver
        version."""
        known = [cuda for branch, cuda in _DRIVERS if self.driver and branch <= self.driver[0]]
        return max([*known, *([self.cuda] if self.cuda else [])], default=None)

    @property
    def unknown_driver(self) -> bool:
        """Whether a driver is wanted for which no CUDA version is known."""
        return self.driver is not None and self.driver[0] > _DRIVERS[-1][0]


class WantChange(msgspec.Struct, frozen=True):
    """What one rental wants other than its workspace does. Empty fields: as the workspace."""

    gpu: str = ""
    regions: list[str] = []
    spot: Literal["", "never", "allowed", "only"] = ""
    image: str = ""
    agreed_usd_h: float | None = None

    def of(self, want: Want) -> Want:
        given = {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value or isinstance(value, float)
        }
        return msgspec.structs.replace(want, **given)


_DRIVERS: Final = (
    (450, (11, 0)), (455, (11, 1)), (460, (11, 2)), (465, (11, 3)), (470, (11, 4)),
    (495, (11, 5)), (510, (11, 6)), (515, (11, 7)), (520, (11, 8)), (525, (12, 0)),
    (530, (12, 1)), (535, (12, 2)), (545, (12, 3)), (550, (12, 4)), (555, (12, 5)),
    (560, (12, 6)), (565, (12, 7)), (570, (12, 8)), (575, (12, 9)), (580, (13, 0)),
    (590, (13, 1)), (595, (13, 2)), (610, (13, 3)),
)  # fmt: skip
"""The CUDA version of each branch of NVIDIA's driver (CUDA Toolkit Release Notes, table 3). A
branch that is not listed supports at least the version of the next lower one."""


def cuda_version(text: str) -> tuple[int, int] | None:
    """Major and minor number of a version such as 12.4; None where the text has none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def driver_version(text: str) -> tuple[int, ...] | None:
    """The numbers of a version of NVIDIA's driver, such as 550.54.14; None where the text has
    none."""
    found = re.match(r"\d{3}(?:\.\d{1,3}){0,2}(?![.\d])", text)
    return tuple(int(part) for part in found[0].split(".")) if found else None


HOST_KEY_SIGNATURES: Final = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
"""By the kind of a host key that torpor accepts, the algorithms that sign with it, the best first
(RFC 8332: an RSA key signs with SHA-2)."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where SSH answers. ``host_key`` is an OpenSSH public key line, or None until pinned.
    ``jump``: the SSH server that forwards to it, whose host key is known; None: it is reached
    directly."""

    host: str
    port: int
    user: str
    host_key: str | None = None
    jump: Endpoint | None = None

    def __str__(self) -> str:
        behind = f" through {self.jump.host} port {self.jump.port}" if self.jump else ""
        return f"{self.user}@{self.host} port {self.port}{behind}"


MachineState = Literal["queued", "starting", "running", "stopped", "stopping"]


class Machine(msgspec.Struct, frozen=True):
    """One live machine as its provider describes it now."""

    id: MachineId
    provider: str  # the provider's identity, e.g. local://desk/home/me/machines
    label: Label | None  # None: not ours
    state: MachineState
    endpoint: Endpoint | None  # None until it is known
    price_usd_h: float = 0.0
    note: str = ""  # the provider's last message about the machine


class GpuUse(msgspec.Struct, frozen=True):
    """Permission to encode and decode numbers on the machine's GPU, used where it proves faster
    than the cores."""

    python: str = ""
    """A Python on the machine that can import CuPy. Empty: the agent looks for one."""
    install: bool = False
    """The agent may install CuPy into its own folder if it finds none."""


class Compression(msgspec.Struct, frozen=True):
    """Whether chunks are encoded for size or for speed. ``smallest``: fewest bytes, whatever time
    it takes; ``fastest``: least time, whatever bytes it takes; at most one of them."""

    smallest: bool = False
    fastest: bool = False
    gpu: GpuUse | None = None


class Coded(msgspec.Struct, frozen=True):
    """One codec on one kind of data: seconds of each round over all chunks. On a core, of its CPU
    time. On a GPU, of wall time, copies included; ``encode_s`` includes the check by the cores,
    without which a snapshot sends nothing.

    ``decode_s`` is empty where nothing was gained, so that nothing is decoded.
    """

    data: str
    codec: str
    plain_bytes: int
    stored_bytes: int
    encode_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    by: str = "core"


JOB_LOGS: Final = ".torpor-jobs"
"""The folder of the logs of jobs, in the first of a workspace's directories."""
PROGRAMS: Final = ".torpor-process"
"""The folder in the first directory that holds the log of each program of the workspace, and what
is frozen of the program."""


class IdleRules(msgspec.Struct, frozen=True):
    """When a machine counts as idle: in ``share`` of the seconds of the last ``minutes``, no figure
    was above these limits. A limit of 0 for CPU, network or disk leaves that figure out."""

    minutes: float = 30.0
    gpu_percent: float = 5.0  # of the busiest GPU
    share: float = 0.95
    cpu_percent: float = 50.0  # of one core
    network_kib_s: float = 100.0
    disk_kib_s: float = 1024.0
    people: bool = True  # the use of SSH and of Jupyter counts as work
    unused: bool = False  # a machine on which nothing has run yet is idle, too
    hibernate: bool = True  # what `watch` does with an idle machine; off: only report it


IdleChoice = Literal["hibernate", "report", "off"]
"""What happens to idle machines of an installation. off: `watch` does not look for them."""


class WorkspaceSpec(msgspec.Struct, frozen=True):
    """The workspace block without Prefect: what a user keeps, and what machine it needs."""

    name: WorkspaceName
    paths: list[str]
    exclude: list[str] = []
    first: list[str] = []
    """Patterns of what a wake restores first, in this order."""
    want: Want = Want()
    quiesce: list[str] = []
    resume: list[str] = []
    quiesce_timeout_s: float = 300.0
    accept_changed: list[str] = []
    accept_lost: list[str] = []
    """Directories of the machine, outside of the workspace, that may be lost with it."""
    move_aside: bool = False
    """Whether a wake renames what an image has put into these directories."""
    left_behind: Literal["report", "refuse"] = "report"
    """What a destroy does if more than ``left_behind_gib`` outside of the workspace would be
    lost."""
    left_behind_gib: float = 1.0
    parts: int = 32
    part_bytes: int = 64 * MIB
    """The least bytes that a part moves: a small workspace is cut into fewer parts."""
    compression: Compression = Compression()
    programs: list[str] = []
    """Command lines that a wake starts on the machine."""
    process: Literal["never", "try", "require"] = "never"
    """Whether the programs' processes, and a job's command at a spot notice, are frozen and go
    on."""
    environment: Literal["image", "keep"] = "image"
    """Whether a wake puts packages of apt and pip back that were added beside the workspace."""
    save_minutes: int = 0
    """How often a rented machine stores the workspace by itself; 0: never."""
    idle: IdleRules = IdleRules()
    when_left: Literal["end", "continue", "report"] = "end"
    """What `watch` does with a machine of a killed run, which was never handed over."""
    accept_paths: list[str] = []
    """Further directories that a snapshot may name, which the user has named in this call."""

    @property
    def freezes(self) -> bool:
        """Whether a hibernate freezes programs."""
        return bool(self.programs) and self.freezes_jobs

    @property
    def freezes_jobs(self) -> bool:
        """Whether a job's command is frozen when a market takes its machine."""
        return self.process != "never"

    @property
    def may_change(self) -> list[str]:
        """Patterns of files that may change while they are read."""
        return [*self.accept_changed, f"{PROGRAMS}/*.log"]

    @property
    def restorable(self) -> list[str]:
        """The directories that a snapshot may name."""
        return [*self.paths, *self.accept_paths]


class StoredSnapshot(msgspec.Struct, frozen=True):
    """A snapshot as a listing shows it; ``root`` (hex) from its manifest's header."""

    workspace: WorkspaceName
    snapshot: SnapshotId
    root: str
    manifest_bytes: int
    modified_unix: float


_learning: Final = threading.Lock()
_learned: Final[set[Any]] = set()


def learned(kind: type[T]) -> type[T]:
    """Return the type after msgspec has analysed it. msgspec 0.22.0 analyses a type at its first
    use; if two threads do so at the same time, the process dies of a segmentation fault."""
    if kind not in _learned:
        with _learning:
            msgspec.json.Decoder(kind)
            _learned.add(kind)
    return kind
