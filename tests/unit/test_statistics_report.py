"""The report, opened in a real browser: it shows the comparison, needs no network, and can be worked with."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import pytest
import torch
from statistics_models import rounded
from statistics_tables import train, write
from torch import nn

from ort_zero.cli import main as cli
from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare import report
from ort_zero.statistics.compare.compare_runs import compare_runs
from ort_zero.statistics.compare.comparison import Comparison
from ort_zero.statistics.compare.report import check_target, write_report
from ort_zero.statistics.records import Phase

STEPS, RANKS = 3, 2
BAD = "h.3.0"
EVIL = "<script>document['title']='evil'</script><b title=\"x'&y\">"
"""Name of a module: user data."""


class Toy(nn.Module):
    """Blocks, and a head with a name that is not harmless in a page."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))
        self.add_module(EVIL, nn.Linear(16, 1))

    def forward(self, x):
        for block in self.h:
            x = x + block(x)
        return (self.get_submodule(EVIL)(x) ** 2).mean()


def rows(step, rank):
    return dict(x=torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank)))


def faulty(model, step):
    if step == 1:
        rounded(model.get_submodule(BAD))


@functools.cache
def runs():
    """Return a run, a correct run in other roundings, and one with a fault from step 1 on."""
    named = [dict(name="pt_out"), dict(name="ort_out", precise=True), dict(name="bad_out", before=faulty)]
    return [train(Toy, rows, steps=STEPS, ranks=RANKS, **options) for options in named]


@functools.cache
def comparison(same: bool = False) -> Comparison:
    right, other, wrong = runs()
    found = compare_runs(right, other if same else wrong)
    assert found.verdict.same == same and len(found.series) == STEPS * RANKS
    # one value without a number, and a note of user data
    series = [list(records) for records in found.series]
    if not same:
        first = found.verdict.difference
        assert (first.module, first.step, first.rank) == (BAD, 1, 0)
        of_first = next(s for s in series if (s[0].step, s[0].rank) == (first.step, first.rank))
        bad = max(i for i, one in enumerate(of_first) if one.kind and one.phase == Phase.FORWARD)
        of_first[bad] = dataclasses.replace(of_first[bad], kind="nan", error=math.nan)
    return dataclasses.replace(found, series=series, notes=[*found.notes, f"the module {EVIL} is user data"])


def unpacked(text: str) -> dict:
    packed = text.split('<script id="payload" type="application/octet-stream">')[1].split("</script>")[0]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


# --- the file ------------------------------------------------------------------------------------------------------


def test_the_file_of_a_toy_is_one_small_file(tmp_path):
    path = write_report(comparison(), tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["report.html"] and len(text) < 150_000
    assert len(unpacked(text)["groups"]) == STEPS * RANKS and "leaves out" not in text
    head = text.split("<script>")[0]
    assert "Content-Security-Policy" in head and EVIL not in head and "&lt;script&gt;" in head


def test_large_comparisons_leave_out_what_is_far_from_the_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_BYTES", 1000)
    text = write_report(comparison(), tmp_path / "report.html").read_text(encoding="utf-8")
    (kept,) = unpacked(text)["groups"]
    assert (kept["step"], kept["rank"]) == (1, 0) and "leaves out 5 pairs of step and rank" in text


def test_only_a_report_is_written_over(tmp_path):
    target = tmp_path / "report.html"
    for same in (False, True):
        write_report(dataclasses.replace(comparison(same), series=[]), target)
    text = target.read_text(encoding="utf-8")
    assert "The runs are the same" in text and "no records to draw" in text and len(text) < 50_000
    (tmp_path / "thesis.html").write_text("<html>")
    for place, message in (
        (tmp_path / "thesis.html", "thesis.html exists and is no report"),
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "nowhere" / "report.html", "is no folder"),
    ):
        with pytest.raises(StatisticsError, match=message):
            check_target(place)
    with pytest.raises(StatisticsError, match="cannot write"):
        write_report(comparison(), "/proc/report.html")
    assert (tmp_path / "thesis.html").read_text() == "<html>" and len(os.listdir(tmp_path)) == 2


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    return [write(run, tmp_path_factory.mktemp("runs") / run.name) for run in runs()]


