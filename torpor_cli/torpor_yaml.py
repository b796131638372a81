"""The file torpor.yaml: what `torpor run` does in a folder. Its errors name file, line and key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from torpor.control.providers.gpu_wishes import wishes_of
from torpor.control.variables import is_variable
from torpor.shared.errors import InvalidInput
from torpor.shared.format.git_names import is_of_git
from torpor.shared.values import Want, workspace_name

FILE: Final = "torpor.yaml"
MOST_BYTES: Final = 1024 * 1024
"""Most bytes of torpor.yaml. A longer file is another one, named by mistake."""
_MOST_DEEP: Final = 8
_NUMBER: Final = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)(e[-+]?[0-9]+)?", re.I)
"""A number that YAML 1.1 reads as a person does."""
_HABITS: Final = {
    "accelerators": "gpu, in resources",
    "accept_secrets": "the option --accept-secret alone: no file of a folder hands out credentials",
    "any_of": "gpu, in resources, which takes several in order of preference",
    "backends": "like, a workspace that rents at the market that is meant",
    "cloud": "like, a workspace that rents at the market that is meant",
    "commands": "run",
    "disk_size": "disk_gib, in resources",
    "disk": "disk_gib, in resources",
    "envs": "env",
    "file_mounts": "nothing: what the folder holds is sent",
    "image_id": "image, in resources",
    "init": "setup",
    "job_recovery": "retries and spot",
    "instance_types": "gpu, in resources",
    "budget": "max_usd",
    "max_duration": "max_hours",
    "max_price": "max_price_usd_h, in resources",
    "name": "workspace",
    "num_nodes": "nothing: `torpor job run --nodes` runs on several machines",
    "nodes": "nothing: `torpor job run --nodes` runs on several machines",
    "outputs": "bring",
    "python": "nothing: write it into setup",
    "region": "regions, in resources",
    "retry": "retries",
    "spot_policy": "spot, in resources",
    "timeout": "max_hours",
    "type": "nothing: `run` is a job, and a deployment is `torpor deploy`",
    "use_spot": "spot, in resources: never, allowed or only",
    "workdir": "nothing: the folder of the file is sent",
    "working_dir": "nothing: the folder of the file is sent",
}
"""Keys of SkyPilot's and dstack's files and options of torpor, and what stands for them here."""

ResultT = TypeVar("ResultT")
Loc: TypeAlias = tuple[str | int, ...]
"""The place of a value in the file: its keys and list positions, from the outermost one on."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Resources(_Strict):
    """What machine the folder needs: settings of a Workspace block, by their names there."""

    gpu: str = ""
    gpu_count: Annotated[int, Field(ge=1, le=16)] = 1
    disk_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_price_usd_h: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    regions: list[str] = []
    spot: Literal["never", "allowed", "only"] = "never"
    image: str = ""
    cuda: Annotated[str, Field(pattern=r"^(\d{1,3}\.\d{1,3})?$")] = ""
    driver: Annotated[str, Field(pattern=r"^(\d{3}(\.\d{1,3}){0,2})?$")] = ""

    @field_validator("gpu")
    @classmethod
    def _known(cls, text: str) -> str:
        _checked(lambda: wishes_of(Want(gpu=text or None)))
        return text


class Settings(_Strict):
    """All keys of the file.

    ``like``: the workspace whose store, market and limits a new workspace takes. ``setup``: lines
    of bash before each start of the command. ``run``: lines of bash, where the command line names
    no command. ``bring``: paths of the folder that come back when the job has ended.
    """

    workspace: str = ""
    like: str = ""
    resources: Resources = Resources()
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    setup: str = ""
    run: str = ""
    bring: list[str] = []
    max_hours: Annotated[float, Field(ge=0, le=1e5, allow_inf_nan=False)] = 0.0
    max_usd: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    save_minutes: Annotated[float, Field(gt=0, le=24 * 60)] = 30.0

    @field_validator("workspace")
    @classmethod
    def _named(cls, text: str) -> str:
        return _checked(lambda: str(workspace_name(text))) if text else text

    @field_validator("env")
    @classmethod
    def _variables(cls, given: dict[str, str]) -> dict[str, str]:
        wrong = [name for name in given if not is_variable(name)]
        if wrong:
            raise ValueError(
                f"{wrong[0][:80]!r} is no environment variable: use letters, digits and _ in the "
                "name, and not TORPOR_ in front"
            )
        return given

    @field_validator("bring")
    @classmethod
    def _below(cls, paths: list[str]) -> list[str]:
        return _checked(lambda: [path_below(path) for path in paths])


@dataclass(frozen=True)
class TorporYaml:
    """The settings of a folder, and where each stands in its file. ``name``: of the file, as a
    person wrote it; empty where there is none."""

    settings: Settings = field(default_factory=Settings)
    name: str = ""
    marks: dict[Loc, str] = field(default_factory=dict)

    def at(self, *loc: str) -> str:
        """The place of a value as text: ``torpor.yaml, line 4, key resources.spot``"""
        return f"{self.name}, {_place(self.marks, loc)}"


