"""torpor.yaml: what it may say, and errors that name file, line and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torpor.shared.errors import InvalidInput
from torpor_cli.torpor_yaml import (
    MOST_BYTES,
    Resources,
    Settings,
    parse,
    path_below,
    read,
)

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "run.md"
WHOLE = """
workspace: mywork
like: base
resources:
  gpu: RTX 4090, L40S
  gpu_count: 2
  disk_gib: 100
  max_price_usd_h: 0.60
  regions: [US, DE]
  spot: allowed
  image: "ours:1"
  cuda: "12.4"
env:
  LR: 1e-3
  COUNT: 010
  DEBUG: no
secrets:
  HF_TOKEN: hugging-face
setup: |
  pip install -r requirements.txt
run: |
  python prepare.py
  python train.py
bring: [outputs/, ./logs/last.txt]
max_hours: 1.5
max_usd: 5
retries: 2
save_minutes: 15
"""


def test_a_whole_file_is_read_with_its_lines() -> None:
    project = parse(WHOLE)
    settings = project.settings
    assert (settings.workspace, settings.like, settings.max_hours) == ("mywork", "base", 1.5)
    assert settings.resources == Resources(
        gpu="RTX 4090, L40S",
        gpu_count=2,
        disk_gib=100,
        max_price_usd_h=0.6,
        regions=["US", "DE"],
        spot="allowed",
        image="ours:1",
        cuda="12.4",
    )
    assert (settings.max_usd, settings.retries) == (5, 2)
    assert settings.setup == "pip install -r requirements.txt\n"
    assert settings.run == "python prepare.py\npython train.py\n"
    assert settings.bring == ["outputs", "logs/last.txt"]
    assert settings.secrets == {"HF_TOKEN": "hugging-face"}
    assert project.at("resources", "spot") == "torpor.yaml, line 10, key resources.spot"


def test_a_variable_is_the_text_that_is_written() -> None:
    """YAML would make a number, an octal number and a no of them."""
    assert parse("env:\n  AT: 1:30\nrun: a:1_0\n").settings.env == {"AT": "1:30"}
    assert parse(WHOLE).settings.env == {"LR": "1e-3", "COUNT": "010", "DEBUG": "no"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "~\n", "run:\nresources:\n"])
def test_what_is_left_out_or_empty_has_its_default(text: str) -> None:
    assert parse(text).settings == Settings()


def test_the_settings_that_are_given_are_told_from_defaults() -> None:
    given = parse("resources:\n  spot: never\n  image:\n").settings.resources
    assert given.model_fields_set == {"spot"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: x\nresourses:\n  gpu: L40S\n", "line 2, key resourses: .* Is it resources"),
        ("resources:\n  gpu: 24 potatoes\n", "line 2, key resources.gpu: .*not understood"),
        ("resources:\n  gpu: L40S\n  spot: yes\n", "line 3, key resources.spot: .*YAML reads yes"),
        ("resources:\n  image: 3.10\n", "line 2, key resources.image: .*YAML reads 3.10 as float"),
        ("resources:\n  disk_gib: much\n", "line 2, key resources.disk_gib"),
        ("resources:\n  disk_gib: .inf\n", "line 2, key resources.disk_gib"),
        ("resources:\n  max_price_usd_h: 0\n", "line 2, key resources.max_price_usd_h"),
        ("resources:\n  gpu_count: 17\n", "line 2, key resources.gpu_count"),
        ("resources:\n  run: x\n", "line 2, key resources.run: this key stands at the beginning"),
        ("run: x\nspot: only\n", "line 2, key spot: this key stands below resources"),
        ("resources:\n  regions:\n    - US\n    - 3\n", r"line 4, key resources.regions\[1\]"),
        ("resources: L40S\n", "line 1, key resources"),
        ("run:\n  - python train.py\n", "line 1, key run: Input should be a valid string"),
        ("run: x\n\nrun: y\n", "line 3, key run: this key is there twice: first in line 1"),
        ("env:\n  A: 1\n  A: 2\n", "line 3, key env.A: this key is there twice"),
        ("env:\n  A:\n", "line 2, key env.A: this variable has no value"),
        ("env:\n  TORPOR_JOB: x\n", "line 1, key env: 'TORPOR_JOB' is no environment variable"),
        ("env:\n  A=B: x\n", "'A=B' is no environment variable"),
        ("env:\n  A: [1]\n", "line 2, key env.A"),
        ("bring: [outputs, ../other]\n", "line 1, key bring: '../other' is no path below"),
        ("workspace: My Work\n", "line 1, key workspace: .*not a workspace name"),
        ("max_hours: 90m\n", "line 1, key max_hours"),
        ("run: x\nmax_hours: 1:30\n", "line 2, key max_hours: YAML reads 1:30 as a number in"),
        (
            "run: x\nretries: 010\n",
            "line 2, key retries: YAML reads 010 as a number in another way",
        ),
        ("max_hours: 01.5\n", "line 1, key max_hours: YAML reads 01.5 as a number in another way"),
        ("retries: 0x1F\n", "line 1, key retries: YAML reads 0x1F as a number in another way"),
        ("retries: 0b11\n", "line 1, key retries: YAML reads 0b11 as a number in another way"),
        ("workspace: 010\n", "line 1, key workspace: .* in another way .* put a text in quotes"),
        ("secrets:\n  A: 3.10\n", "line 2, key secrets.A: .*YAML reads 3.10 as float"),
        ("resources:\n  regions: [NO]\n", r"line 2, key resources.regions\[0\]: .*NO as bool"),
        ("like: 2026-11-30\n", "line 1, key like: .*YAML reads 2026-11-30 as timestamp"),
        ("retries: yes\n", "line 1, key retries: .*valid integer"),
        ("max_usd: on\n", "line 1, key max_usd: .*valid number"),
        ("max_usd: 1_0.5\n", "line 1, key max_usd: YAML reads 1_0.5 as a number in another way"),
        ("resources:\n  gpu_count: 1:2\n", "line 2, key resources.gpu_count: YAML reads 1:2 as"),
        (
            "resources:\n  image: 12:30\n",
            "line 2, key resources.image: .* as a number in .* text in quotes",
        ),
        ("timeout: 2h\n", "line 1, key timeout: .*max_hours"),
        ("budget: 2\n", "line 1, key budget: .*max_usd"),
        ("save_minutes: 0\n", "line 1, key save_minutes"),
        ("max_usd: -1\n", "line 1, key max_usd"),
        ("retries: 1.5\n", "line 1, key retries"),
        ("python train.py\n", "line 1: write keys and their values"),
        ("- a\n", "line 1: write keys and their values"),
        ("setup: |\n  a\nrun: [\n", "line 4, column 1: this is no YAML"),
        ("run:\tx: y\n", "line 1, column .*: this is no YAML"),
        ("run: a\n---\nrun: b\n", "line 2, column 1: this is no YAML"),
        ("run: &a x\nsetup: *a\n", "line 2, key setup: anchors and aliases"),
        ("a: &a [*a]\n", "anchors and aliases"),
        ("{a: {b: {c: {d: {e: {f: {g: {h: {i: {}}}}}}}}}}\n", "nested too deeply"),
        ("? [a]\n: b\n", "a key in line 1 is no text"),
        ("run: !!python/object:os.system x\n", "line 1, column .*: this is no YAML"),
        ("run: \x07\n", "line 1: special characters are not allowed"),
        ("[" * 20_000, "nested too deeply"),
    ],
)
def test_a_fault_names_file_line_and_key(text: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=rf"(?s)^torpor\.yaml.*{says}"):
        parse(text)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(
        InvalidInput, match=r"^torpor.yaml, line 1, key runn: .*; torpor.yaml, line 3, key"
    ):
        parse("runn: x\nresources:\n  spot: sometimes\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("envs:\n  A: 1\n", "line 1, key envs: .*Here it is env"),
        ("num_nodes: 2\n", "torpor job run --nodes"),
        ("accept_secrets: ['*']\n", "the option --accept-secret alone"),
        ("resources:\n  accelerators: L40S\n", "line 2, .*Here it is gpu, in resources"),
        ("resources:\n  use_spot: true\n", "Here it is spot"),
        ("commands:\n  - python train.py\n", "Here it is run"),
        ("type: task\n", "`run` is a job"),
    ],
)
def test_keys_of_skypilot_and_dstack_are_answered_with_the_one_of_torpor(
    text: str, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        parse(text)


def test_no_value_of_a_variable_is_in_an_error() -> None:
    with pytest.raises(InvalidInput) as refused:
        parse("env:\n  TOKEN: [hunter2]\nsecrets: hunter2\n")
    assert "hunter2" not in str(refused.value)


def test_resources_are_settings_of_a_workspace_with_the_same_defaults() -> None:
    from blocks import Workspace

    ours = {name: field.default for name, field in Resources.model_fields.items()}
    block = Workspace(name="mywork")
    assert ours == {name: getattr(block, name) for name in ours}


@pytest.mark.parametrize("path", ["", ".", "/etc", "~", "~/x", "..", "a/../../b", "a\0b"])
def test_only_paths_below_the_folder_are_brought(path: str) -> None:
    with pytest.raises(InvalidInput, match="no path below the folder"):
        path_below(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"other\.yaml cannot be read: No such file"):
        read(tmp_path / "other.yaml", "other.yaml")
    with pytest.raises(InvalidInput, match="cannot be read: Is a directory"):
        read(tmp_path)
    file = tmp_path / "torpor.yaml"
    file.write_bytes(b"run: x\nenv:\n  A: \xff\n")
    with pytest.raises(InvalidInput, match=r"torpor\.yaml, line 3: this is no text in UTF-8"):
        read(file)
    file.write_bytes(b"#" * (MOST_BYTES + 1))
    with pytest.raises(InvalidInput, match="more than 1024 KiB"):
        read(file)
    file.write_bytes(b"\xef\xbb\xbfrun: python train.py\r\n")
    assert read(file).settings.run == "python train.py"


def test_the_guide_names_every_key_and_its_examples_are_true() -> None:
    text = GUIDE.read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert parse(example).settings.bring == ["outputs"]
    rows = "".join(re.findall(r"^\| `.*\|$", text, re.MULTILINE))
    keys = {*Settings.model_fields, *Resources.model_fields}
    assert {key for key in keys if f"`{key}`" not in rows} == set()
    said = "resources:\n  gpu: L40S\n  spot: yes\n\nenvs:\n  A: 1\n"
    with pytest.raises(InvalidInput) as refused:
        parse(said)
    assert f"torpor: {refused.value}\n" in text
