"""The report, opened in a real browser: it shows the comparison, needs no network, and can be worked with."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ort_zero.cli import main as cli
from ort_zero.errors import StatisticsError
from ort_zero.statistics.compare.comparison import ComparedRecord, Comparison, FirstDivergence
from ort_zero.statistics.compare.report import check_target, write_report
from ort_zero.statistics.records import Phase, RunInfo

MODULES, STEPS, RANKS = 60, 12, 2
BAD_MODULE, BAD_STEP, BAD_RANK = 23, 4, 1
EVIL = "<script>document.title='evil'</script><b title=\"x'&y\">"
"""Name of a module: user data."""
SHOTS = os.environ.get("ORT_ZERO_REPORT_SHOTS")
"""Folder for pictures of what the browser shows; none are taken without."""


def module_name(number: int) -> str:
    if number == 40:
        return f"transformer.{EVIL}"
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp")
    return f"transformer.h.{number // 6}.{parts[number % 6]}"


def side(rng: random.Random, order: int, **changes) -> dict:
    scale = math.exp(rng.uniform(-3, 3))
    return {
        "shape": (8, 128, 256),
        "dtype": "float32",
        "elements": 262144,
        "min": -4 * scale,
        "max": 4.1 * scale,
        "mean": 1e-3 * scale,
        "std": scale,
        "abs_mean": 0.8 * scale,
        "l2": 512 * scale + order,
        "negative": 130000 + order,
        "positive": 132144 - order,
        "zero": 0,
        "nan": 0,
        "inf": 0,
        "first": (scale, -scale),
    } | changes


def series(step: int, rank: int, seed: int = 0, modules: int = MODULES, same: bool = False) -> list[ComparedRecord]:
    return [r for phase in Phase for r in of_phase(step, rank, phase, seed, modules, same)]


def of_phase(step: int, rank: int, phase: Phase, seed: int, modules: int, same: bool) -> Iterator[ComparedRecord]:
    rng = random.Random(hash((step, rank, int(phase), seed)))
    numbers = range(modules - 1, -1, -1) if phase == Phase.BACKWARD else range(modules)
    tensors = ("weight",) if phase in (Phase.PARAMETER, Phase.PARAMETER_GRADIENT) else ("input", "output")
    for order, (number, tensor) in enumerate((number, tensor) for number in numbers for tensor in tensors):
        bad = not same and rank == BAD_RANK and (step, phase) >= (BAD_STEP, Phase.FORWARD)
        if step == BAD_STEP and phase == Phase.FORWARD:
            bad = bad and (number, tensor) >= (BAD_MODULE, "output")
        error = rng.uniform(1, 9) * (1e-3 if bad else 3e-8)
        if order % 19 == 5 and not bad:
            error = 0.0
        a = side(rng, order)
        b = {**a, "l2": a["l2"] * (1 + error)}
        if bad and number % 17 == 1:
            error = math.nan
            b.update(nan=17, min=math.nan)
        yield ComparedRecord(
            step=step, rank=rank, phase=phase, order=order, module=module_name(number), occurrence=1, tensor=tensor,
            kind="" if not bad else "nan" if math.isnan(error) else "numeric", error=error,
            tolerance=2e-6 * (1 + 0.3 * math.sin(order / 7)), inherited=5e-8, a=a, b=b,
        )  # fmt: skip


def info(path: str, backend: str) -> RunInfo:
    return RunInfo(
        path=path, run_id="7f3a", backend=backend, world_size=RANKS, zero_stage=1, dtype="float32",
        model="GPT2LMHeadModel", steps=tuple(range(STEPS)),
    )  # fmt: skip


def comparison(same: bool = False, modules: int = MODULES, steps: int = STEPS) -> Comparison:
    order = [BAD_STEP, BAD_STEP - 1, BAD_STEP + 1]
    order += [step for step in range(steps) if step not in order]
    found = [series(step, rank, modules=modules, same=same) for step in order[:steps] for rank in range(RANKS)]
    verdict = FirstDivergence(same=True, text="No record differs by more than rounding explains.")
    differences = []
    if not same:
        first = next(record for record in found[BAD_RANK] if record.kind)
        differences = [dataclasses.replace(first, order=n, error=math.nan if n == 2 else n) for n in range(14)]
        text = f"From step {BAD_STEP} on rank {BAD_RANK} differs: {first.module} adds an error of its own."
        verdict = FirstDivergence(same=False, module=first.module, direction="forward", difference=first, text=text)
    return Comparison(
        a=info("runs/pt_out", "torch"),
        b=info("runs/ort_out", "onnxruntime"),
        rtol="auto",
        verdict=verdict,
        steps=tuple(range(STEPS)),
        records=sum(map(len, found)),
        counts={} if same else {"numeric": sum(r.kind == "numeric" for s in found for r in s), "nan": 9},
        differences=differences,
        notes=[f"the module {EVIL} is called in the second run alone"],
        series=found,
    )


# --- without a browser ---------------------------------------------------------------------------------------------


def test_the_file_of_a_toy_is_one_small_file(tmp_path):
    path = write_report(comparison(steps=3), tmp_path / "report.html")
    assert os.listdir(tmp_path) == ["report.html"] and path.stat().st_size < 300_000
    assert len(unpacked(path.read_text(encoding="utf-8"))["groups"]) == 3 * RANKS
    head = path.read_text(encoding="utf-8").split("<script>")[0]
    assert "Content-Security-Policy" in head and EVIL not in head and "&lt;script&gt;" in head


@pytest.mark.seconds
def test_large_comparisons_leave_out_what_is_far_from_the_verdict(tmp_path):
    path = write_report(comparison(modules=1200, steps=6), tmp_path / "report.html")
    assert path.stat().st_size < 700_000
    text = path.read_text(encoding="utf-8")
    assert "leaves out" in text
    kept = unpacked(text)
    assert (kept["groups"][0]["step"], kept["groups"][0]["rank"]) == (BAD_STEP, BAD_RANK)


def unpacked(text: str) -> dict:
    packed = text.split('<script id="payload" type="application/octet-stream">')[1].split("</script>")[0]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_a_comparison_without_series_still_has_a_verdict(tmp_path):
    path = write_report(dataclasses.replace(comparison(same=True), series=[]), tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    assert "The runs are the same" in text and "no records to draw" in text and len(text) < 50_000


def test_only_a_report_is_written_over(tmp_path):
    target = tmp_path / "report.html"
    write_report(dataclasses.replace(comparison(), series=[]), target)
    write_report(dataclasses.replace(comparison(same=True), series=[]), target)
    assert "The runs are the same" in target.read_text(encoding="utf-8")
    (tmp_path / "thesis.html").write_text("<html>")
    with pytest.raises(StatisticsError, match="thesis.html exists and is no report"):
        write_report(comparison(), tmp_path / "thesis.html")
    with pytest.raises(StatisticsError, match="is a folder; name a file"):
        check_target(tmp_path)
    with pytest.raises(StatisticsError, match="is no folder"):
        check_target(tmp_path / "nowhere" / "report.html")
    with pytest.raises(StatisticsError, match="cannot write"):
        write_report(dataclasses.replace(comparison(), series=[]), "/proc/report.html")
    assert (tmp_path / "thesis.html").read_text() == "<html>" and len(os.listdir(tmp_path)) == 2


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch):
    """Makes the command find a comparison without reading any run."""
    asked = {}
    module = type(sys)("ort_zero.statistics.compare.compare_runs")

    def give(found):
        def compare(a, b, **options):
            asked.update(a=a, b=b, **options)
            return found

        module.compare = compare
        monkeypatch.setitem(sys.modules, "ort_zero.statistics.compare.compare_runs", module)
        return asked

    return give


def test_the_command_says_the_verdict_first(compared, capsys):
    asked = compared(comparison())
    assert cli.main(["stats", "compare", "x", "y", "--rtol", "1e-3", "--reference", "z"]) == 1
    assert asked == {"a": "x", "b": "y", "rtol": 1e-3, "reference": "z", "progress": True}
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("differs: From step 4 on rank 1 differs: transformer.h.3.mlp adds")
    assert "a: runs/pt_out (torch, GPT2LMHeadModel, float32, ZeRO-1, 2 ranks, steps 0 to 11)" in lines
    assert any(line.startswith("compared: ") and "numeric, 9 nan" in line for line in lines)
    assert any(line.startswith("note: the module") for line in lines) and captured.err == ""
    (start,) = (i for i, line in enumerate(lines) if line.startswith("step  rank"))
    table = lines[start + 1 : start + 11]
    assert len({line.index("transformer.h.3.mlp") for line in table}) == 1 and " nan " in table[2]
    assert lines[start + 11].startswith("... and ") and "--html FILE" in lines[start + 11]


def test_the_command_says_same_with_status_0(compared, capsys):
    asked = compared(comparison(same=True))
    assert cli.main(["stats", "compare", "x", "y"]) == 0 and asked["rtol"] == "auto"
    out = capsys.readouterr().out
    assert out.startswith("same: No record differs") and "none differs" in out and "step  rank" not in out


def test_the_command_gives_json_that_every_reader_takes(compared, capsys):
    compared(comparison())
    assert cli.main(["stats", "compare", "x", "y", "--json"]) == 1

    def refuse(name):
        pytest.fail(f"{name} is no JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["same"] is False and found["verdict"]["difference"]["phase"] == "forward"
    assert found["a"]["backend"] == "torch" and found["differences"][2]["error"] == "nan" and "series" not in found


def test_the_command_writes_the_report(compared, tmp_path, capsys):
    compared(comparison(steps=1, modules=30))
    target = tmp_path / "r.html"
    assert cli.main(["stats", "compare", "x", "y", "--html", str(target)]) == 1
    assert capsys.readouterr().out.endswith(f"report: {target}\n") and target.exists()


def test_a_bad_target_is_found_before_the_work(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "ort_zero.statistics.compare.compare_runs", type(sys)("empty"))
    sys.modules["ort_zero.statistics.compare.compare_runs"].compare = lambda *a, **k: pytest.fail("must not be asked")
    (tmp_path / "mine.html").write_text("x")
    assert cli.main(["stats", "compare", "x", "y", "--html", str(tmp_path / "mine.html")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "exists and is no report" in captured.err


def test_a_missing_package_is_one_line(tmp_path):
    package = "jinja2"
    code = (
        f"import sys; sys.modules[{package!r}] = None\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_statistics_report as t\nfrom ort_zero.cli.main import main\n"
        "module = sys.modules['ort_zero.statistics.compare.compare_runs'] = type(sys)('compare')\n"
        "module.compare = lambda *a, **k: t.comparison(steps=1, modules=30)\nsys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", code, "stats", "compare", "x", "y", "--html", str(tmp_path / "r.html")]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"ort-zero stats compare: {package} is not installed: pip install 'ort-zero[statistics]'\n"


# --- in a browser --------------------------------------------------------------------------------------------------


def find_browser(may_lack: bool) -> tuple[str, str]:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = next(filter(None, map(shutil.which, ("chromedriver", "chromium.chromedriver"))), None)
    if not browser or not driver:
        lacks = "no headless browser: apt-get install chromium chromium-driver"
        pytest.skip(lacks) if may_lack else pytest.fail(lacks, pytrace=False)
    return browser, driver


@pytest.fixture(scope="module")
def browser(pytestconfig):
    """A headless Chromium that logs what it requests and what goes wrong on the page."""
    binary, driver = find_browser(may_lack=pytestconfig.getoption("--without-torch"))
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

    def shot(self, name: str) -> None:
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            self.browser.save_screenshot(str(Path(SHOTS) / f"{name}.png"))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    return {
        "differs": write_report(comparison(steps=3), folder / "differs.html"),
        "same": write_report(comparison(same=True, steps=3), folder / "same.html"),
    }


@pytest.fixture
def page(browser, files) -> Page:
    return Page(browser, files["differs"])


def test_the_page_opens_without_errors_and_without_network(page):
    page.hover("forward", 3)
    page.click("#theme")
    assert [entry for entry in page.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    asked = [url for url in page.requests() if not url.startswith(("data:", "blob:"))]
    assert asked == [page.url]


def test_the_verdict_is_on_top(page):
    page.shot("1_top")
    text = page.text("#verdict")
    assert "First divergence: transformer.h.3.mlp" in text and "step 4" in text and "rank 1" in text
    assert "forward" in text and "From step 4 on rank 1 differs" in text
    box = page.js("const b = document.querySelector('#verdict').getBoundingClientRect(); return [b.top, b.bottom]")
    assert 0 <= box[0] and box[1] < 500
    red, green, _ = (int(part) for part in page.js(
        "return getComputedStyle(document.querySelector('#verdict h2')).color.match(/\\d+/g)"
    ))  # fmt: skip
    assert red > 2 * green


def test_names_are_shown_as_they_are(page):
    assert page.browser.title.startswith("differs at transformer.h.3.mlp: pt_out against ort_out")
    assert EVIL in page.text(".notes")
    place = 80  # input of module 40
    assert f"transformer.{EVIL}" in page.hover("forward", place)
    page.js("const f = document.getElementById('filter'); f.value = 'evil'; f.dispatchEvent(new Event('input'))")
    assert set(page.column(4)) == {f"transformer.{EVIL}"} and page.browser.title.startswith("differs")


def test_every_record_of_the_step_is_a_point(page):
    for phase, each in (("forward", 2), ("backward", 2), ("parameter", 1), ("gradient", 1)):
        assert page.points(phase) == each * MODULES, phase
    assert page.js("return document.querySelectorAll('.first').length") == 3, "a step, a rank, a point"
    assert page.js("return document.querySelectorAll('#charts .chart').length") == 4
    assert "step 4, rank 1, 120 records" in page.text("#charts")


def test_what_is_no_number_is_at_the_top_edge_and_zero_at_the_bottom(page):
    code = """
        const at = (one) => Math.round(one.transform.baseVal[0].matrix.f);
        const all = (query) => [...document.querySelectorAll("#chart-forward " + query)];
        const ticks = Object.fromEntries(all(".y").map((one) => [one.textContent, Number(one.getAttribute("y")) - 4]));
        return [all(".bad").map(at), all("circle.point").map(at), ticks];"""
    bad, within, ticks = page.js(code)
    heights = [ticks[name] for name in ("no number", "1e-2", "1e-6", "0")]
    assert heights == sorted(heights) and bad.count(ticks["no number"]) == 4 and within.count(ticks["0"]) == 3
    assert all(y == ticks["no number"] or ticks["1e-2"] <= y < ticks["1e-6"] for y in bad)
    assert all(y > ticks["1e-6"] for y in within)


def test_a_point_is_marked_if_and_only_if_it_is_above_the_line(page):
    code = """
        const line = document.querySelector("#chart-backward .tolerance").getAttribute("d").match(/[ML][^h]+/g);
        return [...document.querySelectorAll("#chart-backward .point")].map((one, i) =>
          [one.classList.contains("bad"), one.transform.baseVal[0].matrix.f < Number(line[i].split(" ")[1])]);"""
    pairs = page.js(code)
    assert len(pairs) == 2 * MODULES and all(marked == above for marked, above in pairs) and any(m for m, _ in pairs)


def test_hovering_shows_the_record_and_both_sides(page):
    bad = 2 * BAD_MODULE + 1
    text = page.hover("forward", bad)
    page.shot("2_hover")
    for part in ("transformer.h.3.mlp", "output", "step 4, rank 1", "tolerance", "numeric", "(8, 128, 256)", "float32"):
        assert part in text, part
    assert text.count("262,144") == 2 and "abs_mean" in text
    assert "transformer.h.9.mlp" in page.hover("backward", 0), "the gradient that is computed first comes first"


def test_the_step_and_rank_selectors_change_the_charts_and_the_table(page):
    assert page.text("#steps button[aria-pressed=true]") == "4" and page.text("#ranks button[aria-pressed=true]") == "1"
    bad = page.js("return [...document.querySelectorAll('#steps button.bad')].map((b) => b.dataset.value)")
    assert bad == [str(BAD_STEP), str(BAD_STEP + 1)]
    page.click("#steps button[data-value='3']")
    assert "step 3, rank 1, 120 records" in page.text("#charts") and set(page.column(0)) == {"3"}
    assert page.points("forward") == 2 * MODULES
    page.click("#ranks button[data-value='0']")
    assert "step 3, rank 0, 120 records" in page.text("#charts") and set(page.column(1)) == {"0"}
    page.click("#steps button[data-value='5']")
    assert page.js("return document.querySelectorAll('#table tr.bad').length") == 0
    assert len(page.js("return [...document.querySelectorAll('#steps button')]")) == 3


def test_a_click_on_a_header_sorts(page):
    page.click("#table th:nth-child(9)")
    shown = page.column(8)
    first = [value for value in shown if value != "nan"]
    assert shown[: shown.count("nan")] == ["nan"] * shown.count("nan") and shown.count("nan") > 3
    assert [float(v) for v in first] == sorted((float(v) for v in first), reverse=True) and float(first[0]) > 1e-3
    page.js("document.querySelector('#records').scrollIntoView()")
    page.shot("3_table")
    page.click("#table th:nth-child(9)")
    up = [float(value) for value in page.column(8)]
    assert up[:9] == sorted(up[:9]) and up[0] == 0
    assert page.js("return document.querySelector('#table th:nth-child(9)').getAttribute('aria-sort')") == "ascending"
    page.click("#table th:nth-child(5)")
    names = page.column(4)
    assert names[0] == "transformer." + EVIL or names[0] == "transformer.h.0.attn.c_attn"
    assert names.index("transformer.h.2.mlp") > names.index("transformer.h.1.mlp")


def test_the_filters_narrow_the_table(page):
    records = 6 * MODULES
    assert page.text("#count") == f"{records} records" and len(page.column(0)) == records
    page.click("#only")
    assert set(page.column(7)) == {"numeric", "nan"}
    page.click("#everything")
    assert int(page.text("#count").split()[0].replace(",", "")) > 600
    assert len(page.column(0)) == 500 and "the first 500 shown" in page.text("#count")
    code = "const f = document.getElementById('filter'); f.value = arguments[0]; f.dispatchEvent(new Event('input'))"
    page.js(code, "backward h.3 ln_1")
    assert set(page.column(4)) == {"transformer.h.3.ln_1"} and set(page.column(2)) == {"backward"}


def test_a_row_opens_to_both_sides(page):
    page.js("const f = document.getElementById('filter'); f.value = 'h.3.mlp'; f.dispatchEvent(new Event('input'))")
    page.click("#table tbody tr")
    page.js("document.querySelector('#records').scrollIntoView()")
    page.shot("4_details")
    text = page.text("#table tr.details")
    assert "abs_mean" in text and text.count("262,144") == 2
    page.click("#table tbody tr")
    assert not page.js("return document.querySelector('#table tr.details')")


@pytest.mark.parametrize("width", [1280, 800])
def test_nothing_is_wider_than_the_window(page, width):
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
        return [...document.querySelectorAll("#chart-forward .x")].map((one) => {
          const box = one.getBoundingClientRect(); return [box.left, box.right, box.bottom]; })""")
    chart = page.js("return document.getElementById('chart-forward').getBoundingClientRect().bottom")
    assert width / 50 <= len(labels) <= width / 20 and all(label[2] <= chart + 1 for label in labels)
    rights = [label[1] for label in labels]
    assert min(b - a for a, b in zip(rights, rights[1:])) > 12, "labels do not lie upon each other"


