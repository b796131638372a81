"""Packages of apt and pip outside of the workspace: which are named, and how they come back."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fixtures.images import Image, put_wheels
from torpor.machine.agent import packages
from torpor.machine.agent.packages import note_wanted, packages_to_record, put_back
from torpor.shared.errors import RunCancelled
from torpor.shared.format.packages import Packages, packages_in
from torpor.shared.wire.packages import NotBack, PackagesBack

# what apt-get of Debian 12 prints in an image of a container, shortened
GCC = """\
0 upgraded, 82 newly installed, 0 to remove and 0 not upgraded.
Inst cpp (4:12.2.0-3 Debian:12.15/oldstable [amd64])
Inst libc-dev-bin (2.36-9+deb12u14 Debian:12.15/oldstable [amd64])
Inst linux-libc-dev (6.1.176-1 Debian:12.15/oldstable [amd64])
Inst libc6-dev (2.36-9+deb12u14 Debian:12.15/oldstable [amd64])
Inst gcc (4:12.2.0-3 Debian:12.15/oldstable [amd64])
Conf gcc (4:12.2.0-3 Debian:12.15/oldstable [amd64])
"""
FFMPEG = """\
Inst libdbus-1-3 (1.14.10-1~deb12u1 Debian:12.15/oldstable [amd64])
Inst dbus-daemon (1.14.10-1~deb12u1 Debian:12.15/oldstable [amd64])
Inst dbus-system-bus-common (1.14.10-1~deb12u1 Debian:12.15/oldstable [all])
Inst dbus (1.14.10-1~deb12u1 Debian:12.15/oldstable [amd64])
Inst ffmpeg (7:5.1.9-0+deb12u1 Debian:12.15/oldstable [amd64])
"""
DBUS = """\
2 upgraded, 5 newly installed, 0 to remove and 0 not upgraded.
Inst libdbus-1-3 (1.14.10-1~deb12u1 Debian:12.15/oldstable [amd64])
Inst dbus-bin [1.14.8-2] (1.14.10-1~deb12u1 Debian:12.15/oldstable [amd64])
Inst dbus (1.14.10-1~deb12u1 Debian:12.15/oldstable [amd64])
"""
XFCE4 = """\
Inst initramfs-tools-core (0.142+deb12u3 Debian:12.15/oldstable [all])
Inst initramfs-tools (0.142+deb12u3 Debian:12.15/oldstable [all])
Inst xfce4 (4.18 Debian:12.15/oldstable [all])
"""
UNREACHED = """cat <<'end'
Err:1 http://deb.debian.org/debian bookworm InRelease
  Temporary failure resolving 'deb.debian.org'
