"""The documents are true: paths exist, links lead somewhere, and docs/reference.md is what the code says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from ort_zero.cli.main import make_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "ort_zero").glob("**/README.md")])
DOORS = ("ort_zero", "ort_zero.checkpoint", "ort_zero.hooks")
TOP = {path.name for path in ROOT.iterdir()} - {"build", "dist", "out"}


def prose_of(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as forges make them."""
    titles = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            found.append(link)
    return found


def wrong_paths(page: Path) -> list[str]:
    """Return the paths below the repository, or below ort_zero, that a page names in its text and that do not exist."""
    found = []
    for code in re.findall(r"`([^`\n]+)`", prose_of(page)):
        # "runtime/operators/symbolics.py: TABLE", "tests/unit/test_log.py::test_x"; braces and stars name several
        for name in re.findall(r"(?<![\w./-])[\w.*{},-]+(?:/[\w.*{},-]+)+/?|\b[\w*]+\.py\b", code.split("::")[0]):
            if name.split("/")[0] in TOP:
                bases = [ROOT]
            elif name.endswith(".py") or name.split("/")[0] in SUBPACKAGES:
                bases = [ROOT / "ort_zero", page.parent]
            else:
                continue
            for one in expanded(name.rstrip("/")):
                # also the end of a path: "collect/writer.py", "peak_memory.py"
                if not any(list(base.glob(pattern)) for base in bases for pattern in (one, f"**/{one}")):
                    found.append(one)
    return found


SUBPACKAGES = {path.name for path in (ROOT / "ort_zero").iterdir() if path.is_dir() and path.name != "__pycache__"}


def expanded(name: str) -> list[str]:
    """Return the paths that ``a/{b,c}.py`` stands for."""
    braces = re.search(r"\{([^{}]*)\}", name)
    if not braces:
        return [name]
    return [one for part in braces[1].split(",") for one in expanded(name.replace(braces[0], part.strip(), 1))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_and_paths_that_a_page_names_exist(page):
    assert not broken_links(page) and not wrong_paths(page)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    assert not [
        page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name}" not in index and page.name != "README.md"
    ]


def test_every_target_of_make_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text())}
    assert named and named <= targets


def script(path: str) -> ModuleType:
    """Return a script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return script("docs/make_reference.py")


STALE = "docs/reference.md is not what the code says: run `python docs/make_reference.py`, commit the page"


def test_the_reference_has_section_variables_and_commands_as_the_code(reference):
    page = (ROOT / "docs/reference.md").read_text()
    for part in (reference.section(), reference.environment(), reference.commands()):
        assert part in page, STALE


@pytest.mark.seconds
def test_the_reference_is_what_the_code_says(reference):
    assert (ROOT / "docs/reference.md").read_text() == reference.page(), STALE


@pytest.mark.parametrize("door", DOORS)
def test_a_name_that_no_door_offers_is_an_attribute_error(door):
    module = importlib.import_module(door)
    with pytest.raises(AttributeError, match=f"module '{door}' has no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_troubleshooting_has_the_texts_of_the_code():
    texts = []
    for path in (ROOT / "ort_zero").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    code = "\n".join(texts)
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("## No message")[0]
    messages = [
        code for row in re.findall(r"^\| (`.+?`) \|[^|]+\|[^|]+\|$", page, re.M) for code in row.split("`")[1::2]
    ]
    assert len(messages) > 20
    parts = [part.strip() for message in messages for part in message.split("...")]
    assert [part for part in parts if part and part not in code] == []


def commands_of(page: Path) -> list[str]:
    """Return the command lines of ort-zero in the code blocks of a page."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    lines = "\n".join(text for language, text in blocks if language in ("bash", "sh")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if re.search(r"(^|-m )(ort-zero|ort_zero) ", line)]
    return [shlex.join(command_of(line)) for line in words if line[0] != "$"]


def command_of(words: list[str]) -> list[str]:
    """Return the arguments of ort-zero in a line, up to a pipe or another command."""
    start = next(at for at, word in enumerate(words) if word in ("ort-zero", "ort_zero"))
    return list(itertools.takewhile(lambda word: word not in ("|", "||", "&&", ">"), words[start + 1 :]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_command_of_a_page_is_one_that_ort_zero_takes(page, capsys):
    refused = []
    for command in commands_of(page):
        try:
            make_parser().parse_args(shlex.split(command))
        except SystemExit:
            refused.append((command, capsys.readouterr().err))
    assert refused == []


# -- programs of others ------------------------------------------------------------------------------------------------


CLIENTS = ROOT / "tests/clients"


@pytest.fixture(scope="module")
def programs_page() -> ModuleType:
    return script("tests/clients/programs_page.py")


def test_every_row_is_that_of_a_program(programs_page):
    for path in (CLIENTS / "results").glob("*.json"):
        rows = json.loads(path.read_text())["rows"]
        assert {row["test"] for row in rows} <= programs_page.names_in(CLIENTS / f"{path.stem}.py"), path


def test_the_page_says_what_the_tests_found(programs_page):
    for name, section in (("architectures", programs_page.architectures()), ("programs", programs_page.programs())):
        begin, end = programs_page.MARKS[name]
        assert f"{begin}\n{section}{end}" in programs_page.PAGE.read_text()


# -- figures of benchmarks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return script("benchmarks/bench_check.py")


STORED = {"processor": "AVX2", "margin": 0.1, "cases": {"a": {"benchmark": "step_time.py", "arguments": ["a"]}}}


def test_ratios_of_another_kind_of_processor_are_not_compared(bench):
    with pytest.raises(ValueError, match=r"another processor \(AVX2\), and this one is AVX512"):
        bench.check(STORED, lambda case: {"ratio": 0.1, "processor": "AVX512"}, ["a"])


def test_the_pages_show_what_is_stored(bench):
    stored = json.loads(bench.STORED.read_text())
    for page, figures in ((bench.README, bench.sentence(stored)), (bench.PAGE, bench.table(stored))):
        assert page.read_text() == bench.with_figures(page.read_text(), figures)


def test_the_benchmarks_of_make_are_there():
    (names,) = re.findall(r"^BENCHMARKS := (.+)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert [name for name in names.split() if not (ROOT / f"benchmarks/{name}.py").exists()] == []
