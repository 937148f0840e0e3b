"""List the licences of all we depend on, as packages declare them; exit 1 if one is copyleft or unknown."""

import argparse
import re
import sys
from collections.abc import Iterator
from enum import IntEnum
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class Kind(IntEnum):
    """What a licence asks of us; of licences that hold together the largest counts, of alternatives the smallest."""

    PERMISSIVE = 0
    WEAK = 1
    UNKNOWN = 2
    COPYLEFT = 3


# Copyleft that ends at the file or has a linking exception: only for packages that we use unmodified and do not ship.
ALLOWED = {
    "certifi": "MPL-2.0: root certificates, used unmodified by the HTTP clients of Flower, not shipped",
    "hypothesis": "MPL-2.0: runs tests only, used unmodified, not shipped",
    "pathspec": "MPL-2.0: used unmodified by mypy, MkDocs and Flower, not shipped",
}

_WORDS = {
    Kind.COPYLEFT: r"[al]?gpl|general public|affero|sspl|server side public|eupl|european union public|osl-|odbl|cpal|"
    r"cecill(?!-b)|cc[ -]by([ -]nc)?[ -](sa|nc|nd)|share-?alike|non-?commercial|commercial|proprietary|busl|"
    r"business source|elastic|commons clause|polyform|<copyleft>",
    Kind.WEAK: r"mpl|mozilla public|epl-|eclipse public|cddl|<weak>",
    Kind.PERMISSIVE: r"(mit|0?bsd|apache|isc|psf|zlib|x11|unlicense|hpnd|ncsa|postgresql|blueoak)(?![a-z])|"
    r"python software foundation|python-2\.0|cc0|cc-by-\d|bsl-1\.0|boost|public domain|<permissive>",
}
_EXCEPTION = r"\b(with|having)\b.*\bexception"
_OR = r"\s+or\s+(?!\(?(?:any|at|later|lesser|newer|greater|above)\b)"


def classify(licence: str) -> Kind:
    """Judge an SPDX expression or the free text of a licence field: OR offers a choice, AND binds to both."""
    text = licence.lower()
    while group := re.search(r"\(([^()]*)\)", text):  # innermost first, replaced by its verdict
        text = f"{text[: group.start()]} <{classify(group[1]).name.lower()}> {text[group.end() :]}"
    alternatives = re.split(_OR, text)
    return min(max(_term(term) for term in re.split(r"\s+and\s+", choice)) for choice in alternatives)


def _term(text: str) -> Kind:
    found = [kind for kind, words in _WORDS.items() if re.search(rf"(?<![a-z])({words})", text)]
    kind = max(found, default=Kind.UNKNOWN)
    return Kind.WEAK if kind is Kind.COPYLEFT and re.search(_EXCEPTION, text) else kind


def licence_of(package: Distribution) -> str:
    """Return the declared licence: the SPDX expression, else the field, with the classifiers where they say worse."""
    expression, fields, marks = (
        package.metadata.get_all(name) or [] for name in ("License-Expression", "License", "Classifier")
    )
    if expression:
        return str(expression[0])
    field = next((line.strip() for text in fields for line in str(text).splitlines() if line.strip()), "")
    paths = [str(mark).split(" :: ") for mark in marks]
    names = " AND ".join(path[-1] for path in paths if path[0] == "License" and path[-1] != "OSI Approved")
    if classify(field) is Kind.UNKNOWN:
        return names or field or "not declared"
    if not names or re.search(_OR, field.lower()) or classify(names) <= classify(field):
        return field
    return f"{field} AND {names}"


def walk(name: str, extras: frozenset[str], found: dict[str, Distribution], missing: set[str]) -> None:
    """Collect what a package with these extras needs here, and what of it is not installed."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = {(name, extras)}
    while todo:
        seen.add(node := todo.pop())
        try:
            found[node[0]] = distribution(node[0])
        except PackageNotFoundError:
            missing.add(node[0])
        else:
            todo |= set(_needs(found[node[0]], node[1])) - seen


def _needs(package: Distribution, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for need in map(Requirement, package.requires or []):
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield str(canonicalize_name(need.name)), frozenset(need.extras)


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", default="metabayfl", help="installed distribution whose needs are checked")
    root = str(canonicalize_name(parser.parse_args().root))
    found: dict[str, Distribution] = {}
    lost: set[str] = set()
    walk(root, frozenset(), found, lost)
    bad = [f"{name}: not installed, so its licence is unknown" for name in sorted(lost)]
    for extra in found[root].metadata.get_all("Provides-Extra") or [] if root in found else []:
        absent: set[str] = set()
        walk(root, frozenset({str(extra)}), found, absent)
        if absent - lost:
            print(f"extra {extra}: not checked, as not installed: {', '.join(sorted(absent - lost))}")
    for name, package in sorted(found.items()):
        licence = licence_of(package)
        kind = classify(licence)
        print(f"{name:28} {package.version:16} {licence}{'  [' + ALLOWED[name] + ']' if name in ALLOWED else ''}")
        if kind > (Kind.WEAK if name in ALLOWED else Kind.PERMISSIVE):
            bad.append(f"{name} {package.version}: {kind.name.lower()} licence: {licence}")
    print("\n".join(["", *bad] if bad else ["", f"{len(found)} packages, all permissive or allowed by name"]))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