def test_dark_follows_the_system_and_the_button(page):
    def background() -> str:
        return page.js("return getComputedStyle(document.body).backgroundColor")

    def axis() -> str:
        return page.js("return getComputedStyle(document.querySelector('#chart-forward .x')).fill")

    light = (background(), axis())
    page.scheme("dark")
    page.js("scrollTo(0, 0)")
    page.shot("5_dark")
    dark = (background(), axis())
    assert dark[0] != light[0] and dark[1] != light[1]
    page.click("#theme")
    assert (background(), axis()) == light


def test_clicking_a_point_finds_its_record(page):
    page.hover("forward", 2 * BAD_MODULE + 1, click=True)
    chosen = page.text("#table tr.chosen")
    assert "transformer.h.3.mlp" in chosen and "output" in chosen and page.text("#table tr.details")


@pytest.mark.seconds
def test_a_report_of_equal_runs_is_green(browser, files):
    page = Page(browser, files["same"])
    page.shot("6_same")
    assert "The runs are the same" in page.text("#verdict") and "none differs" in page.text(".facts")
    red, green, _ = (int(part) for part in page.js(
        "return getComputedStyle(document.querySelector('#verdict h2')).color.match(/\\d+/g)"
    ))  # fmt: skip
    assert green > 2 * red
    assert page.js("return document.querySelectorAll('#steps button.bad').length") == 0
    assert page.points("forward") == 2 * MODULES


def test_without_a_browser_the_test_fails_and_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium chromium-driver"):
        find_browser(may_lack=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium chromium-driver"):
        find_browser(may_lack=True)
