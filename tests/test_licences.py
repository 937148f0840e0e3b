import sys
from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from federations import script

licences = script("tools", "licences")
Kind = licences.Kind


class Package(Distribution):
    """An installed distribution with metadata given here."""

    def __init__(self, needs: tuple[str, ...] = (), **fields: str | list[str]) -> None:
        self.fields = [("Requires-Dist", need) for need in needs]
        for name, value in fields.items():
            values = value if isinstance(value, list) else [value]
            self.fields += [(name.replace("_", "-"), item) for item in values]

    def read_text(self, filename: str) -> str | None:
        message = Message()
        for name, value in [("Metadata-Version", "2.4"), ("Version", "1.0"), *self.fields]:
            message[name] = value
        return str(message) if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(str(path))


@pytest.mark.parametrize(
    "licence",
    [
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "BSD 3-Clause License",
        "3-Clause BSD License",
        "BSD, Public Domain",
        "Apache License, Version 2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0",
        "PSF-2.0",
        "ISC License (ISCL)",
        "BSL-1.0",
        "CC-BY-4.0",
        "MIT OR GPL-3.0-or-later",
        "GPL-2.0-only OR Apache-2.0",
        "(GPL-2.0 OR MIT) AND BSD-3-Clause",
        "MIT or GPL",
    ],
)
def test_permissive(licence: str) -> None:
    assert licences.classify(licence) is Kind.PERMISSIVE


@pytest.mark.parametrize(
    "licence",
    [
        "GPL",
        "GPLv3+",
        "LGPL-2.1-only",
        "AGPL-3.0-or-later",
        "GNU General Public License v2 or later (GPLv2+)",
        "GNU Library or Lesser General Public License (LGPL)",
        "SSPL-1.0",
        "EUPL-1.2",
        "CC-BY-SA-4.0",
        "CC BY-NC 4.0",
        "CC-BY-NC-SA-4.0",
        "BUSL-1.1",
        "Other/Proprietary License",
        "MIT AND GPL-3.0",
        "MIT/GPL",
        "MIT AND (GPL-2.0 OR LGPL-2.1)",
    ],
)
def test_copyleft(licence: str) -> None:
    assert licences.classify(licence) is Kind.COPYLEFT


@pytest.mark.parametrize(
    "licence",
    [
        "MPL-2.0",
        "Mozilla Public License 2.0 (MPL 2.0)",
        "MPL-2.0-no-copyleft-exception",
        "EPL-2.0 OR GPL-2.0",
        "MIT AND MPL-2.0",
        "LGPL-2.1 with linking exception",
        "GPL-3.0-or-later WITH GCC-exception-3.1",
    ],
)
def test_weak(licence: str) -> None:
    assert licences.classify(licence) is Kind.WEAK


@pytest.mark.parametrize(
    "licence",
    [
        "",
        "UNKNOWN",
        "see LICENSE",
        "UNLICENSED",
        "submit a request",
        "MIT AND LicenseRef-Foo",
        "GPL-3.0 OR LicenseRef-Foo",
    ],
)
def test_unknown(licence: str) -> None:
    assert licences.classify(licence) is Kind.UNKNOWN


def test_the_expression_comes_first() -> None:
    package = Package(License_Expression="MIT", License="GPL")
    assert licences.licence_of(package) == "MIT"


def test_a_field_that_says_nothing_gives_way_to_the_classifiers() -> None:
    package = Package(
        License="UNKNOWN", Classifier=["License :: OSI Approved", "License :: OSI Approved :: MIT License"]
    )
    assert licences.licence_of(package) == "MIT License"


def test_a_worse_classifier_is_not_hidden_by_the_field() -> None:
    package = Package(License="BSD", Classifier="License :: OSI Approved :: GNU General Public License v3 (GPLv3)")
    assert licences.classify(licences.licence_of(package)) is Kind.COPYLEFT


def test_a_choice_in_the_field_stands_though_classifiers_list_both() -> None:
    classifiers = [
        "License :: OSI Approved :: MIT License",
        "License :: OSI Approved :: GNU General Public License (GPL)",
    ]
    assert (
        licences.classify(licences.licence_of(Package(License="MIT or GPL", Classifier=classifiers))) is Kind.PERMISSIVE
    )


def test_a_package_without_a_licence_is_unknown() -> None:
    assert licences.classify(licences.licence_of(Package())) is Kind.UNKNOWN


def _run(monkeypatch: pytest.MonkeyPatch, packages: dict[str, Package]) -> int:
    def find(name: str) -> Package:
        if name not in packages:
            raise licences.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(licences, "distribution", find)
    monkeypatch.setattr(sys, "argv", ["licences.py", "root"])
    return int(licences.main())


def test_copyleft_deep_in_the_tree_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = {
        "root": Package(("Middle_One>=1",), License="MIT"),
        "middle-one": Package(("deep[fast]; python_version > '3'", "root"), License="MIT"),
        "deep": Package(("faster; extra == 'fast'", "never; extra == 'slow'"), License="BSD"),
        "faster": Package(License="GPLv3"),
    }
    assert _run(monkeypatch, packages) == 1
    assert "faster 1.0: copyleft licence: GPLv3" in capsys.readouterr().out


def test_an_extra_that_is_not_installed_is_named_but_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Package(("absent; extra == 'docs'",), License="MIT", Provides_Extra="docs")
    assert _run(monkeypatch, {"root": root}) == 0
    assert "extra docs: not checked, as not installed: absent" in capsys.readouterr().out


def test_a_missing_core_package_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, {"root": Package(("absent",), License="MIT")}) == 1
    assert "absent: not installed" in capsys.readouterr().out


def test_weak_copyleft_needs_an_entry_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {"root": Package(("certifi",), License="MIT"), "certifi": Package(License="MPL-2.0")}
    other = {"root": Package(("other",), License="MIT"), "other": Package(License="MPL-2.0")}
    changed = {"root": Package(("certifi",), License="MIT"), "certifi": Package(License="GPL-3.0")}
    assert [_run(monkeypatch, packages) for packages in (allowed, other, changed)] == [0, 1, 1]
    assert all(len(reason) > 20 for reason in licences.ALLOWED.values())