def read(path: Path, name: str = FILE) -> TorporYaml:
    """The settings in a file; InvalidInput with file, line and key for each fault."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read: {error.strerror or error}") from None
    if len(raw) > MOST_BYTES:
        raise InvalidInput(f"{name} has more than {MOST_BYTES // 1024} KiB: is it another file?")
    try:
        return parse(raw.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InvalidInput(f"{name}, line {line}: this is no text in UTF-8") from None


def parse(text: str, name: str = FILE) -> TorporYaml:
    """The settings in a text; InvalidInput as ``read``."""
    reading = _Reading(name)
    try:
        given = reading.value_of(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = ", ".join(filter(None, (error.context, error.problem)))
        raise InvalidInput(f"{name}{at}: this is no YAML: {why}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise InvalidInput(f"{name}, line {line}: {error.reason}") from None
    except RecursionError:
        raise InvalidInput(f"{name}: this is nested too deeply") from None
    try:
        settings = Settings.model_validate(given)
    except ValidationError as invalid:
        faults = invalid.errors(include_url=False, include_input=False, include_context=False)
        said = sorted(map(reading.said_of, faults))
        raise InvalidInput("; ".join(words for _, words in said)) from None
    return TorporYaml(settings, name, reading.marks)


def path_below(text: str) -> str:
    """A path below the folder, tidied; InvalidInput for any other."""
    path = PurePosixPath(text)
    outside = path.is_absolute() or text.startswith("~") or ".." in path.parts
    if outside or not path.parts or "\0" in text:
        raise InvalidInput(
            f"{text!r} is no path below the folder, such as outputs/: only those are brought"
        )
    if is_of_git(text):
        raise InvalidInput(f"{text!r} is not brought: git runs what a machine writes into .git")
    return str(path)


class _Reading:
    """One text on its way to plain values. YAML's own loader keeps no lines, takes a key that is
    there twice, and reads `1e-3` and `no` as something else than the text of a variable."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: dict[Loc, yaml.Node] = {}
        self._seen: set[int] = set()
        self.marks: dict[Loc, str] = {}

    def value_of(self, text: str) -> Any:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            return {} if node is None or _is_null(node) else self._value(loader, node, ())
        finally:
            loader.dispose()

    def _value(self, loader: yaml.SafeLoader, node: yaml.Node, loc: Loc) -> Any:
        self._nodes[loc] = node
        self.marks.setdefault(loc, _line(node, loc))
        if id(node) in self._seen:
            raise self._fault(loc, "anchors and aliases have no use here: write the value twice")
        self._seen.add(id(node))
        if len(loc) > _MOST_DEEP:
            raise self._fault(loc, "this is nested too deeply")
        if isinstance(node, yaml.MappingNode):
            return dict(self._items(loader, node, loc))
        if isinstance(node, yaml.SequenceNode):
            return [self._value(loader, one, (*loc, at)) for at, one in enumerate(node.value)]
        if loc[:1] == ("env",) and len(loc) == 2 and not _is_null(node):
            return node.value  # the value of a variable is its text, as it is written
        number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if number and not _NUMBER.fullmatch(node.value):
            raise self._fault(
                loc,
                f"YAML reads {node.value} as a number in another way than it looks (1:30 as 90, "
                "010 as 8): write a number with digits and a point alone, without a 0 in front, "
                "and put a text in quotes",
            )
        try:
            return loader.construct_object(node)
        except ValueError as error:  # such as the 31st of June
            raise self._fault(loc, str(error)) from None

    def _items(
        self, loader: yaml.SafeLoader, node: yaml.MappingNode, loc: Loc
    ) -> Iterator[tuple[str, Any]]:
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._fault(loc, f"a key in line {key.start_mark.line + 1} is no text")
            at = (*loc, key.value)
            if at in self.marks:
                first = self.marks[at].partition(",")[0]
                self.marks[at] = _line(key, at)
                raise self._fault(at, f"this key is there twice: first in {first}")
            self.marks[at] = _line(key, at)
            if _is_null(value) and loc != ("env",):
                continue  # nothing after a key: the default holds
            yield key.value, self._value(loader, value, at)

    def said_of(self, fault: Mapping[str, Any]) -> tuple[int, str]:
        """The line of a fault, and the text about it."""
        loc: Loc = fault["loc"]
        why = str(fault["msg"]).removeprefix("Value error, ")
        node = self._nodes.get(loc)
        if fault["type"] == "extra_forbidden":
            why = _unknown(loc)
        elif loc[:1] == ("env",) and node is not None and _is_null(node):
            why = "this variable has no value: write one, or take the line away and use --env"
        elif fault["type"] in ("string_type", "literal_error") and isinstance(
            node, yaml.ScalarNode
        ):
            kind = node.tag.rpartition(":")[2]
            if kind != "str":
                why += f". YAML reads {node.value} as {kind}: put a text in quotes"
        elif not loc:
            why = "write keys and their values, such as `run: python train.py`"
        place = _place(self.marks, loc)
        return int(place.split()[1].rstrip(",")), f"{self._name}, {place}: {why}"

    def _fault(self, loc: Loc, why: str) -> InvalidInput:
        return InvalidInput(f"{self._name}, {_place(self.marks, loc)}: {why}")


def _line(node: yaml.Node, loc: Loc) -> str:
    key = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in loc)
    line = f"line {node.start_mark.line + 1}"
    return f"{line}, key {key.removeprefix('.')}" if key else line


def _place(marks: dict[Loc, str], loc: Loc) -> str:
    """The place of a value, or of the nearest value around it."""
    while loc and loc not in marks:
        loc = loc[:-1]
    return marks.get(loc, "line 1")


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _unknown(loc: Loc) -> str:
    key = str(loc[-1])
    if key in _HABITS:
        return f"there is no such key. Here it is {_HABITS[key]}"
    known = [*(Resources if loc[0] == "resources" else Settings).model_fields]
    for kind, inside in ((Resources, "resources"), (Settings, "")):
        if key in kind.model_fields:
            where = f"below {inside}" if inside else "at the beginning of a line, beside resources"
            return f"this key stands {where}"
    near = get_close_matches(key, known, 3, 0.4) or known
    return f"there is no such key. Is it {', '.join(near)}?"


def _checked(check: Callable[[], ResultT]) -> ResultT:
    """What ``check`` returns; its InvalidInput as the error that pydantic collects."""
    try:
        return check()
    except InvalidInput as error:
        raise ValueError(str(error)) from None