def test_the_command_says_the_verdict_first(folders, tmp_path, capsys):
    right, other, wrong = folders
    assert cli.main(["stats", "compare", right, other]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("same: ") and "none differs" in said.out and "step  rank" not in said.out
    assert cli.main(["stats", "compare", right, wrong]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"differs: step 1, rank 0, forward: {BAD} adds the error: ")
    assert f"a: {right} (torch, Model, float32, ZeRO-0, 2 ranks, steps 0 to 2)" in lines
    start = next(i for i, line in enumerate(lines) if line.startswith("step  rank"))
    assert lines[start + 1].split()[:6] == ["1", "0", "forward", BAD, "output", "numeric"]
    assert len({line.index(" numeric") for line in lines[start + 1 : start + 11]}) == 1
    assert lines[start + 11].startswith("... and ") and "--html FILE" in lines[start + 11]
    target = tmp_path / "r.html"
    assert cli.main(["stats", "compare", right, wrong, "--html", str(target)]) == 1
    assert capsys.readouterr().out.endswith(f"report: {target}\n") and target.exists()
    assert cli.main(["stats", "compare", right, wrong, "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert found["same"] is False and found["verdict"]["difference"]["phase"] == "forward" and "series" not in found


def test_what_hinders_a_report_is_found_before_the_work(tmp_path, capsys):
    (tmp_path / "mine.html").write_text("x")
    assert cli.main(["stats", "compare", "x", "y", "--html", str(tmp_path / "mine.html")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "exists and is no report" in captured.err


def test_a_missing_package_is_one_line(folders, tmp_path):
    code = "import sys; sys.modules['jinja2'] = None; from ort_zero.cli.main import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, "stats", "compare", *folders[:2], "--html", str(tmp_path / "r.html")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "ort-zero stats compare: jinja2 is not installed: pip install jinja2\n"


# --- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(pytestconfig):
    """A headless Chromium that logs what it requests and what goes wrong on the page."""
    names = (("chromium", "chromium-browser", "google-chrome"), ("chromedriver", "chromium.chromedriver"))
    binary, driver = (next(filter(None, map(shutil.which, each)), None) for each in names)
    if not binary or not driver:
        lacks = "no headless browser: apt-get install chromium chromium-driver"
        pytest.skip(lacks) if pytestconfig.getoption("--without-torch") else pytest.fail(lacks, pytrace=False)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    profile = tempfile.mkdtemp()
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars", "window-size=1280,800",
        f"user-data-dir={profile}",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    opened.set_script_timeout(20)
    yield opened
    opened.quit()
    shutil.rmtree(profile, ignore_errors=True)


class Page:
    """A report in the browser."""

    def __init__(self, browser, path: Path):
        self.browser = browser
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.scheme("light")
        self.size(1280, 800)
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.get(path.as_uri())
        self.url = path.as_uri()
        self.wait("document.body.dataset.ready === 'yes'")

    def js(self, code: str, *arguments):
        return self.browser.execute_script(code, *arguments)

    def wait(self, condition: str) -> None:
        end = time.monotonic() + 20
        while not self.js(f"return Boolean({condition})"):
            assert time.monotonic() < end, (condition, self.browser.get_log("browser"))
            time.sleep(0.05)

    def scheme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def text(self, selector: str) -> str:
        return self.js("return document.querySelector(arguments[0]).innerText", selector)

    def click(self, selector: str) -> None:
        self.js("document.querySelector(arguments[0]).click()", selector)

    def requests(self) -> list[str]:
        sent = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        return [m["params"]["request"]["url"] for m in sent if m["method"] == "Network.requestWillBeSent"]

    def points(self, phase: str) -> int:
        return self.js("return document.querySelectorAll(arguments[0]).length", f"#chart-{phase} .point")

    def column(self, number: int) -> list[str]:
        code = "return [...document.querySelectorAll('#table tbody tr')].map((r) => r.cells[arguments[0]].innerText)"
        return self.js(code, number)

    def hover(self, phase: str, place: int, click: bool = False) -> str:
        """Move the mouse over the record at a place of a chart, and return what it shows."""
        code = """
            const point = document.querySelectorAll(`#chart-${arguments[0]} .point`)[arguments[1]];
            point.scrollIntoView({ block: "center", inline: "center" });
            const { left, top, width, height } = point.getBoundingClientRect();
            return [left + width / 2, top + height / 2];"""
        x, y = self.js(code, phase, place)
        for kind in ("mouseMoved", *(("mousePressed", "mouseReleased") if click else ())):
            event = {"type": kind, "x": x, "y": y, "button": "left" if click else "none", "clickCount": 1}
            self.browser.execute_cdp_cmd("Input.dispatchMouseEvent", event)
        self.wait("document.querySelector('#table tr.chosen')" if click else "!document.getElementById('tip').hidden")
        return self.text("#tip")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("reports")
    return {same: write_report(comparison(same), folder / f"{same}.html") for same in (False, True)}


@pytest.fixture
def page(browser, files) -> Page:
    return Page(browser, files[False])


def of_phase(phase: Phase, step: int = 1, rank: int = 0) -> list:
    """Return the records of a chart, in order."""
    (found,) = [series for series in comparison().series if (series[0].step, series[0].rank) == (step, rank)]
    return [record for record in found if record.phase == phase]


def place_of(module: str, tensor: str) -> int:
    """Return the number of a point of the forward chart."""
    names = [(record.module, record.tensor) for record in of_phase(Phase.FORWARD)]
    return names.index((module, tensor))


def colour_of_verdict(page: Page) -> list[int]:
    code = "return getComputedStyle(document.querySelector('#verdict h2')).color.match(/\\d+/g)"
    return [int(part) for part in page.js(code)]


def type_into_filter(page: Page, text: str) -> None:
    code = "const f = document.getElementById('filter'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))"
    page.js(code, text)


def test_the_page_opens_offline_with_the_verdict_on_top(page):
    box = page.js("const b = document.querySelector('#verdict').getBoundingClientRect(); return [b.top, b.bottom]")
    page.hover("forward", 3)
    page.click("#theme")
    assert [entry for entry in page.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert [url for url in page.requests() if not url.startswith(("data:", "blob:", "chrome:"))] == [page.url]
    text = page.text("#verdict")
    for words in (f"First divergence: {BAD}", "step 1", "rank 0", "forward", f"{BAD} adds the error"):
        assert words in text, words
    red, green, _ = colour_of_verdict(page)
    assert 0 <= box[0] and box[1] < 500 and red > 2 * green


def test_names_are_shown_as_they_are(page):
    assert page.browser.title.startswith(f"differs at {BAD}: pt_out against bad_out") and EVIL in page.text(".notes")
    assert EVIL in page.hover("forward", place_of(EVIL, "output"))
    type_into_filter(page, "evil")
    assert set(page.column(4)) == {EVIL} and page.browser.title.startswith("differs")


def test_every_record_is_a_point_at_its_height(page):
    names = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.PARAMETER: "parameter",
             Phase.PARAMETER_GRADIENT: "gradient"}  # fmt: skip
    for phase, name in names.items():
        assert page.points(name) == len(of_phase(phase)) > 0, name
    assert page.js("return document.querySelectorAll('.first').length") == 3, "a step, a rank, a point"
    assert f"step 1, rank 0, {len(of_phase(Phase.FORWARD))} records" in page.text("#charts")
    code = """
        const line = document.querySelector("#chart-forward .tolerance").getAttribute("d").match(/[ML][^h]+/g);
        return [...document.querySelectorAll("#chart-forward .point")].map((one, i) =>
          [one.classList.contains("bad"), one.transform.baseVal[0].matrix.f, Number(line[i].split(" ")[1])]);"""
    points = page.js(code)
    assert all(bad == (height < limit) for bad, height, limit in points) and any(bad for bad, _, _ in points)
    (top,) = page.js("""return [...document.querySelectorAll("#chart-forward .y")].filter(
        (one) => one.textContent === "no number").map((one) => Number(one.getAttribute("y")) - 4)""")
    at_top = [record.kind for record, (_, height, _) in zip(of_phase(Phase.FORWARD), points) if round(height) == top]
    assert at_top == ["nan"]


def test_a_record_shows_both_sides_and_is_found_in_the_table(page):
    text = page.hover("forward", place_of(BAD, "output"))
    for part in (BAD, "output", "step 1, rank 0", "tolerance", "numeric", "(8, 16)", "float32", "abs_mean"):
        assert part in text, part
    page.hover("forward", place_of(BAD, "output"), click=True)
    assert BAD in page.text("#table tr.chosen") and "abs_mean" in page.text("#table tr.details")
    page.click("#table tr.chosen")
    assert not page.js("return document.querySelector('#table tr.details')")


def test_steps_and_ranks_can_be_chosen(page):
    assert page.text("#steps button[aria-pressed=true]") == "1" and page.text("#ranks button[aria-pressed=true]") == "0"
    bad = page.js("return [...document.querySelectorAll('#steps button.bad')].map((b) => b.dataset.value)")
    assert bad == ["1", "2"]
    page.click("#steps button[data-value='2']")
    page.click("#ranks button[data-value='1']")
    assert "step 2, rank 1" in page.text("#charts") and (set(page.column(0)), set(page.column(1))) == ({"2"}, {"1"})
    page.click("#steps button[data-value='0']")
    assert page.js("return document.querySelectorAll('#table tr.bad').length") == 0


def test_the_table_is_sorted_and_filtered(page):
    records = sum(len(of_phase(phase)) for phase in Phase)
    assert page.text("#count") == f"{records} records" and len(page.column(0)) == records
    page.click("#table th:nth-child(9)")
    errors = page.column(8)
    numbers = [float(value) for value in errors[1:]]
    assert errors[0] == "nan" and numbers == sorted(numbers, reverse=True)
    page.click("#table th:nth-child(9)")
    assert page.js("return document.querySelector('#table th:nth-child(9)').getAttribute('aria-sort')") == "ascending"
    page.click("#only")
    assert set(page.column(7)) == {"numeric", "nan"}
    page.click("#only")
    page.click("#everything")
    total = sum(len(series) for series in comparison().series)
    assert page.text("#count").startswith(f"{total:,} records, the first 500 shown") and len(page.column(0)) == 500
    type_into_filter(page, "backward h.3.0")
    assert set(page.column(4)) == {BAD} and set(page.column(2)) == {"backward"}


@pytest.mark.parametrize("width", [1280, 800])
def test_nothing_is_wider_than_the_window_and_dark_follows_the_system(page, width):
    page.size(width, 800)
    page.browser.refresh()
    page.wait("document.body.dataset.ready === 'yes'")
    code = """
        const over = [...document.querySelectorAll("body *")].filter((one) =>
          !one.closest(".scroll, script") && one.getBoundingClientRect().right > innerWidth + 1);
        return [document.documentElement.scrollWidth, over.map((one) => one.tagName + one.id + "." + one.className)];
        """
    assert page.js(code) == [width, []]
    labels = page.js("""
        return [...document.querySelectorAll("#chart-forward .x")].map((one) => one.getBoundingClientRect().right)""")
    assert min(b - a for a, b in zip(labels, labels[1:])) > 12, "labels do not lie upon each other"
    code = """
        const style = (selector) => getComputedStyle(document.querySelector(selector));
        return [style("body").backgroundColor, style("#chart-forward .x").fill];"""
    light = page.js(code)
    page.scheme("dark")
    assert all(dark != other for dark, other in zip(page.js(code), light))
    page.click("#theme")
    assert page.js(code) == light


def test_a_report_of_equal_runs_is_green(browser, files):
    page = Page(browser, files[True])
    assert "The runs are the same" in page.text("#verdict") and "none differs" in page.text(".facts")
    red, green, _ = colour_of_verdict(page)
    assert green > 2 * red and page.js("return document.querySelectorAll('#steps button.bad').length") == 0
    assert page.points("forward") > 30
