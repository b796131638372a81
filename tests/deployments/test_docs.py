"""The documents are true: files, tests, links, commands and examples exist as quoted."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from cyclopts import CycloptsError
from prefect.utilities.callables import parameter_schema

import flows
from deployments.installation import Installation
from tests.deployments.test_every_deployment import STAGES
from tests.rules import RULES, described, marked, rules
from torpor.control.own_server import LOGIN_VARIABLE
from torpor_cli.app import app

PROJECT: Final = Path(__file__).resolve().parents[2]
README: Final = PROJECT / "README.md"
GUIDE: Final = sorted((PROJECT / "docs" / "guide").rglob("*.md"))
GUIDE_OF_MARKETS: Final = PROJECT / "docs" / "guide" / "markets"
QUICK_START: Final = PROJECT / "docs" / "guide" / "quick-start.md"
COMMANDS: Final = PROJECT / "docs" / "guide" / "commands.md"
TROUBLE: Final = PROJECT / "docs" / "guide" / "troubleshooting.md"
SAFETY: Final = PROJECT / "docs" / "safety.md"
PYTHON: Final = [PROJECT / "docs" / "api.md", PROJECT / "docs" / "blocks.md"]
EXAMPLES: Final = sorted((PROJECT / "examples").rglob("*.md"))
PAGES: Final = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md"), *EXAMPLES])

SUBJECTS: Final = {"machines", "jobs", "snapshots", "upkeep", "measuring"}
"""The tags of deployments; each has exactly one."""


def _name(page: object) -> str:
    return str(page.relative_to(PROJECT)) if isinstance(page, Path) else str(page)


def test_each_safety_rule_has_tests_and_each_mark_has_its_rule() -> None:
    numbers = [rule.number for rule in rules()]
    plain = [number for number in numbers if not number.startswith("H")]
    assert plain == [str(number) for number in range(1, len(plain) + 1)]
    assert numbers[len(plain) :] == [f"H{n}" for n in range(1, len(numbers) - len(plain) + 1)]
    marks = {number: one.test for one in marked() for number in one.numbers}
    assert [number for number in numbers if number not in marks] == []
    assert {number: test for number, test in marks.items() if number not in numbers} == {}


def test_the_promises_to_users_name_each_safety_rule() -> None:
    named = [
        number
        for brackets in re.findall(r"\(rules? ([^)]+)\)|, rule (\d+)\)", SAFETY.read_text())
        for number in re.findall(r"H?\d+", " ".join(brackets))
    ]
    numbers = {rule.number for rule in rules()}
    assert {one for one in numbers if not one.startswith("H")} <= set(named) <= numbers


def test_what_enforces_a_safety_rule_is_there() -> None:
    """Each rule names a file, and in brackets behind it functions or classes of that file."""
    named = [(rule.number, *one) for rule in rules() for one in rule.enforced]
    assert {rule.number for rule in rules()} == {number for number, _, _ in named}
    assert [(number, path) for number, path, _ in named if not (PROJECT / path).exists()] == []
    missing = [
        f"{path} ({name})"
        for _, path, names in named
        for name in names
        if not re.search(rf"(?:def|class) {name.rpartition('.')[2]}\b", _text(PROJECT / path))
    ]
    assert missing == []


def test_the_page_of_the_rules_shows_what_the_command_prints() -> None:
    (number, output) = re.findall(
        r"^\$ \.venv/bin/python -m tests\.rules (\w+)\n(.*?)```", RULES.read_text(), re.M | re.S
    )[0]
    assert output.rstrip() == described(number)


def test_the_messages_that_troubleshooting_explains_are_those_of_the_code() -> None:
    product = [
        _text(path)
        for room in ("torpor", "tasks", "flows", "deployments", "torpor_cli")
        for path in (PROJECT / room).rglob("*.py")
    ]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(product))
    blocks = re.findall(r"```\n(.*?)```", TROUBLE.read_text(), re.DOTALL)
    messages = [one for one in blocks if not one.startswith(("torpor ", "timedatectl "))]
    pieces = [
        piece.strip(" .:;,()")
        for one in messages
        for piece in re.split(r"\.\.\.|\n|\([A-Z]\w+\)|\S*\d\S*|MYWORK", one)
    ]
    long = [piece for piece in pieces if len(piece) > 12]
    assert len(messages) > 12 and len(long) > 20
    assert [piece for piece in long if piece not in code] == []


def test_the_guide_lists_the_kinds_of_alerts_that_the_code_sends() -> None:
    code = "".join(_text(path) for path in (PROJECT / "torpor" / "control" / "alerts").glob("*.py"))
    page = (PROJECT / "docs" / "guide" / "unattended.md").read_text()
    table = page.partition("| about | kinds |")[2].partition("\n\n")[0]
    assert {*re.findall(r'kind="([a-z ]+)"', code)} == {*re.findall(r"`([a-z ]+)`", table)}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        there = page.parent / path if path else page
        if not there.exists() or (heading and heading not in _anchors(there)):
            broken.append(target)
    assert broken == []


def test_every_page_is_linked_from_the_readme_or_from_a_page_that_is() -> None:
    found, left = {README}, [README]
    while left:
        page = left.pop()
        linked = {
            (page.parent / target.partition("#")[0]).resolve()
            for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        }
        new = {target for target in linked if target.suffix == ".md"} - found
        found |= new
        left += new
    assert [_name(page) for page in PAGES if page not in found] == []


@pytest.mark.parametrize("page", sorted(GUIDE_OF_MARKETS.glob("*.md")), ids=_name)
def test_each_market_says_what_its_key_may_do(page: Path) -> None:
    """And links to each file of permissions that is named after it."""
    text = page.read_text()
    assert re.search(
        r"^(?:\* \*\*Permissions\.|\| Permissions \||## Permissions$)", text, re.MULTILINE
    )
    policies = {file.name for file in (GUIDE_OF_MARKETS / "policies").glob(f"{page.stem}[.-]*")}
    assert policies == {*re.findall(r"\]\(policies/([\w.-]+)\)", text)}


@pytest.mark.parametrize("page", [README, PROJECT / "CONTRIBUTING.md", *GUIDE], ids=_name)
def test_named_make_targets_are_there(page: Path) -> None:
    makefile = (PROJECT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.MULTILINE)
    assert named or page not in (README, QUICK_START)
    assert set(named) <= targets


def test_the_first_steps_are_those_that_ci_and_the_first_click_run() -> None:
    """`make demo` and `make test` in CI; `make up`, the login and `make down` in the browser; the
    same commands of the wheel at the front door."""
    text = README.read_text()
    assert re.findall(r"^make (\w+)", text, re.MULTILINE) == ["demo", "test"]
    assert {"demo", "up", "down"} <= {command.split()[1] for command in _commands(README)}
    files = ("ui/test_first_click.py", "fixtures/newcomer.py")
    click = "".join((PROJECT / "tests" / file).read_text() for file in files)
    assert all(f'make("{step}"' in click for step in ("up", "down"))
    login = Installation(Path("~/.local/state/torpor")).login_file
    unattended = (PROJECT / "docs" / "guide" / "unattended.md").read_text()
    assert f'{LOGIN_VARIABLE}="$(cat {login})"' in unattended


@pytest.mark.parametrize("page", [README, SAFETY, *PYTHON, *GUIDE, *EXAMPLES], ids=_name)
def test_commands_of_torpor_parse(page: Path) -> None:
    """Each command of a block of code, and each in a sentence, is one that the real app accepts."""
    wrong = [line for line in _commands(page) if not _parses(shlex.split(line, comments=True)[1:])]
    assert wrong == []


def test_commands_are_found_and_wrong_ones_are_refused() -> None:
    assert len(_commands(README)) >= 6
    assert _parses(["hibernate", "mywork", "--keep"])
    assert not _parses(["hibernate", "mywork", "--kept"])
    assert not _parses(["hibernates", "mywork"])


def test_the_trainjob_of_the_guide_runs_a_command_that_parses() -> None:
    runtime, job = yaml.safe_load_all((PROJECT / "examples/two-nodes/trainjob.yaml").read_text())
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    argv = [*container["command"], *job["spec"]["trainer"]["args"]]
    assert argv[:3] == ["tini", "--", "torpor"] and _parses(argv[3:])


@pytest.mark.parametrize("page", [README, *PYTHON, *GUIDE], ids=_name)
def test_examples_call_what_exists(page: Path) -> None:
    """Each example parses and imports what it uses; what it imports is there; functions and blocks
    know its keywords."""
    known: dict[str, Any] = {}
    wrong: list[tuple[str, set[str | None]]] = []
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert examples or page not in (README, QUICK_START)
    for example in examples:
        tree = ast.parse(example.replace("    ...,\n", ""))
        wrong += [("not imported", {name}) for name in sorted(_read(tree) - _bound(tree))]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module or "")
                known |= {alias.name: getattr(module, alias.name) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                callee = known.get(node.func.id)
                unknown = {keyword.arg for keyword in node.keywords} - _parameters(callee)
                if callee is not None and unknown:
                    wrong.append((node.func.id, unknown))
    assert wrong == []


def test_the_table_of_commands_names_calls_and_deployments_that_are_there() -> None:
    rows = re.findall(r"^\| [a-z ,]+ \|.*\|$", COMMANDS.read_text(), re.MULTILINE)
    cells = [row.strip("|").split(" | ") for row in rows]
    calls = [call for row in cells for call in re.findall(r"`(\w+\([^`]*\))`", row[-1])]
    assert len(calls) > 20
    assert [call for call in calls if not hasattr(flows, call.partition("(")[0])] == []
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    names = {deployment["name"] for deployment in deployments}
    found = {name for row in cells for name in re.findall(r"`([^`]+)`", row[2])}
    assert found - {"destroy"} == names


def test_the_deployments_that_programs_start_in_the_docs_are_there() -> None:
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    names = {
        f"{one['entrypoint'].rpartition(':')[2].replace('_', '-')}/{one['name']}"
        for one in deployments
    }
    text = "".join(page.read_text() for page in sorted((PROJECT / "docs").rglob("*.md")))
    started = re.findall(r"""run_deployment\(\s*["']([^"']+)["']""", text)
    assert started
    assert {*started} <= names


def test_every_deployment_has_a_run_in_the_test_of_all() -> None:
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    planned = {name.rpartition("/")[2] for stage in STAGES for name in stage}
    assert planned == {deployment["name"] for deployment in deployments}


def test_each_deployment_has_one_subject_and_a_description() -> None:
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    for deployment in deployments:
        assert deployment["tags"][0] == "torpor", deployment["name"]
        assert len(SUBJECTS & set(deployment["tags"])) == 1, deployment["name"]
        assert deployment["description"].strip(), deployment["name"]
    assert {tag for deployment in deployments for tag in deployment["tags"][1:]} == SUBJECTS


def test_every_field_of_a_form_says_what_it_means() -> None:
    """Forms are the only list of all settings. Prefect's suite asks the same of blocks."""
    deployments = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    fields = [
        (name, field, said.get("description", "").strip())
        for name in sorted({deployment["entrypoint"].split(":")[1] for deployment in deployments})
        for field, said in parameter_schema(getattr(flows, name)).properties.items()
    ]
    assert len(fields) > 100
    assert [(name, field) for name, field, description in fields if not description] == []


def _commands(page: Path) -> list[str]:
    """The lines that a reader may type which begin with `torpor`."""
    text = page.read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    fenced = "".join(block for language, block in blocks if not language)
    lines = re.findall(r"^(?:\$ )?(torpor .+)$", fenced, re.MULTILINE)
    sentences = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return lines + re.findall(r"`(torpor [^`]+)`", " ".join(sentences.split()))


def _parses(arguments: list[str]) -> bool:
    if arguments[-1] == "--help":
        arguments = arguments[:-1]
        return not arguments or arguments[0] in app
    if arguments in ([name] for name in app) or arguments in (["job", name] for name in app["job"]):
        return True  # a sentence about the command
    try:
        app.parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError:
        return False
    return True


def _text(path: Path) -> str:
    """Of a file, or of all tests in a folder."""
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return "\n".join(file.read_text() for file in files)


def _anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def _read(tree: ast.AST) -> set[str]:
    """The names that an example reads."""
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {node.id for node in names if isinstance(node.ctx, ast.Load)}


def _bound(tree: ast.AST) -> set[str]:
    """The names that an example imports or assigns, and Python's own."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    names |= {node.id for node in stores if isinstance(node.ctx, ast.Store)}
    handlers = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    names |= {handler.name for handler in handlers if handler.name}
    return names | set(dir(builtins))


def _parameters(callee: Any) -> set[str]:
    return set(inspect.signature(getattr(callee, "fn", callee)).parameters) if callee else set()