Reading package lists...
W: Failed to fetch http://deb.debian.org/debian/dists/bookworm/InRelease  Temporary failure \
resolving 'deb.debian.org'
W: Some index files failed to download. They have been ignored, or old ones used instead.
end
"""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Image:
    """One whose apt-get comes first in PATH, and whose pip reaches local wheels alone."""
    made = Image(tmp_path / "image")
    monkeypatch.setenv("PATH", f"{made.programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return made


def _nothing() -> None:
    """The request is not cancelled."""


def _cancelled() -> None:
    raise RunCancelled("the wake was cancelled")


def test_what_was_asked_for_is_recorded_and_what_came_with_it_or_is_gone_is_not(
    image: Image, tmp_path: Path
) -> None:
    for name in ("jq", "libjq1"):
        image.has(name, "1.6-2.1")
    with (image.folder / "var/lib/dpkg/status").open("a") as status:  # its settings stay
        status.write("Package: removed\nStatus: deinstall ok config-files\nVersion: 1\n\n")
    states = image.folder / "var/lib/apt/extended_states"
    states.parent.mkdir()
    states.write_text("Package: libjq1\nAuto-Installed: 1\n")
    image.has_of_pip("Typing_Thing", "1.0")
    image.has_of_pip("mine", "2.0", by_file=True)
    image.has_of_pip("~aside", "1.0")  # as a killed pip leaves it
    record = image.place / "of_conda-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Name: of_conda\nVersion: 1.0\n")
    (record / "INSTALLER").write_text("conda\n")
    found = packages_to_record(tmp_path, image.system())
    assert found == Packages({"jq": "1.6-2.1"}, {"typing-thing": "1.0"}, {"mine": "2.0"})
    assert packages_in(found.record()) == found
    assert "aside" not in image.system().pip()
    assert packages_to_record(tmp_path, image.system(image=None)) == Packages()


def test_what_was_upgraded_since_the_agent_first_started_is_not_recorded(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "this_system", lambda home: image.system())
    image.has("linux-image-gcp", "6.1")
    image.has_of_pip("torch", "2.4")
    packages.note_image(tmp_path)
    status = image.folder / "var/lib/dpkg/status"
    status.write_text(status.read_text().replace("6.1", "6.2"))
    shutil.rmtree(image.place / "torch-2.4.dist-info")
    image.has_of_pip("torch", "2.5")
    image.has("jq", "1.6")
    packages.note_image(tmp_path)  # a later start of the agent changes nothing
    monkeypatch.undo()
    came_with = packages.this_system(tmp_path).image
    assert packages_to_record(tmp_path, image.system(image=came_with)) == Packages({"jq": "1.6"})


def test_what_belongs_to_an_image_is_never_installed_nor_by_what_needs_it(image: Image) -> None:
    names = [
        "cloud-init", "google-guest-agent", "grub-efi-amd64-signed", "linux-image-gcp",
        "netplan.io", "nvidia-driver-535", "openssh-server", "systemd-resolved", "walinuxagent",
    ]  # fmt: skip
    versions = dict.fromkeys([*names, "cuda", "jq"], "1.0")
    image.offers(**versions)
    image.plans("cuda", "Inst cuda-drivers (1)\nInst cuda (1)\n")
    answer = put_back(image.system(), Packages(versions), _nothing)
    why = "belongs to the image of a machine, and torpor never installs it"
    assert answer.back == ["jq 1.0 (apt)"]
    assert [(one.why, one.names) for one in answer.not_back] == [
        (why, names),
        (f"it needs cuda-drivers, which {why}", ["cuda"]),
    ]
    assert image.system().apt() == {"jq": "1.0"}


def test_what_a_container_lacks_is_added_and_what_an_image_runs_by_is_not_changed(
    image: Image,
) -> None:
    versions = {"dbus": "1.14.10-1~deb12u1", "ffmpeg": "7:5.1.9-0+deb12u1", "gcc": "4:12.2.0-3"}
    image.offers(**versions)
    image.plans("gcc", GCC)
    image.plans("ffmpeg", FFMPEG)
    image.plans("dbus", DBUS)
    answer = put_back(image.system(), Packages(versions), _nothing)
    assert answer.back == ["ffmpeg 7:5.1.9-0+deb12u1 (apt)", "gcc 4:12.2.0-3 (apt)"]
    (missing,) = answer.not_back
    assert missing.names == ["dbus"]
    assert missing.why == "it needs another version of dbus-bin than the image has"


def test_what_only_recommends_a_package_of_an_image_comes_without_it(image: Image) -> None:
    image.offers(xfce4="4.18", jq="1.6")
    image.plans("xfce4", XFCE4, without="Inst xfce4 (4.18 Debian:12.15/oldstable [all])\n")
    answer = put_back(image.system(), Packages({"xfce4": "4.18", "jq": "1.6"}), _nothing)
    assert (answer.back, answer.not_back) == (["xfce4 4.18 (apt)", "jq 1.6 (apt)"], [])
    lines = [line for line in image.asked() if " install " in line and "simulate" not in line]
    assert [" --no-install-recommends " in line for line in lines[-4:]] == [True] * 2 + [False] * 2


@pytest.mark.parametrize(
    "name",
    ["google-cloud-cli", "google-chrome-stable", "cloud-image-utils", "iptables", "dbus",
     "amazon-ecr-credential-helper", "ec2-api-tools", "linux-libc-dev", "linux-perf"],
)  # fmt: skip
def test_what_a_user_needs_is_not_taken_for_an_images_own(name: str) -> None:
    assert not packages.is_of_the_image(name)


def test_pip_has_its_time_from_when_apt_is_done(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dpkg is not ended, and takes an hour."""
    image.offers(jq="1.6", tree="2.1")
    (image.folder / "broken").write_text("tree\n")  # so that one goes before the other
    put_wheels(tmp_path / "wheels", {"wanted": "1.5"})

    def monotonic() -> float:
        return time.monotonic() + (3600.0 if "jq" in image.system().apt() else 0.0)

    monkeypatch.setattr(packages, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    wanted = Packages({"jq": "1.6", "tree": "2.1"}, {"wanted": "1.5"})
    answer = put_back(image.system(), wanted, _nothing)
    assert answer.back == ["jq 1.6 (apt)", "wanted 1.5 (pip)"]
    late = "the 400 s that torpor takes for packages of apt were over"
    assert answer.not_back == [NotBack("apt", late, ["tree"], 1)]


def test_what_pip_replaced_of_the_machine_is_named(image: Image, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    put_wheels(wheels, {"torch": "2.5"})
    pip = [image.system().python, "-m", "pip", "install", "-q", "--no-deps", "torch==2.5"]
    subprocess.run(pip, check=True)
    put_wheels(wheels, {"torch": "2.4"})
    put_wheels(wheels, {"xformers": "1.0"}, requires="torch==2.4")
    answer = put_back(image.system(), Packages(pip={"xformers": "1.0"}), _nothing)
    assert answer.other == ["torch 2.4 instead of the machine's 2.5 (pip)"]


def test_a_byte_that_is_no_text_keeps_no_agent_from_starting(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "this_system", lambda home: image.system())
    with (image.folder / "var/lib/dpkg/status").open("ab") as status:
        status.write(b"Package: odd\nStatus: install ok installed\nVersion: 1\xff\n\n")
    packages.note_image(tmp_path)
    assert packages_to_record(tmp_path, image.system()) == Packages()


def test_dpkg_that_was_interrupted_goes_on_first(image: Image) -> None:
    image.offers(jq="1.6")
    (image.folder / "var/lib/dpkg/updates/0001").touch()
    assert put_back(image.system(), Packages({"jq": "1.6"}), _nothing).back == ["jq 1.6 (apt)"]
    assert image.asked()[0] == "dpkg --configure -a"


def test_a_lock_of_the_first_boot_is_waited_for(image: Image) -> None:
    image.offers(jq="1.6")
    (image.folder / "locked").touch()
    assert put_back(image.system(), Packages({"jq": "1.6"}), _nothing).back == ["jq 1.6 (apt)"]
    assert sum(" update" in line for line in image.asked()) == 2
    lines = [line for line in image.asked() if "install" in line]
    assert all(int(line.split("Lock::Timeout=")[1].split()[0]) > 300 for line in lines)


def test_a_version_that_does_not_fit_is_installed_in_another(image: Image) -> None:
    image.offers(jq="1.6", tree="2.1")
    image.offers(tree="2.0")
    (image.folder / "unfit").write_text("tree=2.0\n")
    wanted = Packages({"jq": "1.6", "tree": "2.0"})
    answer = put_back(image.system(), wanted, _nothing)
    assert answer.back == ["jq 1.6 (apt)"]
    assert answer.other == ["tree 2.1 instead of 2.0 (apt)"]


def test_where_the_sources_do_not_answer_it_is_not_known_whether_they_have_a_package(
    image: Image,
) -> None:
    image.offers(jq="1.6")
    (image.folder / "update").write_text(UNREACHED)
    answer = put_back(image.system(), Packages({"jq": "1.6", "tree": "2.1"}), _nothing)
    assert answer.back == ["jq 1.6 (apt)"]  # of a source that answered
    (missing,) = answer.not_back
    assert missing.why == (
        "whether a package source of this machine has it is not known: apt-get update says: Failed "
        "to fetch http://deb.debian.org/debian/dists/bookworm/InRelease Temporary failure "
        "resolving 'deb.debian.org'"
    )


def test_a_package_of_another_name_than_a_fault_keeps_no_other_away(
    image: Image, tmp_path: Path
) -> None:
    put_wheels(tmp_path / "wheels", {"wanted": "1.5"})
    wanted = Packages(pip={"db-connection": "1.0", "wanted": "1.5"})
    answer = put_back(image.system(), wanted, _nothing)
    assert answer.back == ["wanted 1.5 (pip)"]
    (missing,) = answer.not_back
    assert missing.why == "pip's index has no wheel of this version for this machine"


def test_a_cancelled_pip_that_has_begun_to_install_comes_to_its_end(
    image: Image, tmp_path: Path
) -> None:
    """A package of the image, which the wanted one needs in another version, is not lost."""
    wheels = tmp_path / "wheels"
    put_wheels(wheels, {"big": "1.0"})
    put_wheels(wheels, {"wanted": "1.5"}, requires="big==2.0")
    pip = [image.system().python, "-m", "pip", "install", "-q", "--no-deps", "big==1.0"]
    subprocess.run(pip, check=True)
    put_wheels(wheels, {"big": "2.0"})
    with zipfile.ZipFile(wheels / "big-2.0-py3-none-any.whl", "a") as wheel:
        for number in range(3000):
            wheel.writestr(f"big_files/{number}.py", "")

    def check() -> None:
        if not (image.place / "big-1.0.dist-info").exists():
            raise RunCancelled("the wake was cancelled")

    with pytest.raises(RunCancelled):
        put_back(image.system(), Packages(pip={"wanted": "1.5"}), check)
    pip_has = image.system().pip()
    assert (pip_has["big"], pip_has["wanted"]) == ("2.0", "1.5")  # the last one, too


def test_dpkg_is_not_ended_in_the_middle(image: Image) -> None:
    image.offers(jq="1.6")
    program = image.programs / "apt-get"
    install = program.read_text().replace("name=${asked%%=*}\n", "sleep 0.5\n", 1)
    program.write_text(install.replace("sleep 0.5", f"touch {image.folder}/begun; sleep 0.5; "
                                       "name=${asked%%=*}"))  # fmt: skip

    def check() -> None:
        if (image.folder / "begun").exists():
            raise RunCancelled("the wake was cancelled")

    with pytest.raises(RunCancelled):
        put_back(image.system(), Packages({"jq": "1.6"}), check)
    assert image.system().apt() == {"jq": "1.6"}


def test_no_name_is_lost_where_each_has_a_reason_of_its_own(image: Image) -> None:
    names = [f"odd{number:02d}" for number in range(25)]
    image.offers(**dict.fromkeys(names, "1.0"))
    (image.folder / "broken").write_text("\n".join(names))
    answer = put_back(image.system(), Packages(dict.fromkeys(names, "1.0")), _nothing)
    assert sum(one.count for one in answer.not_back) == 25
    assert len(answer.not_back) == 20
    assert answer.not_back[-1].names == names[19:]


def test_packages_come_back_and_one_that_cannot_keeps_no_other_away(
    image: Image, tmp_path: Path
) -> None:
    """pip is a real one, with a local wheel."""
    image.offers(jq="1.6-2.1", tree="2.1.1", htop="3.2")
    (image.folder / "broken").write_text("htop\n")
    put_wheels(tmp_path / "wheels", {"wanted": "1.5"})
    wanted = Packages(
        {"jq": "1.6-2.1", "tree": "2.0.0", "htop": "3.2", "python3.11": "3.11.2"},
        {"wanted": "1.5", "nowhere": "3.0"},
        {"mine": "2.0"},
    )
    answer = put_back(image.system(), wanted, _nothing)
    assert answer == PackagesBack(
        ["jq 1.6-2.1 (apt)", "wanted 1.5 (pip)"], 2,
        ["tree 2.1.1 instead of 2.0.0 (apt)"], 1,
        [
            NotBack("apt", "htop has a broken script", ["htop"], 1),
            NotBack("apt", "no package source of this machine has it", ["python3.11"], 1),
            NotBack("pip", "pip had it from a file, a folder or an address, and no index has to "
                    "have it; install it from there", ["mine"], 1),
            NotBack("pip", "pip's index has no wheel of this version for this machine",
                    ["nowhere"], 1),
        ],
    )  # fmt: skip
    python = image.folder / "python/bin/python"
    code = "import wanted; print(wanted.version)"
    assert subprocess.check_output([python, "-c", code], text=True) == "1.5\n"
    assert not any("python3.11" in line for line in image.asked())  # else an expression
    assert all("--no-remove" in line for line in image.asked() if " install " in line)
    asked = len(image.asked())
    (image.folder / "broken").write_text("")
    again = put_back(image.system(), Packages({"jq": "1.6-2.1"}, {"wanted": "1.5"}), _nothing)
    assert again == PackagesBack([], 0, [], 0, [])
    assert len(image.asked()) == asked


@pytest.mark.parametrize(
    "lacks",
    ["root", "apt-get", "lock", "pip", "leave", "room",
     "time", "time for sudo", "time for update", "time for pip"],
)  # fmt: skip
def test_a_machine_that_can_install_nothing_says_why(
    image: Image, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    image.offers(jq="1.6", tree="2.0")
    system, within_s = image.system(), 600.0
    wanted = Packages({"jq": "1.6", "tree": "2.0"})
    program = image.programs / "apt-get"
    if lacks == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        (image.folder / "no-sudo").touch()
        why = "its user is not root and may not use sudo without a password"
    elif lacks == "apt-get":
        monkeypatch.setenv("PATH", str(image.folder))
        why = "this machine has no apt-get"
    elif lacks == "lock":
        why = "Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7"
        text = "#!/bin/sh\necho x >>{0}/asked\ncase $* in *update*) exit 0 ;; esac\necho 'E: {1}'\n"
        program.write_text(text.format(image.folder, why) + "exit 100\n")
    elif lacks == "pip":
        shutil.rmtree(image.place / "pip")
        wanted = Packages(pip={"jq": "1.6", "tree": "2.0"})
        why = f"the machine's Python, {system.python}, has no pip"
    elif lacks == "room":
        usage = shutil.disk_usage("/")._replace(free=1 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        why = "less than 64 MiB are free on the machine's disk"
    elif lacks == "leave":
        why = "torpor installs nothing on a machine of your own"
        system = image.system(why_not=why)
    elif lacks == "time for update":
        (image.folder / "archive").write_text("")
        (image.folder / "update").write_text("exec sleep 1000")
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0 * len(image.asked()))
        monkeypatch.setattr(packages, "time", clock)
        why = "the 400 s that torpor takes for packages of apt were over"
    else:
        within_s = 0.0
        why = "the 0 s that torpor takes for packages of apt were over"
        if lacks == "time for sudo":
            monkeypatch.setattr(os, "geteuid", lambda: 1000)
        elif lacks == "time for pip":
            wanted = Packages(pip={"jq": "1.6", "tree": "2.0"})
            why = why.replace("apt", "pip")
    answer = put_back(system, wanted, _nothing, within_s)
    kind = "pip" if wanted.pip else "apt"
    assert answer.back == answer.other == []
    (missing,) = answer.not_back
    assert (missing.kind, missing.names) == (kind, ["jq", "tree"])
    assert missing.why == why
    if lacks == "lock":  # each further try would wait for the lock
        assert len(image.asked()) == 2


def test_a_cancelled_request_ends_the_program_that_runs(image: Image) -> None:
    (image.programs / "apt-get").write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(RunCancelled):
        put_back(image.system(), Packages({"jq": "1.6"}), _cancelled)


@pytest.mark.parametrize("name", ["bash-", "-o=x", "a b", "x;reboot", "jq=1", "^a", "a*", "é1", ""])
def test_a_name_that_is_no_package_is_given_to_no_program(name: str) -> None:
    record = {"apt": {name: "1.0", "jq": "1.6"}, "pip": {name: "1.0"}, "files": {}}
    assert packages_in({"added_packages": record}) == Packages({"jq": "1.6"})
    record = {"apt": {"jq": name}, "pip": {"jq": name}, "files": {}}
    if name != "bash-":  # of a version, a hyphen removes nothing
        assert packages_in({"added_packages": record}) == Packages()


@pytest.mark.parametrize("record", [None, [], {"apt": 1}, {"apt": {"jq": 1}}])
def test_a_record_of_another_form_names_nothing(record: object) -> None:
    assert packages_in({"added_packages": record}) == Packages()


def test_what_did_not_come_back_is_named_again_and_what_a_user_removed_is_not(
    image: Image, tmp_path: Path
) -> None:
    image.has("jq", "1.7")  # as the image brought it, so that only the wake says that it is wanted
    machine = image.system(image=Packages({"jq": "1.6"}))
    wanted = Packages({"jq": "1.6", "tree": "2.0"}, {"gone": "1.0"}, {"mine": "2.0"})
    note_wanted(tmp_path, machine, wanted)
    kept = Packages({"jq": "1.7", "tree": "2.0"}, wanted.pip, wanted.files)
    assert packages_to_record(tmp_path, machine) == kept
    (image.folder / "var/lib/dpkg/status").write_text("")
    kept = Packages({"tree": "2.0"}, wanted.pip, wanted.files)
    assert packages_to_record(tmp_path, machine) == kept
